"""Safe types: the types that a checkpoint may hold, which torch.load reads with weights_only=True."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch

from parallelize.errors import ConfigError

__all__ = ["is_dtensor", "safe_names", "to_safe_types"]

_UNCHANGED = (torch.dtype, torch.device, torch.Size)
_CONVERTERS: dict[type[Any], Callable[[Any], Any]] = {
    bool: bool,
    int: int,
    float: float,
    complex: complex,
    str: str.__str__,  # str() of an enum member returns another string
    bytes: bytes,
    Integral: int,  # NumPy's integers are not subclasses of int
}


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing the class, which takes half a second."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def to_safe_types(value: Any, *, where: str, convert_dtensor: Callable[[Any, str], Any]) -> Any:
    """Convert nested containers, numbers, strings and tensors to safe types; tensors are not copied.

    Args:
        value: the value to convert.
        where: name of the value in error messages.
        convert_dtensor: called with each DTensor and its name; returns the tensor to store.

    Raises:
        ConfigError: a value could only be loaded by running code from the file.
    """
    if value is None or type(value) in _UNCHANGED:
        return value
    if isinstance(value, torch.Tensor):
        return convert_dtensor(value, where) if is_dtensor(value) else _dense_tensor(value, where)

    def convert(each: Any, key: Any) -> Any:
        return to_safe_types(each, where=f"{where}[{key!r}]", convert_dtensor=convert_dtensor)

    if type(value) in (dict, OrderedDict, Counter):
        inner = {_safe_key(key, where): convert(each, key) for key, each in value.items()}
        return inner if type(value) is dict else type(value)(inner)
    if type(value) in (list, tuple):
        return type(value)(convert(each, number) for number, each in enumerate(value))
    if type(value) is set:
        return {_safe_key(each, where) for each in value}
    return _safe_scalar(value, where)


def safe_names(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects with every name converted to a plain str: `**` also accepts subclasses of str."""
    return {_safe_key(name, "save()"): obj for name, obj in objects.items()}


def _safe_key(key: Any, where: str) -> Any:
    if key is None:
        return key
    if isinstance(key, tuple):
        return tuple(_safe_key(each, where) for each in key)
    return _safe_scalar(key, f"a key of {where}")


def _safe_scalar(value: Any, where: str) -> Any:
    """Convert a number or string to its built-in type, such as a NumPy float to float."""
    for kind, convert in _CONVERTERS.items():
        if isinstance(value, kind):
            return convert(value)
    raise _unsafe_type_error(where, f"{type(value).__module__}.{type(value).__qualname__}")


def _dense_tensor(value: torch.Tensor, where: str) -> torch.Tensor:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise _unsafe_type_error(where, f"{type(value).__module__}.{type(value).__qualname__}")
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise ConfigError(
            f"{where} is not a dense tensor with values: {value.layout}, on {value.device}, {value.dtype}",
            why="a checkpoint holds dense tensors only",
            fix="save x.to_dense() or x.dequantize(); initialize a model on the meta device before saving it",
        )
    return value.detach()


def _unsafe_type_error(where: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{where} is of type {kind}",
        why="a checkpoint holds tensors, numbers, strings and containers of these: loading a class would run code from "
        "the file",
        fix="save its content as numbers or tensors (torch.from_numpy(array)), or give its class state_dict() and "
        "load_state_dict()",
    )
