"""Which values a checkpoint may hold: those that torch.load reads without running anything."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch

from parallelize.errors import ConfigError

__all__ = ["is_in_parts", "plain", "plain_names"]

_KEPT = (torch.dtype, torch.device, torch.Size)
_EXACT: dict[type[Any], Callable[[Any], Any]] = {
    bool: bool,
    int: int,
    float: float,
    complex: complex,
    str: str.__str__,  # an enumeration's own str() is another text
    bytes: bytes,
    Integral: int,  # NumPy's are no subclasses of int
}


def is_in_parts(value: Any) -> bool:
    """Whether a tensor is a DTensor, whose class takes half a second to import."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def plain(value: Any, *, where: str, whole: Callable[[Any, str], Any]) -> Any:
    """The same values in plain containers; tensors are not copied.

    Args:
        value: containers, numbers, texts, tensors.
        where: what the error calls it.
        whole: makes of a DTensor the tensor that stands for it; it is told where it was found.

    Raises:
        ConfigError: a value that could be read back only by running code from the file.
    """
    if value is None or type(value) in _KEPT:
        return value
    if isinstance(value, torch.Tensor):
        return whole(value, where) if is_in_parts(value) else _tensor(value, where)
    if type(value) in (dict, OrderedDict, Counter):
        inner = {_key(key, where): plain(each, where=f"{where}[{key!r}]", whole=whole) for key, each in value.items()}
        return inner if type(value) is dict else type(value)(inner)
    if type(value) in (list, tuple):
        return type(value)(plain(each, where=f"{where}[{number}]", whole=whole) for number, each in enumerate(value))
    if type(value) is set:
        return {_key(each, where) for each in value}
    return _exact(value, where)


def plain_names(things: Mapping[str, Any]) -> dict[str, Any]:
    """The same things under names that are no subclasses of str, as `**` lets them through."""
    return {_key(name, "save()"): thing for name, thing in things.items()}


def _key(key: Any, where: str) -> Any:
    if key is None:
        return key
    if isinstance(key, tuple):
        return tuple(_key(each, where) for each in key)
    return _exact(key, f"a key of {where}")


def _exact(value: Any, where: str) -> Any:
    """A number or a text of one of Python's own types: a NumPy float is a float, and comes back as one."""
    for kind, exactly in _EXACT.items():
        if isinstance(value, kind):
            return exactly(value)
    raise _refused(where, f"{type(value).__module__}.{type(value).__qualname__}")


def _tensor(value: torch.Tensor, where: str) -> torch.Tensor:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise _refused(where, f"{type(value).__module__}.{type(value).__qualname__}")
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise ConfigError(
            f"{where} is no dense tensor with values: {value.layout}, on {value.device}, {value.dtype}",
            why="a checkpoint holds dense values",
            fix="save x.to_dense() or x.dequantize(); give a model on the meta device values first",
        )
    return value.detach()


def _refused(where: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{where} is a {kind}",
        why="a checkpoint holds tensors, numbers, texts and containers of them: reading a class from a file would run "
        "code that whoever wrote the file has chosen",
        fix="save what it consists of: its numbers, torch.from_numpy(array), or an object with state_dict() and "
        "load_state_dict()",
    )
