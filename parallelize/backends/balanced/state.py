"""State that a forward may change: parameters, buffers, attributes of modules and generators; found and restored."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize.runtime.containers import leaves
from parallelize.runtime.rng import RNGState

__all__ = ["ModelState"]

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"}) - {"training"}
"""Attributes that torch sets on every module, such as its hooks, and the forward that a block replaces."""
_PLAIN = (bool, int, float, str)
_CONTAINERS = frozenset({list, dict, set})


class _Writes(TorchDispatchMode):
    """Copies tensors before an operation first writes to their storage, also through `.data` and views.

    Attributes:
        before: id of a tensor -> its former value.
    """

    def __init__(self, tensors: Collection[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.before: dict[int, torch.Tensor] = {}
        self._of: dict[int, list[torch.Tensor]] = {}
        for each in tensors:
            self._of.setdefault(each.untyped_storage()._cdata, []).append(each)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        schema = func._schema
        if schema.is_mutable and schema.name != "aten::record_stream":  # which changes no value
            given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | (kwargs or {})
            writes = (each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write)
            for leaf in leaves([given.get(name) for name in writes]):
                for each in self._of.get(leaf.untyped_storage()._cdata, ()) if _is_dense(leaf) else ():
                    self.before.setdefault(id(each), each.detach().clone())
        return func(*args, **(kwargs or {}))


class ModelState:
    """What a model's forward may change, as it is now.

    A forward of a `Staged` model does not change batch norm's statistics.
    """

    def __init__(self, model: nn.Module, devices: Collection[torch.device]) -> None:
        self._model, self._rng = model, RNGState(devices)
        # By name: the dictionary and the key of a value, the value itself, what it contains and how it compares.
        self._before = {
            name: (where, key, value, copy.copy(value) if type(value) in _CONTAINERS else None, _form(value))
            for name, where, key, value in self._values()
        }
        self._written: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by name: a tensor and its former value

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Learn to which of the tensors a forward in this context writes, or gives other data."""
        values = ((name, value) for name, (_, _, value, *_) in self._before.items())
        known = {name: (each, each.data) for name, each in values if _is_dense(each)}
        writes = _Writes([each for each, _ in known.values()])
        try:
            with writes:
                yield
        finally:
            for name, (each, data) in known.items():
                if each.data.data_ptr() != data.data_ptr() or id(each) in writes.before:
                    self._written[name] = each, writes.before.get(id(each), data)

    def draws(self) -> bool:
        """Return whether random numbers were drawn."""
        return self._rng.has_changed()

    def changed(self) -> list[str]:
        """Return the names of what has changed."""
        forms = {name: form for name, (*_, form) in self._before.items()}
        return [*(name for name, *_, value in self._values() if forms.get(name) != _form(value)), *self._written]

    def restore(self) -> None:
        """Restore what has changed, and the states of the generators."""
        for name, where, key, _ in [*self._values()]:
            if name not in self._before:
                del where[key]
        for where, key, value, content, _ in self._before.values():
            where[key] = value
            if content is not None:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(content)
        for each, data in self._written.values():
            each.data.copy_(data)
        self._rng.restore()

    def _values(self) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
        """Yield the name, dictionary, key and value of parameters, buffers, and attributes that torch does not set."""
        for path, module in self._model.named_modules():
            # The attributes of O2's casts, which are there during a forward, have the names of parameters.
            casts = module._parameters.keys() & vars(module).keys()
            for where, others in ((vars(module), casts), (module._parameters, ()), (module._buffers, ())):
                items = ((key, value) for key, value in where.items() if key not in {*_OF_EVERY_MODULE, *others})
                yield from ((f"{path}.{key}".lstrip("."), where, key, value) for key, value in items)


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _form(value: Any) -> tuple[Any, ...]:
    """Return plain values, and the ids of others, which may not compare; of containers, those in them, too."""
    if type(value) in _CONTAINERS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return id(value), *((key, each if isinstance(each, _PLAIN) else id(each)) for key, each in items)
    return (value if isinstance(value, _PLAIN) else id(value),)
