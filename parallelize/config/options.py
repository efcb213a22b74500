"""Options: one parser for each, from what a user passes or writes into a variable to the value in a Config.

A parser takes the option's name and value, and returns the parsed value or raises a ConfigError. Text stands for
numbers and for yes or no, too, as in PARALLELIZE_PROCESSES=2.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from parallelize.cluster.world import World
from parallelize.errors import ConfigError, did_you_mean
from parallelize.plugins import registry
from parallelize.plugins.base import LEVELS, Amp, Backend, Launcher

__all__ = [
    "DTYPES",
    "DURATION_UNITS_S",
    "Gpus",
    "Options",
    "amp",
    "backend_by_device_type",
    "duration",
    "flag",
    "function",
    "gpus",
    "integer",
    "logs",
    "plugin",
    "process_group_backend",
    "timeout",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

DURATION_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,6}(?:\.\d+)?)\s*(s|sec|min|h|d)")
_MAX_TIMEOUT_S = 10**8
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_MAX_GPUS = 65535


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


def _invalid(name: str, value: object, why: str, fix: str) -> ConfigError:
    return ConfigError(f"{name}={value!r}", why=why, fix=fix)


def plugin(kind: registry.Kind, base: type) -> Callable[[str, Any], Any]:
    """Return the parser of a plug-in: an object, its class, or the name of one without options."""

    def parse(name: str, value: Any) -> Any:
        if isinstance(value, base) or (value is None and name == "launcher"):
            return value
        is_class = isinstance(value, type) and issubclass(value, base)
        found = value if is_class else registry.find(kind, value) if isinstance(value, str) else None
        if found is None:
            hint = f"use process_group_backend={value!r} for the collectives; " if value in ("nccl", "gloo") else ""
            fix = hint * (name == "backend") + did_you_mean(str(value), registry.names(kind))
            raise _invalid(name, value, f"no {name} has this name", fix)
        return value if name == "amp_engine" else found()

    return parse


@dataclass(frozen=True)
class Gpus:
    """The requested GPUs of each node: a number, or indices, or all GPUs if both fields are None.

    Args:
        count: number of GPUs, from index 0 on.
        indices: indices of the GPUs in this order, as the process sees them (after CUDA_VISIBLE_DEVICES).
    """

    count: int | None = None
    indices: tuple[int, ...] | None = None

    ALL: ClassVar[Gpus]
    NONE: ClassVar[Gpus]

    def __str__(self) -> str:
        """Return a string that is parsed into an equal object."""
        if self.indices is None:
            return "auto" if self.count is None else str(self.count)
        return f"{','.join(map(str, self.indices))}{',' * (len(self.indices) == 1)}"

    @property
    def as_option(self) -> str:
        """The option as the user writes it: "gpus=4", "gpus=[0, 2]", "gpus='auto'"."""
        if self.indices is None:
            return "gpus='auto'" if self.count is None else f"gpus={self.count}"
        return f"gpus={list(self.indices)}"

    @property
    def has_duplicates(self) -> bool:
        """Whether a GPU is named more than once."""
        return len(set(self.indices or ())) < len(self.indices or ())

    def indices_on(self, available: int) -> Sequence[int]:
        """Return the requested indices on a node with `available` GPUs; some may not exist there."""
        if self.indices is not None:
            return self.indices
        return range(available if self.count is None else self.count)


Gpus.ALL = Gpus()
Gpus.NONE = Gpus(count=0)


_INDICES = re.compile(r"[0-9]{1,4}(\s*,\s*[0-9]{1,4})*\s*,?")


def gpus(name: str, value: Any) -> Gpus | None:
    """Parse the GPUs of each node: how many, or their indices, or all of them."""
    if value is None or isinstance(value, Gpus):
        return value
    meaning = value
    if isinstance(value, str) and value.strip() in ("auto", "-1"):
        meaning = -1
    elif isinstance(value, str) and _INDICES.fullmatch(value.strip()):
        numbers = [int(each) for each in value.split(",") if each.strip()]
        meaning = numbers if "," in value else numbers[0]
    if type(meaning) is int and -1 <= meaning <= _MAX_GPUS:
        return Gpus.ALL if meaning == -1 else Gpus(count=meaning)
    if isinstance(meaning, (list, tuple, range)) and all(type(each) is int and each >= 0 for each in meaning):
        return Gpus(indices=tuple(meaning)) if meaning else Gpus.NONE
    raise _invalid(
        name,
        value,
        "it is neither a number of GPUs nor a list of their indices, from 0",
        "use an int (how many), a list of indices, -1 or 'auto' (all), '4' (how many), '0,2' or '3,' (indices)",
    )


def amp(name: str, value: Any) -> Amp | None:
    """Parse True, a level, a half-precision type, or an Amp, whose fields are checked."""
    if isinstance(value, str):
        value = _FLAGS.get(value.lower(), value)
    if value is None or value is False:
        return None
    if value is True:
        return Amp()
    if isinstance(value, Amp):
        return _checked(name, value)
    for level in LEVELS:
        if value == level:
            return Amp(level=level)
    if isinstance(value, str) and value in DTYPES:
        return Amp(dtype=DTYPES[value])
    fix = f"use True, an Amp(...), or a name; {did_you_mean(str(value), [*LEVELS, *DTYPES])}"
    raise _invalid(name, value, "it names neither a level nor a half-precision type", fix)


def _checked(name: str, amp: Amp) -> Amp:
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
    if wrong:
        given = ", ".join(f"{field}={getattr(amp, field)!r}" for field in wrong)
        why = "; ".join(f"{field} is {rule}" for field, rule in wrong.items())
        raise ConfigError(f"{name}=Amp({given})", why=why, fix="correct them, or leave them out")
    return amp


def _is_power(value: Any, low: float = 0, high: float = 2.0**127) -> bool:
    """Whether a value is a power of two in an open range."""
    return type(value) in (int, float) and low < value < high and math.frexp(value)[0] == 0.5


def duration(value: object) -> timedelta | None:
    """Return the duration of a text such as "10min", "90 s", "1.5h" or "2d"; None: it is not one."""
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    return None if match is None else timedelta(seconds=float(match[1]) * DURATION_UNITS_S[match[2]])


def timeout(name: str, value: Any) -> timedelta:
    """Parse seconds, a text with a unit, or a timedelta."""
    found = duration(value) or value
    if isinstance(value, str) and re.fullmatch(r"[0-9.]{1,18}", value):
        found = float(value) if value.count(".") < 2 and value != "." else value
    if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 < found <= _MAX_TIMEOUT_S:
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


def logs(name: str, value: Any) -> str:
    """Parse "rank0", "all" or the path of a directory."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else ""
    if not text:
        raise _invalid(name, value, "it is not 'rank0', 'all' or a path", "use 'rank0', 'all' or a directory")
    return str(text)


