"""What a trial of a model's forward must leave as it was, and how it is put back.

    state = ModelState(model, devices)   what the model is now
    with state.watching():               the first trial: to which tensors does forward write?
        forward()
    state.draws(), state.changed()       what forward has drawn and changed
    state.restore()                      before each further trial, and after the last one

    tensors      values and shapes of parameters and buffers that forward has written to
    attributes   of each module, as they were; containers among them, and in these, with their items
    generators   the states of the global ones, and of torch.Generators that are attributes

A forward that runs again after `restore` draws the same numbers, and sees the same state. What
forward changes elsewhere, such as a file or a global variable, is not seen and not put back.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelize.run.containers import leaves
from parallelize.run.generators import RNGState
from parallelize.torch_patches.module_tensors import (
    all_buffers,
    all_named_buffers,
    all_named_parameters,
)
from parallelize.torch_patches.operations import before_writes

_ATTRIBUTES_OF_TORCH = frozenset({*vars(nn.Module()), "forward"}) - {"training"}
"""Attributes that torch sets on every module, such as its hooks, and the forward of a block."""

_HOOKS_OF_TORCH = {name for name, value in vars(nn.Module()).items() if type(value) is OrderedDict}
"""Attributes of a module that have its hooks. Trials register some, which `restore` must keep."""

_COMPARED_TYPES = (bool, int, float, str)
"""Types of attributes that are compared by value. Others may not compare."""

_CONTAINER_TYPES = (list, dict, set, OrderedDict, defaultdict, deque)
"""Types of containers that are put back. Subclasses may change themselves when they get items."""


@dataclass(frozen=True)
class _SavedTensor:
    """A parameter or buffer, and a copy of its former values."""

    tensor: torch.Tensor
    former: torch.Tensor

    def restore(self) -> None:
        """Give the tensor its former values, in its memory if they fit."""
        current = self.tensor.data
        has_former_shape = current.shape == self.former.shape
        if has_former_shape and current.dtype == self.former.dtype:
            current.copy_(self.former)
        else:
            # A buffer may get its shape in the first forward, by `resize_`.
            self.tensor.data = self.former.clone()


class _CopiesBeforeWrites:
    """Copies of tensors from before an operation writes to them, also through `.data` and views.

    Args:
        tensors: the tensors, with a storage.

    Attributes:
        former_by_id: id of a tensor -> its values before the first write.
    """

    def __init__(self, tensors: Collection[torch.Tensor]) -> None:
        self.former_by_id: dict[int, torch.Tensor] = {}
        self._tensors_by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()._cdata
            self._tensors_by_storage.setdefault(storage, []).append(tensor)

    def copy_arguments(self, arguments: Any) -> None:
        """Copy the tensors to which an operation may write, before its first write.

        Args:
            arguments: of the operation, in containers. A view has the storage of its tensor.
        """
        for argument in leaves(arguments):
            if not _is_dense(argument):
                continue
            storage = argument.untyped_storage()._cdata
            for tensor in self._tensors_by_storage.get(storage, ()):
                if id(tensor) not in self.former_by_id:
                    self.former_by_id[id(tensor)] = tensor.detach().clone()


class ModelState:
    """What a model's forward may change, as it was when this object was created.

    Args:
        model: the user's model.
        devices: the devices of which the global generators are restored.
    """

    def __init__(self, model: nn.Module, devices: Collection[torch.device]) -> None:
        self._model = model
        self._global_generators = RNGState(devices)
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        # Pairs of an object that forward may change, and a copy of its former items.
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        for module in nn.Module.modules(model):
            self._save_attributes(module)
        self._values = self._values_by_name()
        self._identities: dict[str, object] = {}
        for name, value in self._values.items():
            self._identities[name] = _identity(value)
        # The kernels of batch norm write to its buffers, and their schemas do not say so. So all
        # buffers are copied, and not only those of which `watching` sees a write.
        self._buffers: list[_SavedTensor] = []
        for buffer in all_buffers(model):
            former_values = buffer.detach().clone()
            self._buffers.append(_SavedTensor(buffer, former_values))
        # By name: parameters and buffers to which forward has written in `watching`.
        self._written: dict[str, _SavedTensor] = {}

    def _save_attributes(self, module: nn.Module) -> None:
        """Copy the attributes of a module, without the modules in it."""
        attributes = vars(module)
        former_attributes = dict(attributes)
        self._attributes.append((attributes, former_attributes))
        for name, value in attributes.items():
            if name in _HOOKS_OF_TORCH:
                continue
            # The parameters, buffers and submodules of a module are in such containers.
            for container in _containers_in(value):
                former_items = copy.copy(container)
                self._containers.append((container, former_items))
            if isinstance(value, torch.Generator):
                state = value.get_state()
                self._generators.append((value, state))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Learn to which tensors a forward in this context writes, or gives other data.

        A write raises the version of a tensor, but not a write through `.data`. Therefore the
        values are compared, too, if they are in other memory than before, as copies are.
        """
        tensors = {name: value for name, value in self._values.items() if _is_dense(value)}
        data_before = {name: tensor.data for name, tensor in tensors.items()}
        versions_before = {name: tensor._version for name, tensor in tensors.items()}
        copies = _CopiesBeforeWrites(tensors.values())
        try:
            with before_writes(copies.copy_arguments):
                yield
        finally:
            for name, tensor in tensors.items():
                former = copies.former_by_id.get(id(tensor), data_before[name])
                is_written = tensor._version != versions_before[name]
                if not is_written and former.data_ptr() != tensor.data.data_ptr():
                    is_written = not torch.equal(former, tensor.data)
                if is_written:
                    self._written[name] = _SavedTensor(tensor, former)

    def draws(self) -> bool:
        """Whether random numbers were drawn from the global generators.

        They were, if dropout has run in training mode.
        """
        return self._global_generators.has_changed()

    def changed(self) -> list[str]:
        """Return the names of the attributes and tensors that have changed.

        Tensors are those that `watching` has seen. Generators are not among the names.
        """
        names = []
        for name, value in self._values_by_name().items():
            if self._identities.get(name) != _identity(value):
                names.append(name)
        return [*names, *self._written]

    def restore(self) -> None:
        """Put back what has changed, and the states of the generators."""
        # Attributes first: they hold the containers, and the tensors by their former names.
        for attributes, former_attributes in self._attributes:
            attributes.clear()
            attributes.update(former_attributes)
        for container, former_items in self._containers:
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(former_items)
            else:
                container.update(former_items)
        for saved in (*self._written.values(), *self._buffers):
            saved.restore()
        for generator, state in self._generators:
            generator.set_state(state)
        self._global_generators.restore()

    def _values_by_name(self) -> dict[str, Any]:
        """Return the parameters, buffers, and the attributes that torch does not set.

        A name is the path of the module and that of the attribute, such as "layers.0.calls".
        """
        values: dict[str, Any] = {}
        for path, module in nn.Module.named_modules(self._model):
            for attribute, value in vars(module).items():
                if attribute not in _ATTRIBUTES_OF_TORCH:
                    values[f"{path}.{attribute}".lstrip(".")] = value
        # amp of level O2 puts its casts into attributes during a forward. They have the names of
        # parameters, which are what counts.
        values.update(named_tensors(self._model))
        return values


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model by all of their names.

    Args:
        model: a tied parameter of it has several names.
    """
    tensors: dict[str, torch.Tensor] = dict(all_named_parameters(model, remove_duplicate=False))
    tensors.update(all_named_buffers(model, remove_duplicate=False))
    return tensors


def _is_dense(value: Any) -> bool:
    """Whether a value is a tensor with a storage of its elements."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _containers_in(value: Any) -> list[Any]:
    """Return a container, the containers in it, and so on; none, if the value is no container."""
    containers: dict[int, Any] = {}
    pending = [value]
    while pending:
        candidate = pending.pop()
        if type(candidate) in _CONTAINER_TYPES and id(candidate) not in containers:
            containers[id(candidate)] = candidate
            pending += candidate.values() if isinstance(candidate, dict) else candidate
    return list(containers.values())


def _identity(value: Any) -> object:
    """Return what is equal for a value only as long as it is not changed.

    It is a number or text itself, and the id of any other object. A container has those of all
    items in it, too.
    """
    identities = [_identity_of_item(value)]
    for container in _containers_in(value):
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, item in items:
            identities.append((key, _identity_of_item(item)))
    return identities


def _identity_of_item(value: Any) -> object:
    """Return a number or text itself, and the id of any other object."""
    if isinstance(value, _COMPARED_TYPES):
        return value
    return id(value)
