"""Checks for options that exclude each other; they use the plug-ins' declared capabilities, never their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parallelize.config.gpus import Gpus
from parallelize.config.options import DTYPES, backend_by_device_type
from parallelize.errors import Fault
from parallelize.plugins import registry
from parallelize.plugins.base import Amp, Backend, Precision

__all__ = ["conflicts", "dtype_faults", "matching_backends", "node_faults", "use_any_of"]


def conflicts(parsed: Mapping[str, Any]) -> list[Fault]:
    """Return a Fault for each combination of options that is impossible on every machine.

    Args:
        parsed: option name -> parsed value; without the options that could not be parsed.
    """
    return [
        fault
        for needs, check in (
            (("gpus", "processes"), _gpus_and_processes),
            (("backend", "gpus", "processes"), _backend_and_processes),
            (("backend", "num_nodes"), _backend_and_nodes),
            (("backend", "gpus", "process_group_backend"), _duplicate_gpus),
            (("backend", "amp", "amp_engine"), _backend_and_amp),
            (("gpus", "processes", "amp", "amp_engine"), _cpu_and_amp),
        )
        if parsed.keys() >= set(needs)
        for fault in check(*(parsed[name] for name in needs))
    ]


def _gpus_and_processes(gpus: Gpus | None, processes: int | None) -> Iterator[Fault]:
    if gpus is not None and gpus not in (Gpus.NONE, Gpus.ALL) and processes is not None:
        yield Fault(
            f"{gpus.as_option} with processes={processes}",
            "gpus= starts one process per GPU, and processes= starts processes on the CPU",
            "drop processes= to run on GPUs, or gpus= to run on the CPU, or use gpus='auto': GPUs if there are any",
        )


def _backend_and_processes(backend: Backend, gpus: Gpus | None, processes: int | None) -> Iterator[Fault]:
    if backend.process_per == "node" and gpus != Gpus.ALL and processes is not None and processes > 1:
        yield Fault(
            f"backend={backend.name!r} with processes={processes}",
            f"{backend.name} drives all devices of a node from one process",
            use_any_of("processes=1", matching_backends(lambda other: other.process_per == "device")),
        )


def _backend_and_nodes(backend: Backend, num_nodes: int | None) -> Iterator[Fault]:
    if num_nodes is not None and backend.multi_node_fallback is None:
        yield from node_faults(backend, num_nodes)


def node_faults(backend: Backend, num_nodes: int) -> Iterator[Fault]:
    """Yield a Fault if the backend cannot run on `num_nodes` nodes."""
    if backend.max_nodes is not None and num_nodes > backend.max_nodes:
        yield Fault(
            f"backend={backend.name!r} with num_nodes={num_nodes}",
            f"{backend.name} runs on at most {backend.max_nodes} node(s)",
            use_any_of(f"num_nodes={backend.max_nodes}", matching_backends(lambda other: other.max_nodes is None)),
        )


def _duplicate_gpus(backend: Backend, gpus: Gpus | None, process_group_backend: str | None) -> Iterator[Fault]:
    by_device = {"cuda": "nccl"} if process_group_backend is None else backend_by_device_type(process_group_backend)
    if gpus is None or not gpus.has_duplicates or backend.process_per == "node":
        return
    if by_device.get("cuda") == "nccl":
        yield Fault(
            gpus.as_option,
            "it names a GPU twice, and NCCL refuses two ranks on one GPU",
            "name each GPU once, or add process_group_backend='gloo' (for tests: several ranks share one GPU)",
        )


def _backend_and_amp(backend: Backend, amp: Amp | None, amp_engine: str) -> Iterator[Fault]:
    if amp is None:
        return
    levels = backend.amp.get(amp_engine, frozenset())
    level = amp.level or registry.get("precision", amp_engine).default_level
    if not levels:
        engines = [name for name, supported in sorted(backend.amp.items()) if supported]
        yield Fault(
            f"backend={backend.name!r} with amp_engine={amp_engine!r}",
            f"{amp_engine} cannot run under {backend.name}",
            use_any_of(
                _choices("amp_engine", engines), matching_backends(lambda other: bool(other.amp.get(amp_engine)))
            ),
        )
    elif level not in levels:
        yield Fault(
            f"backend={backend.name!r} with amp={level!r}",
            f"under {backend.name}, the {amp_engine} engine supports the levels {', '.join(sorted(levels))}",
            use_any_of(
                _choices("amp", sorted(levels)), matching_backends(lambda other: level in other.amp.get(amp_engine, ()))
            ),
        )


def _cpu_and_amp(gpus: Gpus | None, processes: int | None, amp: Amp | None, amp_engine: str) -> Iterator[Fault]:
    if amp is not None and (gpus == Gpus.NONE or (gpus is None and processes is not None)):
        yield from dtype_faults(amp, registry.get("precision", amp_engine), "cpu")


def dtype_faults(amp: Amp, engine: type[Precision], device_type: str) -> Iterator[Fault]:
    """Yield a Fault if the precision engine does not support the dtype of `amp` on a type of device."""
    if (amp.level or engine.default_level) == "O0":
        return
    known = engine.dtypes.get(device_type)
    if not known:
        yield Fault(
            f"amp_engine={engine.name!r} on {device_type}",
            f"it runs on: {', '.join(sorted(engine.dtypes))}",
            use_any_of(f"amp=False on {device_type}", "another amp_engine"),
        )
    elif amp.dtype is not None and amp.dtype not in known:
        usable = sorted(map(_dtype_name, known))
        yield Fault(
            f"amp={_dtype_name(amp.dtype)!r} on {device_type}",
            f"{engine.name} computes on {device_type} in: {', '.join(usable)}",
            use_any_of(_choices("amp", usable), f"amp=False on {device_type}"),
        )


def _dtype_name(dtype: object) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def matching_backends(fits: Callable[[type[Backend]], bool]) -> str:
    """Return a text that lists the backends for which `fits` is true: "backend='ddp' or 'fsdp'"; empty if none."""
    return _choices("backend", [name for name in registry.names("backends") if fits(registry.get("backends", name))])


def use_any_of(*alternatives: str) -> str:
    """Return the `fix` text that lists the non-empty alternatives: "use amp='O1', or backend='ddp'"."""
    usable = [each for each in alternatives if each]
    return f"use {', or '.join(usable)}" if usable else "write a plug-in that can (see parallelize.plugins.base)"


def _choices(option: str, values: list[str]) -> str:
    return f"{option}={' or '.join(map(repr, values))}" if values else ""