def process_group_backend(name: str, value: Any) -> str | None:
    """Parse a name of torch, or a list such as "cpu:gloo,cuda:nccl"."""
    known = [each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED]
    named = [str(value)]
    if ":" in str(value):
        with contextlib.suppress(ValueError):  # of torch: a pair without device, or two pairs of one device
            named = list(backend_by_device_type(str(value)).values())
    if value is None or (isinstance(value, str) and set(named) <= set(known)):
        return value
    unknown = next(each for each in named if each not in known)
    why = "it is neither one of torch's backends nor a list such as 'cpu:gloo,cuda:nccl'"
    raise _invalid(name, value, why, did_you_mean(unknown, known))


def backend_by_device_type(process_group_backend: str) -> Mapping[str, str]:
    """Return device type -> torch's process-group backend for tensors on that type of device.

    Args:
        process_group_backend: the parsed option, such as "gloo" or "cpu:gloo,cuda:nccl".
    """
    config = dist.distributed_c10d.BackendConfig(dist.Backend(process_group_backend))
    found: Mapping[str, str] = config.get_device_backend_map()
    return found


def function(name: str, value: Any) -> Callable[..., Any] | None:
    """Parse a function, which no variable can give."""
    if value is None or callable(value):
        return value  # type: ignore[no-any-return]  # a function of the user
    raise _invalid(name, value, "it cannot be called", f"pass a function, as in {name}=my_function")


def flag(name: str, value: Any) -> bool:
    """Parse a bool."""
    found = _FLAGS.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise _invalid(name, value, "it is not a bool", "use True or False")
    return found


def integer(least: int, *, most: int = 2**31 - 1, optional: bool = False) -> Callable[[str, Any], int | None]:
    """Return the parser of an integer in a range; `optional`: or None."""

    def parse(name: str, value: Any) -> int | None:
        found = int(value) if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value) else value
        if (type(found) is int and least <= found <= most) or (optional and value is None):
            return found
        why = f"it must be an integer from {least} to {most}"
        raise _invalid(name, value, why, f"use {name}={least}, for example")

    return parse
