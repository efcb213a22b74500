"""Options: one parser for each, from what a user passes or writes into a variable to its value.

A parser takes the option's name and value, and returns the parsed value or raises a ConfigError.
It raises nothing else, whatever the value is. A text stands for every value but a function, as in
PARALLELIZE_GPUS=0,2. Parsers get no None where None is the option's default.

Values in code and values in variables are parsed alike. That is why these parsers take texts, as
"4" for 4, where those of `plugins.options`, which no variable can set, refuse them.
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
from parallelize.plugins.options import invalid, shown

Gpus = int | tuple[int, ...] | None
"""GPUs of each node: how many, from index 0 on, or their indices, or ALL_GPUS; None: not given.

Indices are those that this process sees.
"""
ALL_GPUS = -1
_MAX_GPUS = 65535
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

DURATION_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,6}(?:\.\d+)?)\s*(s|sec|min|h|d)")
_MAX_TIMEOUT_S = 10**8
FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


class Options(TypedDict, total=False):
    """Types of the options that a user may pass; `distributed` documents their meanings."""

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


def _literal(value: Any) -> Any:
    """Return what a text means in Python ("4", "1.5", "0,2", "3,"); else the value as it is."""
    if not isinstance(value, str):
        return value
    # TypeError: "{[]: 1}", whose key has no hash. MemoryError, RecursionError: nested too deeply.
    errors = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
    with contextlib.suppress(*errors):
        return ast.literal_eval(value.strip())
    return value


def _text(value: object) -> str:
    """Return a value that is a text; "" for every other value."""
    return value if isinstance(value, str) else ""


def plugin(family: registry.Family, *, is_class: bool = False) -> Callable[[str, Any], Any]:
    """Return the parser of a plug-in: an object, its class, or the name of one without options.

    Args:
        family: what the plug-in is, such as "backends".
        is_class: whether the parsed value is the class, and not an object.
    """
    base = registry.BASE_CLASSES[family]

    def parse(name: str, value: Any) -> Any:
        if isinstance(value, base):
            return value
        plugin_class = value
        if isinstance(value, str):
            plugin_class = registry.find(family, value)
        if isinstance(plugin_class, type) and issubclass(plugin_class, base):
            return plugin_class if is_class else plugin_class()

        fix = did_you_mean(_text(value), registry.names(family))
        if name == "backend" and _text(value) in ("nccl", "gloo"):
            # torch calls these backends, too.
            fix = f"use process_group_backend={value!r} for the collectives; {fix}"
        raise invalid(name, value, f"no {name} has this name", fix)

    return parse


def gpus(name: str, value: Any) -> Gpus:
    """Parse the GPUs of each node.

    4, "4"                 how many, from index 0 on
    [0, 2], "0,2", "3,"    indices, as this process sees them
    -1, "auto"             all
    0, []                  none: the CPU
    """
    if _text(value) == "auto":
        return ALL_GPUS
    number_or_indices = _literal(value)
    if type(number_or_indices) is int and ALL_GPUS <= number_or_indices <= _MAX_GPUS:
        return number_or_indices
    is_list = isinstance(number_or_indices, (list, tuple, range))
    if is_list and all(map(_is_index, number_or_indices)):
        return tuple(number_or_indices) or 0
    why = "it is neither a number of GPUs nor a list of their indices, from 0"
    forms = "an int (how many), a list of indices, -1 or 'auto' (all), '4' (how many)"
    raise invalid(name, value, why, f"use {forms}, '0,2' or '3,' (indices)")


def _is_index(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_GPUS


def gpus_text(gpus: Gpus) -> str:
    """Return the option as the user writes it: "gpus=4", "gpus=[0, 2]", "gpus='auto'"."""
    if gpus == ALL_GPUS:
        return "gpus='auto'"
    if isinstance(gpus, tuple):
        return f"gpus={list(gpus)}"
    return f"gpus={gpus}"


def _named_amps() -> Mapping[str, Amp | None]:
    """Return what each text means for amp=: "true", "O2", "bf16"."""
    amps: dict[str, Amp | None] = {}
    for text, is_on in FLAGS.items():
        amps[text] = Amp() if is_on else None
    for level in LEVELS:
        amps[level] = Amp(level=level)
    for text, dtype in DTYPES.items():
        amps[text] = Amp(dtype=dtype)
    return amps


_AMPS = _named_amps()
_HALVES = (None, *DTYPES.values())
# Gradients that have accumulated are scaled again, which is exact by powers of two.
_POWERS_BELOW_1 = [2.0**exponent for exponent in range(-126, 0)]
_POWERS_ABOVE_1 = [2.0**exponent for exponent in range(1, 127)]
_POWERS = [*_POWERS_BELOW_1, 1.0, *_POWERS_ABOVE_1]
_DTYPES_SENT = (*_HALVES, torch.float32)

# Field of Amp -> what its values are, as text; all of them.
_AMP_FIELDS: Mapping[str, tuple[str, Sequence[object]]] = {
    "level": ("one of O0, O1, O2, O3", (None, *LEVELS)),
    "dtype": ("torch.bfloat16 or torch.float16", _HALVES),
    "init_scale": ("a power of two", _POWERS),
    "growth_factor": ("a power of two above 1", _POWERS_ABOVE_1),
    "backoff_factor": ("a power of two between 0 and 1", _POWERS_BELOW_1),
    "outputs": ("'fp32' or 'as computed'", ("fp32", "as computed")),
    "communication_dtype": ("torch.bfloat16, torch.float16 or torch.float32", _DTYPES_SENT),
}


def amp(name: str, value: Any) -> Amp | None:
    """Parse the precision of a run.

    True, "O2", "bf16"          an Amp with this level or type, and else its defaults
    Amp(init_scale=1024.0)      the object, whose fields are checked
    False                       None: no mixed precision
    """
    if isinstance(value, (str, bool)):
        text = str(value)
        value = _AMPS.get(text, _AMPS.get(text.lower(), value))
    if value is None:
        return None
    if not isinstance(value, Amp):
        names = did_you_mean(_text(value), [*LEVELS, *DTYPES])
        why = "it names neither a level nor a half-precision type"
        raise invalid(name, value, why, f"use True, an Amp(...), or a name; {names}")
    _check_fields(name, value)
    return value


def _check_fields(name: str, amp: Amp) -> None:
    """Refuse an Amp with invalid fields.

    Raises:
        ConfigError: it names all of these fields, with what their values are.
    """
    invalid_fields = []
    rules = []
    for field, (rule, values) in _AMP_FIELDS.items():
        if not _is_among(getattr(amp, field), values):
            invalid_fields.append(field)
            rules.append(f"{field} is {rule}")
    if type(amp.growth_interval) is not int or amp.growth_interval < 1:
        invalid_fields.append("growth_interval")
        rules.append("growth_interval is at least 1 step")
    if invalid_fields:
        arguments = ", ".join(f"{field}={shown(getattr(amp, field))}" for field in invalid_fields)
        fix = "correct them, or leave them out"
        raise ConfigError(f"{name}=Amp({arguments})", why="; ".join(rules), fix=fix)


def _is_among(value: object, values: Sequence[object]) -> bool:
    """Whether a value is one of plain ones: True is no 1.0, and a tensor has no single answer."""
    is_plain = value is None or isinstance(value, (str, int, float, torch.dtype))
    return is_plain and not isinstance(value, bool) and value in values


def duration(value: object) -> timedelta | None:
    """Return the duration of a text: "10min", "90 s", "1.5h" or "2d"; None: it is not one."""
    match = _DURATION.fullmatch(_text(value).strip())
    if match is None:
        return None
    return timedelta(seconds=float(match[1]) * DURATION_UNITS_S[match[2]])


def timeout(name: str, value: Any) -> timedelta:
    """Parse a time above 0.

    90, 1.5, "90"             seconds
    "10min", "1.5 h", "2d"    with one of DURATION_UNITS_S
    timedelta(hours=1)
    """
    time: Any = duration(value) or _literal(value)
    if type(time) in (int, float) and 0 < time <= _MAX_TIMEOUT_S:
        time = timedelta(seconds=time)
    # After the conversion, because timedelta rounds a nanosecond to 0.
    longest = timedelta(seconds=_MAX_TIMEOUT_S)
    if isinstance(time, timedelta) and timedelta(0) < time <= longest:
        return time
    raise invalid(
        name,
        value,
        f"it must be a time above 0, of at most {_MAX_TIMEOUT_S} seconds",
        "use seconds (a positive number), a text such as '10min', or a timedelta",
    )


def hosts(name: str, value: Any) -> tuple[str, ...]:
    """Parse names of hosts.

    "gpu1"                    one host
    "gpu1,gpu2:8"             several; of the second, 8 GPUs
    ["gpu1", "me@gpu2:8"]     likewise
    """
    names = value
    if isinstance(value, str):
        names = value.split(",")
    is_list = isinstance(names, (list, tuple)) and len(names) > 0
    if is_list and all(_text(host).strip() for host in names):
        return tuple(host.strip() for host in names)

    fix = "use hosts=['gpu1', 'gpu2'] or hosts=['gpu1:8', 'gpu2:8']"
    raise invalid(name, value, "it does not name hosts", fix)


def logs(name: str, value: Any) -> str:
    """Parse where the output of the ranks goes.

    "rank0"             rank 0's to the caller's
    "all"               that of all ranks, each line with its rank
    "logs", a Path      a directory, with a file for each rank
    """
    if isinstance(value, (str, os.PathLike)) and str(value):
        return str(value)
    why = "it is not 'rank0', 'all' or a path"
    raise invalid(name, value, why, "use 'rank0', 'all' or a directory")


def process_group_backend(name: str, value: Any) -> str:
    """Parse torch's backend for collectives.

    "nccl"                  for all tensors
    "cpu:gloo,cuda:nccl"    by type of device
    """
    text = _text(value)
    named = {text}
    if ":" in text:
        # torch refuses a pair without device, and two pairs of one device: the text is unknown.
        with contextlib.suppress(ValueError):
            named = set(backend_by_device_type(text).values())
    names_of_torch = {*dist.Backend.backend_list} - {dist.Backend.UNDEFINED}
    unknown = named - names_of_torch
    if not unknown:
        return text
    why = "it is neither one of torch's backends nor a list such as 'cpu:gloo,cuda:nccl'"
    raise invalid(name, value, why, did_you_mean(min(unknown), names_of_torch))


def backend_by_device_type(process_group_backend: str) -> Mapping[str, str]:
    """Return device type -> torch's process-group backend for tensors on that type of device.

    Args:
        process_group_backend: the parsed option, such as "gloo" or "cpu:gloo,cuda:nccl".
    """
    config = dist.distributed_c10d.BackendConfig(dist.Backend(process_group_backend))
    backends: Mapping[str, str] = config.get_device_backend_map()
    return backends


def function(name: str, value: Any) -> Callable[..., Any]:
    """Parse a function of the user.

    No variable can give one: a text is refused.
    """
    if callable(value):
        return value  # type: ignore[no-any-return]  # a function of the user
    raise invalid(name, value, "it cannot be called", f"pass a function, as in {name}=my_function")


def flag(name: str, value: Any) -> bool:
    """Parse a bool.

    True, "1", "true", "Yes"
    False, "0", "false", "No"
    """
    if isinstance(value, bool):
        return value
    text = _text(value).lower()
    if text in FLAGS:
        return FLAGS[text]
    raise invalid(name, value, "it is not a bool", "use True or False")


def integer(least: int, most: int = 2**31 - 1) -> Callable[[str, Any], int]:
    """Return the parser of an integer.

        4, "4"

    Args:
        least: the least value.
        most: the largest value.
    """

    def parse(name: str, value: Any) -> int:
        number = _literal(value)
        if type(number) is int and least <= number <= most:
            return number
        why = f"it must be an integer from {least} to {most}"
        raise invalid(name, value, why, f"use {name}={least}, for example")

    return parse
