"""State that a forward may change: parameters, buffers, attributes of modules and generators; found and restored."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from parallelize.run.containers import leaves
from parallelize.run.generators import RNGState
from parallelize.torch_patches.module_tensors import all_buffers, all_named_buffers, all_named_parameters
from parallelize.torch_patches.operations import before_writes

__all__ = ["ModelState", "named_tensors"]

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"}) - {"training"}
"""Attributes that torch sets on every module, such as its hooks, and the forward that a block replaces."""
_PLAIN = (bool, int, float, str)
_CONTAINERS = (list, dict, set)


class _Writes:
    """Copies of tensors from before an operation that may write to their storage, also through `.data` and views.

    Attributes:
        before: id of a tensor -> its former value.
    """

    def __init__(self, tensors: Collection[torch.Tensor]) -> None:
        self.before: dict[int, torch.Tensor] = {}
        self._of: dict[int, list[torch.Tensor]] = {}
        for each in tensors:
            self._of.setdefault(each.untyped_storage()._cdata, []).append(each)

    def copy_before(self, arguments: Any) -> None:
        """Copy those of the tensors that an operation with these arguments may write."""
        for leaf in leaves(arguments):
            for each in self._of.get(leaf.untyped_storage()._cdata, ()) if _is_dense(leaf) else ():
                self.before.setdefault(id(each), each.detach().clone())


class ModelState:
    """What a model's forward may change, as it is now.

    A forward of a `Staged` model does not change batch norm's statistics.
    """

    def __init__(self, model: nn.Module, devices: Collection[torch.device]) -> None:
        self._model, self._rng = model, RNGState(devices)
        self._attributes = [(vars(each), {**vars(each)}) for each in model.modules()]
        containers = (value for _, before in self._attributes for value in before.values())
        # Parameters and buffers are in some of them.
        self._contents = [(each, copy.copy(each)) for each in containers if type(each) in _CONTAINERS]
        self._values = self._named()
        self._forms = {name: _form(value) for name, value in self._values.items()}
        self._buffers = [
            (each, each.detach().clone()) for each in all_buffers(model)
        ]  # batch norm writes to them unseen
        self._written: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by name: a tensor and its former value

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Learn to which of the tensors a forward in this context writes, or gives other data."""
        known = [(name, each, each.data, each._version) for name, each in self._values.items() if _is_dense(each)]
        writes = _Writes([each for _, each, *_ in known])
        try:
            with before_writes(writes.copy_before):
                yield
        finally:
            for name, each, data, version in known:
                former = writes.before.get(id(each), data)
                is_other = former.data_ptr() != each.data.data_ptr() and not torch.equal(former, each.data)
                if is_other or each._version != version:
                    self._written[name] = each, former

    def draws(self) -> bool:
        """Return whether random numbers were drawn."""
        return self._rng.has_changed()

    def changed(self) -> list[str]:
        """Return the names of what has changed."""
        return [*(name for name, each in self._named().items() if self._forms.get(name) != _form(each)), *self._written]

    def restore(self) -> None:
        """Restore what has changed, and the states of the generators."""
        for attributes, before in self._attributes:
            attributes.clear()
            attributes.update(before)
        for container, content in self._contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        for each, data in (*self._written.values(), *self._buffers):
            each.data.copy_(data)
        self._rng.restore()

    def _named(self) -> dict[str, Any]:
        """Return the parameters, buffers, and attributes that torch does not set, by name."""
        found = {
            f"{path}.{key}".lstrip("."): value
            for path, module in self._model.named_modules()
            for key, value in vars(module).items()
            if key not in _OF_EVERY_MODULE
        }
        # The attributes of O2's casts, which are there during a forward, have the names of parameters.
        return {**found, **named_tensors(self._model)}


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model by all of their names."""
    parameters = all_named_parameters(model, remove_duplicate=False)
    return dict([*parameters, *all_named_buffers(model, remove_duplicate=False)])


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _form(value: Any) -> tuple[Any, ...]:
    """Return plain values, and the ids of others, which may not compare; of containers, those in them, too."""
    if type(value) in _CONTAINERS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return id(value), *((key, each if isinstance(each, _PLAIN) else id(each)) for key, each in items)
    return (value if isinstance(value, _PLAIN) else id(value),)
