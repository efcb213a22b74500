"""Options of plug-ins: a parser for each, from what a user passes to the value in the plug-in.

    option_parsers     ClassVar of a plug-in: name of a field -> its parser
    parse_options      called when the plug-in is made: fields become what their parsers return

A parser takes the option's name and value, and returns the value or raises a ConfigError. Values
are kept with their meaning or refused: True is no number, a text is no list of its characters, and
lists become tuples, so that a plug-in does not change with a list of the user. A parser does not
get the option's default, such as None.

A function here either is a parser (`flag`, `path`) or returns one (`count(1)`, `choice("a", "b")`).
"""

from __future__ import annotations

import dataclasses
import numbers
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from parallelize.errors import ConfigError, Fault, did_you_mean

Parse = Callable[[str, Any], Any]
"""A parser: (name of the option, the user's value) -> the value to keep."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_COUNT = 2**63 - 1


def shown(value: object) -> str:
    """Return a value as errors show it.

    The repr of a user's object may raise, as may that of an integer with 5000 digits.
    """
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a class of the user may raise anything
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


def invalid(name: str, value: object, why: str, fix: str) -> ConfigError:
    """Return the error of an option with an invalid value."""
    return ConfigError(f"{name}={shown(value)}", why=why, fix=fix)


def parse_options(plugin: Any, parsers: Mapping[str, Parse]) -> None:
    """Replace the fields of a frozen dataclass by what their parsers return.

    Args:
        plugin: the dataclass, whose `__init__` has just set the user's values.
        parsers: name of a field -> its parser; a field without one stays as it is.

    Raises:
        ConfigError: options are invalid; the error lists all of them.
    """
    class_name = type(plugin).__name__
    defaults = {field.name: field.default for field in dataclasses.fields(plugin)}
    faults: list[Fault] = []
    for name, parse in parsers.items():
        value = getattr(plugin, name)
        if value is defaults[name]:
            continue
        try:
            parsed = parse(name, value)
        except ConfigError as error:
            faults += error.faults
        else:
            # The dataclass is frozen, and nobody has seen it yet.
            object.__setattr__(plugin, name, parsed)
    if faults:
        raise ConfigError.of([_fault_of_class(class_name, fault) for fault in faults])


def _fault_of_class(class_name: str, fault: Fault) -> Fault:
    """Return the fault of an option with the name of the class that has the option."""
    return Fault(f"{class_name}({fault.what})", fault.why, fault.fix)


def flag(name: str, value: Any) -> bool:
    """Parse True or False."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise invalid(name, value, "it is not a bool", "use True or False")


def count(least: int, most: int = _MAX_COUNT) -> Parse:
    """Return the parser of an integer in a range."""

    def parse(name: str, value: Any) -> int:
        is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if is_integer and least <= value <= most:
            return int(value)

        limit = f"from {least} to {most}"
        if most == _MAX_COUNT:
            limit = f"of at least {least}"
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
        # An integer may be larger than every float. A comparison with nan is false.
        if is_number and least <= value <= sys.float_info.max:
            if isinstance(value, numbers.Integral):
                parsed: float = int(value)
            else:
                parsed = float(value)
            if parsed > least or not is_above:
                return parsed

        limit = f"of at least {least:g}"
        if is_above:
            limit = f"above {least:g}"
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
        fix = did_you_mean(shown(value), choices)
        raise invalid(name, value, "the value is not known", fix)

    return parse


def either(parse_text: Parse, parse_other: Parse) -> Parse:
    """Return the parser of an option that is a text or something else."""

    def parse(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return parse_text(name, value)
        return parse_other(name, value)

    return parse


def instance_of(load_class: Callable[[], type], fix: str) -> Parse:
    """Return the parser of an object of a class.

    Args:
        load_class: returns the class, whose import may take long.
        fix: how to make such an object.
    """

    def parse(name: str, value: Any) -> Any:
        expected = load_class()
        if isinstance(value, expected):
            return value
        raise invalid(name, value, f"it is no {expected.__name__}", fix)

    return parse


def text(name: str, value: Any) -> str:
    """Parse a text that is not empty."""
    if _is_text(value):
        return str(value)
    raise invalid(name, value, "it must be a text", f"use {name}='...', or omit it")


def path(name: str, value: Any) -> str:
    """Parse a path, as a text or an object of pathlib."""
    path = value
    if isinstance(value, os.PathLike):
        path = os.fspath(value)
    if _is_text(path):
        return str(path)
    fix = f"use a text or a pathlib.Path, as in {name}='a/b'"
    raise invalid(name, value, "it is not a path", fix)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Parse a list of texts, of which none is empty. A text alone is refused: it may be several."""
    if isinstance(value, (list, tuple)) and all(_is_text(part) for part in value):
        return tuple(str(part) for part in value)

    fix = f"use {name}=['...', '...']"
    if isinstance(value, str):
        fix = f"use {name}=[{value!r}]"
    raise invalid(name, value, "it must be a list of strings", fix)


def command(name: str, value: Any) -> tuple[str, ...]:
    """Parse a command.

    ["python3", "-u"]    its words
    "python3 -u"         a text, which is split as by a shell
    """
    words = value
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError:
            # A quotation without an end.
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
    fix = f"use {name}={{'NCCL_DEBUG': 'INFO'}}; a number is a text, too: '1'"
    raise invalid(name, value, why, fix)


def _is_variable(variable: object, content: object) -> bool:
    is_name = isinstance(variable, str) and _VARIABLE.fullmatch(variable) is not None
    return is_name and isinstance(content, str) and "\0" not in content


def values_by_name(parse_value: Parse, example: str) -> Parse:
    """Return the parser of a mapping from names to values with a parser of their own.

    Args:
        parse_value: the parser of a value.
        example: a mapping, for the fix.
    """

    def parse(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(_is_text(key) for key in value):
            raise invalid(name, value, "it must map names to values", f"use {name}={example}")

        parsed = {}
        for key in value:
            parsed[str(key)] = parse_value(f"{name}[{key!r}]", value[key])
        return parsed

    return parse


def device_names(name: str, value: Any) -> tuple[str, ...]:
    """Parse names of devices: a list, or a text with commas; a torch.device stands for its name."""
    devices = value
    if isinstance(value, str):
        devices = value.split(",")
    if isinstance(devices, (list, tuple)) and devices:
        try:
            return tuple(_device_name(device) for device in devices)
        except (RuntimeError, TypeError):
            # torch knows no such device: the value is invalid.
            pass
    fix = f"use {name}=('cuda:0', 'cuda:1')"
    raise invalid(name, value, "it does not name devices of torch", fix)


def _device_name(device: Any) -> str:
    """Return torch's name for a device; raise a RuntimeError or TypeError if there is none."""
    if isinstance(device, str):
        device = torch.device(device.strip())
    if not isinstance(device, torch.device):
        raise TypeError
    return str(device)
