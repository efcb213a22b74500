"""What the value of each option means: one parser per option, from Python and from text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from parallelize.cluster.devices import Gpus, parse_gpus
from parallelize.cluster.world import World
from parallelize.errors import ConfigError, Fault, did_you_mean
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Amp, Backend, Launcher

__all__ = ["DTYPES", "FROM_TEXT", "PARSERS", "Options", "carriers"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_LONGEST_S = 10**8


class Options(TypedDict, total=False):
    """What a user may write for each option; `Config` says what each means and what holds when it is left out."""

    backend: str | Backend
    gpus: int | str | Sequence[int] | Gpus | None
    processes: int | None
    num_nodes: int | None
    amp: bool | str | Amp | None
    amp_engine: str
    seed: int | None
    timeout: float | timedelta
    max_restarts: int
    launcher: str | Launcher | None
    logs: str | os.PathLike[str]
    process_group_backend: str | None
    init_connection: Callable[[World], object] | None
    wrap: Callable[[nn.Module, World], nn.Module] | None
    verify_every: int
    update_modules: bool


# (name, value) -> the parsed value, or what is wrong with it


def _backend(name: str, value: object) -> Backend | Fault:
    return value if isinstance(value, Backend) else _plugin("backends", Backend, name, value)


def _launcher(name: str, value: object) -> Launcher | Fault | None:
    return value if value is None or isinstance(value, Launcher) else _plugin("launchers", Launcher, name, value)


def _plugin(kind: registry.Kind, contract: type, name: str, value: object) -> Any | Fault:
    if isinstance(value, type) and issubclass(value, contract):
        made = f"{value.__name__}()"
        return Fault(f"{name}={value.__name__}", f"it is a class, not a {name} with its options", f"use {name}={made}")
    found = _named(kind, name, value)
    return found if isinstance(found, Fault) else found()


def _named(kind: registry.Kind, name: str, value: object) -> type[Any] | Fault:
    if not isinstance(value, str):
        known = ", ".join(map(repr, registry.names(kind)))
        return Fault(f"{name}={value!r}", f"a {type(value).__name__} names no {name}", f"use one of: {known}")
    try:
        found = registry.find(kind, value)
    except ConfigError as error:
        (fault,) = error.faults
        return Fault(f"{name}={value!r}", f"{fault.what}; {fault.why}", fault.fix)
    if found is not None:
        return found
    why = f"there is no {name} of that name"
    return Fault(f"{name}={value!r}", why, did_you_mean(value, registry.names(kind)))


def _gpus(_name: str, value: object) -> Gpus | Fault | None:
    return None if value is None else parse_gpus(value)


def _amp(name: str, value: object) -> Amp | Fault | None:
    if value is None or value is False:
        return None
    if value is True:
        return Amp()
    if isinstance(value, Amp):
        return _amp_fault(name, value) or value
    if isinstance(value, str) and value in DTYPES:
        return Amp(dtype=DTYPES[value])
    for level in LEVELS:
        if isinstance(value, str) and value == level:
            return Amp(level=level)
    return Fault(
        f"{name}={value!r}",
        "it names neither a level nor a half-precision type",
        f"use True, an Amp(...), or a name; {did_you_mean(str(value), [*LEVELS, *DTYPES])}",
    )


def _amp_fault(name: str, amp: Amp) -> Fault | None:
    """What is wrong with the numbers and types of an Amp, all at once."""
    halves = [None, *DTYPES.values()]
    wrong = {
        f"level={amp.level!r}": ("level is one of O0, O1, O2, O3", amp.level not in [None, *LEVELS]),
        f"dtype={amp.dtype!r}": ("dtype is torch.bfloat16 or torch.float16", amp.dtype not in halves),
        f"init_scale={amp.init_scale!r}": ("init_scale is a positive number", not _within(amp.init_scale, 0, 2.0**127)),
        f"growth_factor={amp.growth_factor!r}": ("growth_factor is above 1", not _within(amp.growth_factor, 1, 2**64)),
        f"backoff_factor={amp.backoff_factor!r}": (
            "backoff_factor is between 0 and 1",
            not _within(amp.backoff_factor, 0, 1),
        ),
        f"growth_interval={amp.growth_interval!r}": (
            "growth_interval is a number of steps from 1",
            not _within(amp.growth_interval, 0, 2**62, kind=int),
        ),
        f"communication_dtype={amp.communication_dtype!r}": (
            "communication_dtype is torch.bfloat16, torch.float16 or torch.float32",
            amp.communication_dtype not in [*halves, torch.float32],
        ),
    }
    faults = {given: rule for given, (rule, is_wrong) in wrong.items() if is_wrong}
    if not faults:
        return None
    return Fault(f"{name}=Amp({', '.join(faults)})", "; ".join(faults.values()), "correct them, or leave them out")


def _within(value: object, low: float, high: float, *, kind: type[float] = float) -> bool:
    return isinstance(value, (int, kind)) and not isinstance(value, bool) and low < value < high


def _amp_engine(name: str, value: object) -> str | Fault:
    found = _named("precision", name, value)
    return found if isinstance(found, Fault) else str(value)


def _timeout(name: str, value: object) -> timedelta | Fault:
    wait = value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _LONGEST_S:
        wait = timedelta(seconds=value)
    # A nanosecond is rounded to no time at all.
    if isinstance(wait, timedelta) and timedelta(0) < wait <= timedelta(seconds=_LONGEST_S):
        return wait
    why = f"a wait lasts some time, and must end ({_LONGEST_S} seconds at most)"
    return Fault(f"{name}={value!r}", why, "use seconds (a positive number) or a timedelta")


_LIKE_RANKS = re.compile(r"ranks?[ =_-]?\d*|all|none", re.IGNORECASE)


def _logs(name: str, value: object) -> str | Fault:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(text, str) and text not in {"rank0", "all"} and _LIKE_RANKS.fullmatch(text):
        why = "it looks like a rank, and rank 0 alone or all of them can be shown"
        return Fault(f"{name}={value!r}", why, f"use 'rank0' or 'all'; a directory of this name is './{text}'")
    if isinstance(text, str) and text:
        return text
    return Fault(f"{name}={value!r}", "it names no place for output", "use 'rank0', 'all' or a directory")


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
    strange = next((each for each in named if each not in known), str(value))
    return Fault(
        f"{name}={value!r}",
        "it is neither one of torch's backends nor a list such as 'cpu:gloo,cuda:nccl'",
        did_you_mean(strange, known),
    )


def carriers(process_group_backend: str) -> Mapping[str, str]:
    """Device type -> what carries collectives of tensors there, by torch's own table.

    Args:
        process_group_backend: a parsed option: "gloo", or "cpu:gloo,cuda:nccl".
    """
    if ":" in process_group_backend:
        return dict(part.split(":") for part in process_group_backend.split(","))
    return dict.fromkeys(dist.Backend.backend_capability[process_group_backend], process_group_backend)


def _function(name: str, value: object) -> Callable[..., Any] | Fault | None:
    if value is None or callable(value):
        return value
    return Fault(f"{name}={value!r}", "it cannot be called", f"give a function, as in {name}=my_function")


def _flag(name: str, value: object) -> bool | Fault:
    if isinstance(value, bool):
        return value
    return Fault(f"{name}={value!r}", "it is neither on nor off", "use True or False")


def _whole(least: int, *, most: int = 2**31 - 1, optional: bool = False) -> Callable[[str, object], int | Fault | None]:
    def parse(name: str, value: object) -> int | Fault | None:
        if value is None and optional:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        why = f"it must be a whole number from {least} to {most}"
        return Fault(f"{name}={value!r}", why, f"use {name}={least}, say")

    return parse


PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    "backend": _backend,
    "gpus": _gpus,
    "processes": _whole(1, most=65536, optional=True),
    "num_nodes": _whole(1, most=65536, optional=True),
    "amp": _amp,
    "amp_engine": _amp_engine,
    "seed": _whole(0, most=2**32 - 1, optional=True),
    "timeout": _timeout,
    "max_restarts": _whole(0),
    "launcher": _launcher,
    "logs": _logs,
    "process_group_backend": _process_group_backend,
    "init_connection": _function,
    "wrap": _function,
    "verify_every": _whole(0),
    "update_modules": _flag,
}


# The same options as text, for the environment; a text without a meaning is left to the option's parser.


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
