"""Safe types: the types that a checkpoint may hold, which torch.load reads with weights_only=True."""

from __future__ import annotations

import enum
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch

from parallelize.errors import ConfigError

__all__ = ["is_dtensor", "is_wrapper", "safe_names", "to_safe_types"]

_CONVERTERS: dict[type[Any], Callable[[Any], Any]] = {
    torch.dtype: lambda value: value,
    torch.device: torch.device,
    bool: bool,
    int: int,
    float: float,
    complex: complex,
    # Equal strings become one object, which a pickle holds once: equal states give equal files.
    str: lambda value: sys.intern(str.__str__(value)),  # str() of an enum member returns another string
    bytes: bytes,
    Integral: int,
    os.PathLike: os.fspath,
}


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing the class, which takes half a second."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def to_safe_types(value: Any, *, where: str, convert_dtensor: Callable[[Any], Any] | None = None) -> Any:
    """Convert nested containers, numbers, strings, arrays, paths, enums and tensors to safe types.

    A tensor is copied only if it is a view of a larger storage, which torch.save would write as a whole. DTensors are
    kept, or replaced by what `convert_dtensor` returns; `where` names the value in errors.
    """
    if isinstance(value, torch.Tensor):
        if is_dtensor(value):
            value = getattr(value, "shard", value)  # for which a tensor of an fsdp block stands
            return value if convert_dtensor is None else convert_dtensor(value)
        return _dense_tensor(value, where)

    def convert(each: Any, key: Any) -> Any:
        return to_safe_types(each, where=f"{where}[{key!r}]", convert_dtensor=convert_dtensor)

    if isinstance(value, torch.Size):
        return torch.Size(value)
    if isinstance(value, dict):
        kind: Any = next((each for each in (OrderedDict, Counter) if isinstance(value, each)), dict)
        inner = kind({_safe_key(key, where): convert(each, key) for key, each in value.items()})
        if hasattr(value, "_metadata"):  # of a state dict: the version numbers of modules
            inner._metadata = to_safe_types(value._metadata, where=where)
        return inner
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(convert(each, number) for number, each in enumerate(value))
    if isinstance(value, (set, frozenset)):
        return {_safe_key(each, where) for each in value}
    return _safe_scalar(value, where)


def safe_names(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects with every name converted to a plain str: `**` also accepts subclasses of str."""
    return {_safe_key(name, "save()"): obj for name, obj in objects.items()}


def _safe_key(key: Any, where: str) -> Any:
    if isinstance(key, tuple):
        return tuple(_safe_key(each, where) for each in key)
    return _safe_scalar(key, f"a key of {where}")


def _safe_scalar(value: Any, where: str) -> Any:
    """Convert a number, string or path to its built-in type, an enum to its value, and a NumPy array to a tensor."""
    if value is None:
        return None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    elif numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    for kind, convert in _CONVERTERS.items():
        if isinstance(value, kind):
            return convert(value)
    if isinstance(value, enum.Enum):
        return to_safe_types(value.value, where=where)
    raise _unsafe_type_error(where, value)


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor subclass that consists of other tensors, but no DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__") and not is_dtensor(value)


def _dense_tensor(value: torch.Tensor, where: str) -> torch.Tensor:
    if is_wrapper(value) and type(value) in torch.serialization.get_safe_globals():
        return value
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise _unsafe_type_error(where, value)
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise ConfigError(
            f"{where} is not a dense tensor with values: {value.layout}, on {value.device}, {value.dtype}",
            why="a checkpoint holds dense tensors only",
            fix="save x.to_dense() or x.dequantize(); initialize a model on the meta device before saving it",
        )
    value = value.detach()
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _unsafe_type_error(where: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{where} is of type {type(value).__module__}.{type(value).__qualname__}",
        why="a checkpoint holds tensors, numbers, strings and containers of these: loading a class would run code from "
        "the file",
        fix="save its content as numbers or tensors, or give its class state_dict() and load_state_dict(); a class of "
        "tensors that torch.load may construct is passed to torch.serialization.add_safe_globals() by its author",
    )
