"""Parsers of option values, one per option, for Python values and for text from environment variables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from parallelize.cluster.world import World
from parallelize.config.gpus import Gpus, parse_gpus
from parallelize.errors import ConfigError, Fault, did_you_mean
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Amp, Backend, Launcher

__all__ = ["DTYPES", "DURATION_UNITS_S", "FROM_TEXT", "PARSERS", "Options", "backend_by_device_type", "duration"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

DURATION_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,6}(?:\.\d+)?)\s*(s|sec|min|h|d)")
_MAX_TIMEOUT_S = 10**8


class Options(TypedDict, total=False):
    """Types of the options that a user may pass; `distributed` documents their meanings and defaults."""

    backend: str | Backend
    gpus: int | str | Sequence[int] | Gpus | None
    processes: int | None
    num_nodes: int | None
    amp: bool | str | Amp | None
    amp_engine: str
    seed: int | None
    timeout: float | str | timedelta
    max_restarts: int
    launcher: str | Launcher | None
    logs: str | os.PathLike[str]
    process_group_backend: str | None
    init_connection: Callable[[World], object] | None
    wrap: Callable[[nn.Module, World], nn.Module] | None
    verify_every: int
    update_modules: bool


# Each parser: (name, value) -> the parsed value, or a Fault


def _backend(name: str, value: object) -> Backend | Fault:
    return value if isinstance(value, Backend) else _plugin("backends", Backend, name, value)


def _launcher(name: str, value: object) -> Launcher | Fault | None:
    return value if value is None or isinstance(value, Launcher) else _plugin("launchers", Launcher, name, value)


def _plugin(kind: registry.Kind, base: type, name: str, value: object) -> Any | Fault:
    if isinstance(value, type) and issubclass(value, base):
        fix = f"use {name}={value.__name__}()"
        return Fault(f"{name}={value.__name__}", "it is a class, not an instance", fix)
    found = _plugin_class(kind, name, value)
    return found if isinstance(found, Fault) else found()


def _plugin_class(kind: registry.Kind, name: str, value: object) -> type[Any] | Fault:
    if not isinstance(value, str):
        known = ", ".join(map(repr, registry.names(kind)))
        return Fault(f"{name}={value!r}", f"its type {type(value).__name__} is not valid", f"use one of: {known}")
    try:
        found = registry.find(kind, value)
    except ConfigError as error:
        (fault,) = error.faults
        return Fault(f"{name}={value!r}", f"{fault.what}; {fault.why}", fault.fix)
    if found is not None:
        return found
    why = f"no {name} has this name"
    hint = f"use process_group_backend={value!r} for the collectives; " if value in ("nccl", "gloo") else ""
    return Fault(f"{name}={value!r}", why, hint * (name == "backend") + did_you_mean(value, registry.names(kind)))


def _gpus(_name: str, value: object) -> Gpus | Fault | None:
    return None if value is None else parse_gpus(value)


def _amp(name: str, value: object) -> Amp | Fault | None:
    if value is None or value is False:
        return None
    if value is True:
        return Amp()
    if isinstance(value, Amp):
        return _amp_fault(name, value) or value
    if isinstance(value, str):
        if value in DTYPES:
            return Amp(dtype=DTYPES[value])
        for level in LEVELS:
            if value == level:
                return Amp(level=level)
    if value == "fp8":
        fix = "use amp='bf16', or let torchao.float8 convert the model's layers before the block"
        return Fault("amp='fp8'", "fp8 needs a scale per tensor, which autocast does not compute", fix)
    return Fault(
        f"{name}={value!r}",
        "it names neither a level nor a half-precision type",
        f"use True, an Amp(...), or a name; {did_you_mean(str(value), [*LEVELS, *DTYPES])}",
    )


def _amp_fault(name: str, amp: Amp) -> Fault | None:
    """Return one Fault for all invalid fields of an Amp; None if all are valid."""
    halves = [None, *DTYPES.values()]
    rules = (
        ("level", "one of O0, O1, O2, O3", amp.level in [None, *LEVELS]),
        ("dtype", "torch.bfloat16 or torch.float16", amp.dtype in halves),
        # Powers of two: gradients that have accumulated are scaled again, which is exact then.
        ("init_scale", "a power of two", _is_power(amp.init_scale)),
        ("growth_factor", "a power of two above 1", _is_power(amp.growth_factor, 1)),
        ("backoff_factor", "a power of two between 0 and 1", _is_power(amp.backoff_factor, 0, 1)),
        ("growth_interval", "at least 1 step", type(amp.growth_interval) is int and amp.growth_interval > 0),
        ("outputs", "'fp32' or 'as computed'", amp.outputs in ("fp32", "as computed")),
        (
            "communication_dtype",
            "torch.bfloat16, torch.float16 or torch.float32",
            amp.communication_dtype in [*halves, torch.float32],
        ),
    )
    wrong = {field: rule for field, rule, is_valid in rules if not is_valid}
    given = ", ".join(f"{field}={getattr(amp, field)!r}" for field in wrong)
    broken = (f"{field} is {rule}" for field, rule in wrong.items())
    return Fault(f"{name}=Amp({given})", "; ".join(broken), "correct them, or leave them out") if wrong else None


def _is_power(value: Any, low: float = 0, high: float = 2.0**127) -> bool:
    """Whether a value is a power of two in an open range."""
    return type(value) in (int, float) and low < value < high and math.frexp(value)[0] == 0.5


def _amp_engine(name: str, value: object) -> str | Fault:
    found = _plugin_class("precision", name, value)
    return found if isinstance(found, Fault) else str(value)


def duration(value: object) -> timedelta | None:
    """Return the duration of a text such as "10min", "90 s", "1.5h" or "2d"; None: it is not one."""
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    return None if match is None else timedelta(seconds=float(match[1]) * DURATION_UNITS_S[match[2]])


def _timeout(name: str, value: object) -> timedelta | Fault:
    timeout = duration(value) if isinstance(value, str) else value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MAX_TIMEOUT_S:
        timeout = timedelta(seconds=value)
    # Checked after the conversion, because timedelta rounds a nanosecond to 0.
    if isinstance(timeout, timedelta) and timedelta(0) < timeout <= timedelta(seconds=_MAX_TIMEOUT_S):
        return timeout
    limits = f"it must be above 0, and at most {_MAX_TIMEOUT_S} seconds"
    why = limits if isinstance(timeout, (int, float, timedelta)) else "it is not a time"
    return Fault(f"{name}={value!r}", why, "use seconds (a positive number), a text such as '10min', or a timedelta")


_RANK_LIKE = re.compile(r"ranks?[ =_-]?\d*|all|none", re.IGNORECASE)


def _logs(name: str, value: object) -> str | Fault:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(text, str) and text not in {"rank0", "all"} and _RANK_LIKE.fullmatch(text):
        why = "it looks like a rank, but only the output of rank 0 or of all ranks can be shown"
        return Fault(f"{name}={value!r}", why, f"use 'rank0' or 'all'; a directory of this name is './{text}'")
    if isinstance(text, str) and text:
        return text
    return Fault(f"{name}={value!r}", "it is not 'rank0', 'all' or a path", "use 'rank0', 'all' or a directory")


def _process_group_backend(name: str, value: object) -> str | Fault | None:
    if value is None:
        return None
    known = [each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED]
    text = value if isinstance(value, str) else ""
    pairs = [re.fullmatch(r"([a-z]+):([a-z_]+)", part) for part in text.split(",")]
    named = [pair[2] for pair in pairs if pair is not None]
    devices = {pair[1] for pair in pairs if pair is not None}
    if text in known or (len(devices) == len(pairs) and set(named) <= set(known)):
        return text
    unknown = next((each for each in named if each not in known), str(value))
    return Fault(
        f"{name}={value!r}",
        "it is neither one of torch's backends nor a list such as 'cpu:gloo,cuda:nccl'",
        did_you_mean(unknown, known),
    )


def backend_by_device_type(process_group_backend: str) -> Mapping[str, str]:
    """Return device type -> torch's process-group backend for tensors on that type of device.

    Args:
        process_group_backend: the parsed option, such as "gloo" or "cpu:gloo,cuda:nccl".
    """
    if ":" in process_group_backend:
        return dict(part.split(":") for part in process_group_backend.split(","))
    return dict.fromkeys(dist.Backend.backend_capability[process_group_backend], process_group_backend)


def _function(name: str, value: object) -> Callable[..., Any] | Fault | None:
    if value is None or callable(value):
        return value
    return Fault(f"{name}={value!r}", "it cannot be called", f"pass a function, as in {name}=my_function")


def _flag(name: str, value: object) -> bool | Fault:
    if isinstance(value, bool):
        return value
    return Fault(f"{name}={value!r}", "it is not a bool", "use True or False")


def _integer(
    least: int, *, most: int = 2**31 - 1, optional: bool = False
) -> Callable[[str, object], int | Fault | None]:
    def parse(name: str, value: object) -> int | Fault | None:
        if value is None and optional:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        why = f"it must be an integer from {least} to {most}"
        return Fault(f"{name}={value!r}", why, f"use {name}={least}, for example")

    return parse


PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    "backend": _backend,
    "gpus": _gpus,
    "processes": _integer(1, most=65536, optional=True),
    "num_nodes": _integer(1, most=65536, optional=True),
    "amp": _amp,
    "amp_engine": _amp_engine,
    "seed": _integer(0, most=2**32 - 1, optional=True),
    "timeout": _timeout,
    "max_restarts": _integer(0),
    "launcher": _launcher,
    "logs": _logs,
    "process_group_backend": _process_group_backend,
    "init_connection": _function,
    "wrap": _function,
    "verify_every": _integer(0),
    "update_modules": _flag,
}


# Conversion of text from environment variables; text that cannot be converted is returned, and the parser refuses it.


def _text_to_int(text: str) -> object:
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text


def _text_to_float(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _text_to_bool(text: str) -> object:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}.get(text.lower(), text)


FROM_TEXT: Mapping[str, Callable[[str], object]] = {
    "backend": str,
    "gpus": str,
    "processes": _text_to_int,
    "num_nodes": _text_to_int,
    "amp": _text_to_bool,
    "amp_engine": str,
    "seed": _text_to_int,
    "timeout": _text_to_float,
    "max_restarts": _text_to_int,
    "launcher": str,
    "logs": str,
    "process_group_backend": str,
    "verify_every": _text_to_int,
    "update_modules": _text_to_bool,
}
