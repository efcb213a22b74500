"""Options: one parser for each, from what a user passes or writes into a variable to the value in a Config.

A parser takes the option's name and value, and returns the parsed value or raises a ConfigError. Text stands for every
value but a function, as in PARALLELIZE_GPUS=0,2. Parsers get no None where None is the option's default.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from parallelize.cluster.world import World
from parallelize.errors import ConfigError, did_you_mean
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Amp, Backend, Launcher

Gpus = int | tuple[int, ...] | None
"""The GPUs of each node: how many, from index 0 on, or indices as this process sees them, or all; None: not given."""
ALL_GPUS = -1
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

DURATION_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,6}(?:\.\d+)?)\s*(s|sec|min|h|d)")
_MAX_TIMEOUT_S = 10**8
FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_MAX_GPUS = 65535


class Options(TypedDict, total=False):
    """Types of the options that a user may pass; `distributed` documents their meanings and defaults."""

    backend: str | Backend
    gpus: int | str | Sequence[int] | None
    processes: int | None
    num_nodes: int | None
    amp: bool | str | Amp | None
    amp_engine: str
    seed: int | None
    timeout: float | str | timedelta
    max_restarts: int
    launcher: str | Launcher | None
    hosts: str | Sequence[str] | None
    logs: str | os.PathLike[str]
    process_group_backend: str | None
    init_connection: Callable[[World], object] | None
    wrap: Callable[[nn.Module, World], nn.Module] | None
    verify_every: int
    logical: int | None
    update_modules: bool


def _invalid(name: str, value: object, why: str, fix: str) -> ConfigError:
    return ConfigError(f"{name}={value!r}", why=why, fix=fix)


def _number(value: Any) -> Any:
    """Return the numbers that a text has in Python's notation ("4", "1.5", "0,2", "3,"); else the value as it is."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(value.strip()) if isinstance(value, str) else value
    return value


def plugin(kind: registry.Kind, base: type, *, is_class: bool = False) -> Callable[[str, Any], Any]:
    """Return the parser of a plug-in: an object, its class, or the name of one without options.

    Args:
        kind: of plug-ins.
        base: their base class.
        is_class: whether the parsed value is the class, and not an object.
    """

    def parse(name: str, value: Any) -> Any:
        if isinstance(value, base):
            return value
        found = registry.find(kind, value) if isinstance(value, str) else value
        if isinstance(found, type) and issubclass(found, base):
            return found if is_class else found()
        fix = did_you_mean(str(value), registry.names(kind))
        if name == "backend" and isinstance(value, str) and value in ("nccl", "gloo"):
            fix = f"use process_group_backend={value!r} for the collectives; {fix}"
        raise _invalid(name, value, f"no {name} has this name", fix)

    return parse


def gpus(name: str, value: Any) -> Gpus:
    """Parse a number of GPUs, or their indices; -1 or "auto": all of them."""
    meaning = ALL_GPUS if isinstance(value, str) and value == "auto" else _number(value)
    if type(meaning) is int and ALL_GPUS <= meaning <= _MAX_GPUS:
        return meaning
    if isinstance(meaning, (list, tuple, range)) and all(
        type(each) is int and each >= 0 for each in meaning
    ):
        return tuple(meaning) or 0
    raise _invalid(
        name,
        value,
        "it is neither a number of GPUs nor a list of their indices, from 0",
        "use an int (how many), a list of indices, -1 or 'auto' (all), '4' (how many), '0,2' or '3,' (indices)",
    )


def gpus_text(gpus: Gpus) -> str:
    """Return the parsed option as the user writes it: "gpus=4", "gpus=[0, 2]", "gpus='auto'"."""
    return (
        "gpus='auto'"
        if gpus == ALL_GPUS
        else f"gpus={list(gpus) if isinstance(gpus, tuple) else gpus}"
    )


_AMPS: Mapping[str, Amp | None] = {
    **{text: Amp() if is_on else None for text, is_on in FLAGS.items()},
    **{level: Amp(level=level) for level in LEVELS},
    **{text: Amp(dtype=dtype) for text, dtype in DTYPES.items()},
}
_HALVES = (None, *DTYPES.values())
# Gradients that have accumulated are scaled again, which is exact by powers of two; 2**0 is at index 126.
_POWERS = [2.0**exponent for exponent in range(-126, 127)]
_AMP_FIELDS: Mapping[str, tuple[str, Sequence[object]]] = {
    "level": ("one of O0, O1, O2, O3", (None, *LEVELS)),
    "dtype": ("torch.bfloat16 or torch.float16", _HALVES),
    "init_scale": ("a power of two", _POWERS),
    "growth_factor": ("a power of two above 1", _POWERS[127:]),
    "backoff_factor": ("a power of two between 0 and 1", _POWERS[:126]),
    "outputs": ("'fp32' or 'as computed'", ("fp32", "as computed")),
    "communication_dtype": (
        "torch.bfloat16, torch.float16 or torch.float32",
        (*_HALVES, torch.float32),
    ),
}


