"""Safe types: what torch.load(weights_only=True) reads without running code from the file.

dense tensors                                 as they are
None, numbers, strings, bytes, dtypes, ...    as their built-in types
lists, tuples, sets, dictionaries             with converted items
arrays and numbers of NumPy, paths, enums     as tensors, numbers, strings, and their values
everything else                               is refused, and the error names where it is
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from parallelize.errors import ConfigError


def _unchanged(value: Any) -> Any:
    return value


def _interned(value: str) -> str:
    """Return the string itself as `str`; equal strings are one object.

    A pickle holds one object once, so that equal states give equal files. `str(value)` of a member
    of an enum would be its qualified name.
    """
    return sys.intern(str.__str__(value))


_CONVERSION_BY_TYPE: dict[type, Callable[[Any], Any]] = {
    type(None): _unchanged,
    torch.dtype: _unchanged,
    torch.Size: torch.Size,
    torch.device: torch.device,
    bool: bool,
    int: int,
    float: float,
    complex: complex,
    str: _interned,
    bytes: bytes,
    os.PathLike: os.fspath,
}
"""Type -> conversion to a built-in type. bool comes before int, of which it is a subclass."""


@contextlib.contextmanager
def refusing_deep_nesting(call: str) -> Iterator[None]:
    """Raise a ConfigError if values contain themselves, or are nested too deeply."""
    try:
        yield
    except RecursionError as exc:
        raise ConfigError(
            f"{call} of containers that are nested too deeply",
            why="one contains itself, or hundreds contain each other",
            fix="save the tensors and numbers of such a structure in a flat dictionary",
        ) from exc


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, or stands for one, as the parameters of fsdp do.

    To import the class would take half a second.
    """
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def dtensor_behind(value: Any) -> Any:
    """Return the DTensor that a tensor of an fsdp block stands for; a DTensor as it is."""
    return getattr(value, "shard", value)


def to_safe_types(value: Any, where: str, gather: Callable[[Any], Any] | None = None) -> Any:
    """Convert nested containers, numbers, strings, arrays, paths, enums and tensors to safe types.

    A tensor is copied only if it is a view of a larger storage, which torch.save would write as a
    whole. A container that is in several places is converted once, and stays one.

    Args:
        value: what a checkpoint is to hold.
        where: names the value in errors.
        gather: returns what is saved in place of a DTensor; None: DTensors are kept.

    Raises:
        ConfigError: a type is not safe, and has no conversion.
    """
    return _Conversion(gather).convert(value, where)


class _Conversion:
    """Converts one value to safe types; the arguments are those of `to_safe_types`."""

    def __init__(self, gather: Callable[[Any], Any] | None) -> None:
        self._gather = gather
        # Id of a container -> the container, and its conversion. The container is kept, so that no
        # later object gets its id.
        self._conversions: dict[int, tuple[Any, Any]] = {}

    def convert(self, value: Any, where: str) -> Any:
        if type(value) in (torch.Tensor, nn.Parameter, nn.Buffer):
            return _dense(value, where)
        if is_dtensor(value):
            return self._shards(value)
        for safe_type, conversion in _CONVERSION_BY_TYPE.items():
            if isinstance(value, safe_type):
                return conversion(value)
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            return self._container(value, where)
        if type(value).__module__ == "numpy" and value.dtype.kind in "biufc":
            if value.ndim == 0:
                return value.item()
            return torch.from_numpy(value.copy())
        if isinstance(value, enum.Enum):
            return self.convert(value.value, where)
        class_name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise _refused(f"{where} is of type {class_name}")

    def _shards(self, value: Any) -> Any:
        """Convert a DTensor, or the tensor of an fsdp block that stands for one."""
        dtensor = dtensor_behind(value)
        if self._gather is None:
            return dtensor
        return self._gather(dtensor)

    def _container(self, value: Any, where: str) -> Any:
        if id(value) not in self._conversions:
            self._conversions[id(value)] = value, self._new_container(value, where)
        return self._conversions[id(value)][1]

    def _new_container(self, value: Any, where: str) -> Any:
        if isinstance(value, dict):
            return self._mapping(value, where)
        return self._sequence(value, where)

    def _sequence(self, value: Any, where: str) -> Any:
        items = []
        for number, item in enumerate(value):
            items.append(self.convert(item, f"{where}[{number}]"))
        if isinstance(value, list):
            return items
        if isinstance(value, tuple):
            return tuple(items)
        return set(items)

    def _mapping(self, value: Any, where: str) -> Any:
        items = {}
        for key, item in value.items():
            safe_key = self.convert(key, f"a key of {where}")
            items[safe_key] = self.convert(item, f"{where}[{key!r}]")
        mapping: Any = items
        if isinstance(value, OrderedDict):
            mapping = OrderedDict(items)
        elif isinstance(value, Counter):
            mapping = Counter(items)
        # torch keeps the version numbers of modules as an attribute of a state dict.
        if hasattr(value, "_metadata"):
            mapping._metadata = self.convert(value._metadata, where)
        return mapping


def _dense(value: torch.Tensor, where: str) -> torch.Tensor:
    """Return a tensor without autograd, which is not a part of a larger storage."""
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise _refused(
            f"{where} is not a dense tensor with values: {value.layout}, on {value.device}, "
            f"{value.dtype}"
        )
    value = value.detach()
    if value.untyped_storage().nbytes() > value.nbytes:
        return value.clone()
    return value


def _refused(fault: str) -> ConfigError:
    return ConfigError(
        fault,
        why="a checkpoint holds dense tensors, numbers, strings and containers of these: loading a "
        "class would run code from the file",
        fix="save its content as numbers or dense tensors, or give its class state_dict() and "
        "load_state_dict()",
    )
