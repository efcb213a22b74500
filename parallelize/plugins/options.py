"""Options of plug-ins: a parser for each, from what a user passes to the value in the plug-in.

    option_parsers     ClassVar of a plug-in: name of a field -> its parser
    parse_options      called when the plug-in is made: fields become what their parsers return

A parser takes the option's name and value, and returns the value or raises a ConfigError. Values
are kept with their meaning or refused: True is no number, a text is no list of its characters, and
lists become tuples, so that a plug-in does not change with a list of the user. A parser does not
get the option's default, such as None.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from parallelize.errors import ConfigError, Fault, did_you_mean

Parse = Callable[[str, Any], Any]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST = 2**63 - 1


def invalid(name: str, value: object, why: str, fix: str) -> ConfigError:
    """Return the error of an option with an invalid value."""
    return ConfigError(f"{name}={value!r}", why=why, fix=fix)


def parse_options(plugin: Any, parsers: Mapping[str, Parse]) -> None:
    """Replace the fields of a frozen dataclass by what their parsers return.

    Raises:
        ConfigError: options are invalid; the error lists all of them.
    """
    faults = list[Fault]()
    defaults = {field.name: field.default for field in dataclasses.fields(plugin)}
    for name, parse in parsers.items():
        value = getattr(plugin, name)
        if value is defaults[name]:
            continue
        try:
            object.__setattr__(plugin, name, parse(name, value))
        except ConfigError as error:
            faults += error.faults
    if faults:
        kind = type(plugin).__name__
        named = [Fault(f"{kind}({fault.what})", fault.why, fault.fix) for fault in faults]
        raise ConfigError.of(named)


def flag(name: str, value: Any) -> bool:
    """Parse True or False."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise invalid(name, value, "it is not a bool", "use True or False")


def count(least: int, most: int = _MOST) -> Parse:
    """Return the parser of an integer in a range."""

    def parse(name: str, value: Any) -> int:
        is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if is_integer and least <= value <= most:
            return int(value)
        limit = f"from {least} to {most}" if most < _MOST else f"of at least {least}"
        why = f"it must be an integer {limit}"
        raise invalid(name, value, why, f"use {name}={least}, for example")

    return parse


def number(least: float, *, is_above: bool = False) -> Parse:
    """Return the parser of a finite number.

    Args:
        least: the least value.
        is_above: whether the value must be above `least`.
    """

    def parse(name: str, value: Any) -> float:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if is_number and math.isfinite(value):
            is_in_range = value > least if is_above else value >= least
            if is_in_range:
                return int(value) if isinstance(value, numbers.Integral) else float(value)
        limit = f"above {least:g}" if is_above else f"of at least {least:g}"
        why = f"it must be a finite number {limit}"
        raise invalid(name, value, why, f"use {name}={least + 1:g}, for example")

    return parse


def bytes_of_device(name: str, value: Any) -> int:
    """Parse a number of bytes; 8e9 is one, too."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return int(count(1)(name, value))


def choice(*choices: str) -> Parse:
    """Return the parser of one of several texts."""

    def parse(name: str, value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return str(value)
        raise invalid(name, value, "the value is not known", did_you_mean(str(value), choices))

    return parse


def either(parse_text: Parse, parse_other: Parse) -> Parse:
    """Return the parser of an option that is a text or something else."""

    def parse(name: str, value: Any) -> Any:
        return parse_text(name, value) if isinstance(value, str) else parse_other(name, value)

    return parse


def instance_of(load_class: Callable[[], type], fix: str) -> Parse:
    """Return the parser of an object of a class.

    Args:
        load_class: returns the class, whose import may take long.
        fix: how to make such an object.
    """

    def parse(name: str, value: Any) -> Any:
        kind = load_class()
        if isinstance(value, kind):
            return value
        raise invalid(name, value, f"it is no {kind.__name__}", fix)

    return parse


def text(name: str, value: Any) -> str:
    """Parse a text that is not empty."""
    if _is_text(value):
        return str(value)
    raise invalid(name, value, "it must be a text", f"use {name}='...', or omit it")


def path(name: str, value: Any) -> str:
    """Parse a path, as a text or an object of pathlib."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if _is_text(value):
        return str(value)
    fix = f"use a text or a pathlib.Path, as in {name}='a/b'"
    raise invalid(name, value, "it is not a path", fix)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Parse a list of texts, of which none is empty. A text alone is refused: it may be several."""
    if isinstance(value, (list, tuple)) and all(_is_text(part) for part in value):
        return tuple(str(part) for part in value)
    fix = f"use {name}=[{value!r}]" if isinstance(value, str) else f"use {name}=['...', '...']"
    raise invalid(name, value, "it must be a list of strings", fix)


def command(name: str, value: Any) -> tuple[str, ...]:
    """Parse a command: a list of its words, or a text that is split as by a shell, "python3 -u"."""
    words = value
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError:  # a quotation without an end
            words = ()
    is_list = isinstance(words, (list, tuple)) and all(isinstance(word, str) for word in words)
    if is_list and words and _is_text(words[0]) and "\0" not in "".join(words):
        return tuple(str(word) for word in words)
    why = "it is neither a command nor a list of its words"
    fix = f"use {name}=['python3', '-u'] or {name}='python3 -u', as on a command line"
    raise invalid(name, value, why, fix)


def _is_text(value: object) -> bool:
    """Whether the value is a text that a command line may have: the kernel ends one at a NUL."""
    return isinstance(value, str) and value != "" and "\0" not in value


def variables(name: str, value: Any) -> dict[str, str]:
    """Parse environment variables: a mapping from their names to texts."""
    if isinstance(value, Mapping) and all(_is_variable(*item) for item in value.items()):
        return {str(variable): str(content) for variable, content in value.items()}
    why = "it must map names of variables to texts"
    raise invalid(
        name, value, why, f"use {name}={{'NCCL_DEBUG': 'INFO'}}; a number is a text, too: '1'"
    )


def _is_variable(variable: object, content: object) -> bool:
    is_name = isinstance(variable, str) and _VARIABLE.fullmatch(variable) is not None
    return is_name and isinstance(content, str) and "\0" not in content


def texts_by_name(parse_value: Parse, example: str) -> Parse:
    """Return the parser of a mapping from names to values with a parser of their own.

    Args:
        parse_value: the parser of a value.
        example: a mapping, for the fix.
    """

    def parse(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(_is_text(key) for key in value):
            raise invalid(name, value, "it must map names to values", f"use {name}={example}")
        return {str(key): parse_value(f"{name}[{key!r}]", value[key]) for key in value}

    return parse


def device_names(name: str, value: Any) -> tuple[str, ...]:
    """Parse names of devices: a list, or a text with commas; a torch.device stands for its name."""
    devices: Any = value.split(",") if isinstance(value, str) else value
    try:
        if isinstance(devices, (list, tuple)) and devices:
            return tuple(_device_name(device) for device in devices)
    except (RuntimeError, TypeError):  # torch knows no such device
        pass
    raise invalid(
        name, value, "it does not name devices of torch", f"use {name}=('cuda:0', 'cuda:1')"
    )


def _device_name(device: Any) -> str:
    if not isinstance(device, (str, torch.device)):
        raise TypeError
    return str(torch.device(device.strip()) if isinstance(device, str) else device)
