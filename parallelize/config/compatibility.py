"""Which options go together, by what the plug-ins declare: no backend, engine or launcher is known by name here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parallelize.cluster.devices import Gpus
from parallelize.config.options import DTYPES
from parallelize.errors import Fault
from parallelize.plugins import registry
from parallelize.plugins.base import Amp, Backend, Precision

__all__ = ["backends", "contradictions", "dtype_faults", "node_faults", "use"]


def contradictions(parsed: Mapping[str, Any]) -> list[Fault]:
    """Options of one request that exclude each other, as far as no machine has to be asked.

    Args:
        parsed: options by name, parsed; one that is missing has a fault of its own, and contradicts none.
    """
    return [
        fault
        for needs, check in (
            (("gpus", "processes"), _gpus_and_processes),
            (("backend", "processes"), _backend_and_processes),
            (("backend", "num_nodes"), _backend_and_nodes),
            (("gpus", "process_group_backend"), _duplicates),
            (("backend", "amp", "amp_engine"), _backend_and_amp),
            (("gpus", "processes", "amp", "amp_engine"), _cpu_and_amp),
        )
        if parsed.keys() >= set(needs)
        for fault in check(*(parsed[name] for name in needs))
    ]


def _gpus_and_processes(gpus: Gpus | None, processes: int | None) -> Iterator[Fault]:
    if gpus is not None and gpus != Gpus.NONE and processes is not None:
        yield Fault(
            f"{gpus.asked} with processes={processes}",
            "gpus= starts one process per GPU, processes= so many on the CPU: both at once say two things",
            "drop processes= to run on GPUs, or gpus= to run on the CPU",
        )


def _backend_and_processes(backend: Backend, processes: int | None) -> Iterator[Fault]:
    if backend.process_per == "node" and processes is not None and processes > 1:
        yield Fault(
            f"backend={backend.name!r} with processes={processes}",
            f"{backend.name} drives all devices of a node from one process",
            use("processes=1", backends(lambda other: other.process_per == "device")),
        )


def _backend_and_nodes(backend: Backend, num_nodes: int | None) -> Iterator[Fault]:
    if num_nodes is not None and backend.single_node_of is None:
        yield from node_faults(backend, num_nodes)


def node_faults(backend: Backend, num_nodes: int) -> Iterator[Fault]:
    """What is wrong with running a backend on so many nodes."""
    if backend.max_nodes is not None and num_nodes > backend.max_nodes:
        yield Fault(
            f"backend={backend.name!r} with num_nodes={num_nodes}",
            f"{backend.name} spans at most {backend.max_nodes} node(s)",
            use(f"num_nodes={backend.max_nodes}", backends(lambda other: other.max_nodes is None)),
        )


def _duplicates(gpus: Gpus | None, process_group_backend: str | None) -> Iterator[Fault]:
    if gpus is not None and gpus.has_duplicates and process_group_backend != "gloo":
        yield Fault(
            gpus.asked,
            "it names a GPU twice, and NCCL refuses two ranks on one GPU",
            "name each GPU once, or add process_group_backend='gloo' (for tests: several ranks share one GPU)",
        )


def _backend_and_amp(backend: Backend, amp: Amp | None, amp_engine: str) -> Iterator[Fault]:
    if amp is None:
        return
    levels = backend.amp.get(amp_engine, frozenset())
    level = amp.level or registry.get("precision", amp_engine).default_level
    if not levels:
        engines = [name for name, runs in sorted(backend.amp.items()) if runs]
        yield Fault(
            f"backend={backend.name!r} with amp_engine={amp_engine!r}",
            f"{amp_engine} cannot run under {backend.name}",
            use(_any_of("amp_engine", engines), backends(lambda other: bool(other.amp.get(amp_engine)))),
        )
    elif level not in levels:
        yield Fault(
            f"backend={backend.name!r} with amp={level!r}",
            f"under {backend.name} the {amp_engine} engine has the levels {', '.join(sorted(levels))}",
            use(_any_of("amp", sorted(levels)), backends(lambda other: level in other.amp.get(amp_engine, ()))),
        )


def _cpu_and_amp(gpus: Gpus | None, processes: int | None, amp: Amp | None, amp_engine: str) -> Iterator[Fault]:
    if amp is not None and (gpus == Gpus.NONE or (gpus is None and processes is not None)):
        yield from dtype_faults(amp, registry.get("precision", amp_engine), "cpu")


def dtype_faults(amp: Amp, engine: type[Precision], device_type: str) -> Iterator[Fault]:
    """What is wrong with computing in the types of `amp` on devices of a type, by the engine's declared data."""
    if (amp.level or engine.default_level) == "O0":
        return
    known = engine.dtypes.get(device_type)
    if not known:
        yield Fault(
            f"amp_engine={engine.name!r} on {device_type}",
            f"it runs on: {', '.join(sorted(engine.dtypes))}",
            use(f"amp=False on {device_type}", "another amp_engine"),
        )
    elif amp.dtype is not None and amp.dtype not in known:
        usable = sorted(map(_dtype_name, known))
        yield Fault(
            f"amp={_dtype_name(amp.dtype)!r} on {device_type}",
            f"{engine.name} computes on {device_type} in: {', '.join(usable)}",
            use(_any_of("amp", usable), f"amp=False on {device_type}"),
        )


def _dtype_name(dtype: object) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def backends(fits: Callable[[type[Backend]], bool]) -> str:
    """The backends that fit, as an error offers them: "backend='ddp' or 'fsdp'"; empty if none does."""
    return _any_of("backend", [name for name in registry.names("backends") if fits(registry.get("backends", name))])


def use(*offers: str) -> str:
    """A fix that offers what there is: "use amp='O1', or backend='ddp'"."""
    there = [offer for offer in offers if offer]
    return f"use {', or '.join(there)}" if there else "write a plug-in that can (parallelize.plugins.base says how)"


def _any_of(option: str, values: list[str]) -> str:
    return f"{option}={' or '.join(map(repr, values))}" if values else ""