def amp(name: str, value: Any) -> Amp | None:
    """Parse True, a level, a half-precision type, or an Amp, whose fields are checked."""
    if isinstance(value, (str, bool)):
        text = str(value)
        value = _AMPS.get(text, _AMPS.get(text.lower(), value))
    if value is None:
        return None
    if not isinstance(value, Amp):
        fix = f"use True, an Amp(...), or a name; {did_you_mean(str(value), [*LEVELS, *DTYPES])}"
        raise _invalid(name, value, "it names neither a level nor a half-precision type", fix)
    fields = vars(value)
    wrong = {
        field: rule
        for field, (rule, valid) in _AMP_FIELDS.items()
        if not _is_among(fields[field], valid)
    }
    if type(value.growth_interval) is not int or value.growth_interval < 1:
        wrong["growth_interval"] = "at least 1 step"
    if wrong:
        given = ", ".join(f"{field}={fields[field]!r}" for field in wrong)
        why = "; ".join(f"{field} is {rule}" for field, rule in wrong.items())
        raise ConfigError(f"{name}=Amp({given})", why=why, fix="correct them, or leave them out")
    return value


def _is_among(value: object, valid: Sequence[object]) -> bool:
    """Whether a value is one of plain ones: True is no 1.0, and a tensor has no single answer."""
    is_plain = value is None or isinstance(value, (str, int, float, torch.dtype))
    return is_plain and not isinstance(value, bool) and value in valid


def duration(value: object) -> timedelta | None:
    """Return the duration of a text such as "10min", "90 s", "1.5h" or "2d"; None: it is not one."""
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    return (
        None if match is None else timedelta(seconds=float(match[1]) * DURATION_UNITS_S[match[2]])
    )


def timeout(name: str, value: Any) -> timedelta:
    """Parse seconds, a text with a unit, or a timedelta."""
    found: Any = duration(value) or _number(value)
    if type(found) in (int, float) and 0 < found <= _MAX_TIMEOUT_S:
        found = timedelta(seconds=found)
    # After the conversion, because timedelta rounds a nanosecond to 0.
    if isinstance(found, timedelta) and timedelta(0) < found <= timedelta(seconds=_MAX_TIMEOUT_S):
        return found
    raise _invalid(
        name,
        value,
        f"it must be a time above 0, of at most {_MAX_TIMEOUT_S} seconds",
        "use seconds (a positive number), a text such as '10min', or a timedelta",
    )


def hosts(name: str, value: Any) -> tuple[str, ...]:
    """Parse names of hosts, each with or without a number of GPUs, as a list or as text with commas."""
    found = value.split(",") if isinstance(value, str) else value
    is_list = isinstance(found, (list, tuple)) and len(found) > 0
    if is_list and all(isinstance(each, str) and each.strip() for each in found):
        return tuple(each.strip() for each in found)
    raise _invalid(
        name,
        value,
        "it does not name hosts",
        "use hosts=['gpu1', 'gpu2'] or hosts=['gpu1:8', 'gpu2:8']",
    )


def logs(name: str, value: Any) -> str:
    """Parse "rank0", "all" or the path of a directory."""
    if isinstance(value, (str, os.PathLike)) and str(value):
        return str(value)
    raise _invalid(
        name, value, "it is not 'rank0', 'all' or a path", "use 'rank0', 'all' or a directory"
    )


def process_group_backend(name: str, value: Any) -> str:
    """Parse a name of torch, or a list such as "cpu:gloo,cuda:nccl"."""
    text, known = str(value), {*dist.Backend.backend_list} - {dist.Backend.UNDEFINED}
    named = {text}
    if ":" in text:
        with contextlib.suppress(
            ValueError
        ):  # of torch: a pair without device, or two pairs of one device
            named = {*backend_by_device_type(text).values()}
    if isinstance(value, str) and named <= known:
        return value
    why = "it is neither one of torch's backends nor a list such as 'cpu:gloo,cuda:nccl'"
    raise _invalid(name, value, why, did_you_mean(min(named - known, default=text), known))


def backend_by_device_type(process_group_backend: str) -> Mapping[str, str]:
    """Return device type -> torch's process-group backend for tensors on that type of device.

    Args:
        process_group_backend: the parsed option, such as "gloo" or "cpu:gloo,cuda:nccl".
    """
    config = dist.distributed_c10d.BackendConfig(dist.Backend(process_group_backend))
    found: Mapping[str, str] = config.get_device_backend_map()
    return found


def function(name: str, value: Any) -> Callable[..., Any]:
    """Parse a function, which no variable can give."""
    if callable(value):
        return value  # type: ignore[no-any-return]  # a function of the user
    raise _invalid(name, value, "it cannot be called", f"pass a function, as in {name}=my_function")


def flag(name: str, value: Any) -> bool:
    """Parse a bool."""
    found = FLAGS.get(value.lower()) if isinstance(value, str) else value
    if isinstance(found, bool):
        return found
    raise _invalid(name, value, "it is not a bool", "use True or False")


def integer(least: int, most: int = 2**31 - 1) -> Callable[[str, Any], int]:
    """Return the parser of an integer in a range."""

    def parse(name: str, value: Any) -> int:
        found = _number(value)
        if type(found) is int and least <= found <= most:
            return found
        why = f"it must be an integer from {least} to {most}"
        raise _invalid(name, value, why, f"use {name}={least}, for example")

    return parse
