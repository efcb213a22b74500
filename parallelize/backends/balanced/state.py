"""State that a forward may change: parameters, buffers, attributes of modules and generators; found and restored."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize.runtime.containers import leaves
from parallelize.runtime.rng_state import RNGState

__all__ = ["ModelState"]

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})
"""Attributes that torch sets on every module, such as its hooks, and the forward that a block replaces."""
_PLAIN = (bool, int, float, str)
_CONTAINERS = frozenset({list, dict, set})
_MISSING = object()


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
        given, schema = kwargs or {}, func._schema
        if schema.is_mutable and schema.name != "aten::record_stream":  # which changes no value
            for index, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._copy(args[index] if index < len(args) else given.get(argument.name))
        return func(*args, **given)

    def _copy(self, written: Any) -> None:
        for leaf in leaves(written):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                for each in self._of.get(leaf.untyped_storage()._cdata, ()):
                    self.before.setdefault(id(each), each.detach().clone())


class ModelState:
    """What a model's forward may change, as it is now; a change of batch norm's statistics is none."""

    def __init__(self, model: nn.Module, devices: Collection[torch.device]) -> None:
        self._model, self._rng = model, RNGState(devices, has_python=True)
        self._attributes = {
            (path, name): (value, copy.copy(value) if type(value) in _CONTAINERS else None)
            for path, _, name, value in self._current()
        }
        # Name -> the module's dictionary, the key, the tensor and, if it was written, its former value.
        self._written: dict[str, tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = {}
        norms = (each for each in model.modules() if isinstance(each, _BatchNorm))
        statistics = (each for norm in norms for each in norm._buffers.values() if each is not None)
        self._statistics = [(each, each.clone()) for each in statistics]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Learn which parameters and buffers a forward in this context writes or replaces."""
        known = [(*each, each[-1].data) for each in self._tensors()]
        writes = _Writes([each for *_, each, _ in known])
        try:
            with writes:
                yield
        finally:
            for path, where, name, each, data in known:
                is_new = where.get(name) is not each or each.data.data_ptr() != data.data_ptr()
                if is_new or id(each) in writes.before:
                    self._written[path] = where, name, each, writes.before.get(id(each), data)

    def draws(self) -> bool:
        """Return whether random numbers were drawn."""
        return self._rng.has_changed()

    def changed(self) -> list[str]:
        """Return the names of what has changed."""
        found = [f"{path}.{name}".lstrip(".") for path, _, name, *_ in self._changed_attributes()]
        return [*found, *self._written]

    def restore(self) -> None:
        """Restore what has changed, and the states of the generators."""
        for where, name, each, value in self._written.values():
            where[name] = each
            each.data.copy_(value)
        for each, value in self._statistics:
            if not torch.equal(each, value.to(each.device)):  # else autograd may have saved it
                each.copy_(value)
        for _, module, name, before, content in list(self._changed_attributes()):
            if before is _MISSING:
                del vars(module)[name]
                continue
            vars(module)[name] = before
            if content is not None:
                before.clear()
                (before.extend if isinstance(before, list) else before.update)(content)
        self._rng.restore()

    def _changed_attributes(self) -> Iterator[tuple[str, nn.Module, str, Any, Any]]:
        for path, module, name, value in self._current():
            before, content = self._attributes.get((path, name), (_MISSING, None))
            is_same = value is before or (isinstance(value, _PLAIN) and type(value) is type(before) and value == before)
            if not is_same or (content is not None and _items(value) != _items(content)):
                yield path, module, name, before, content

    def _current(self) -> Iterator[tuple[str, nn.Module, str, Any]]:
        """Yield the path, module, name and value of each attribute that torch does not set on every module."""
        for path, module in self._model.named_modules():
            for name, value in vars(module).items():
                if name not in _OF_EVERY_MODULE:
                    yield path, module, name, value

    def _tensors(self) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
        for path, module in self._model.named_modules():
            buffers = {} if isinstance(module, _BatchNorm) else module._buffers
            places = [(where, *item) for where in (module._parameters, buffers) for item in where.items()]
            for where, name, each in places:
                if each is not None and each.layout is torch.strided:
                    yield f"{path}.{name}".lstrip("."), where, name, each


def _items(container: Any) -> list[Any]:
    """Return plain values, and the ids of other objects, which may not compare."""
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, each if isinstance(each, _PLAIN) else id(each)) for key, each in pairs]
