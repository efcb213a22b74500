"""What comes back from a call: rank 0's state of every object of the caller that has one, in place.

Stateful objects are modules, optimizers, generators of random numbers, and whatever has state_dict
and load_state_dict. They are found while the call is pickled. Their list is the last part of the
pickled call, so that the workers' list holds their copies in the same order. Other objects that have
changed are named.
"""

from __future__ import annotations

import contextlib
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from parallelize.call.arrays import is_in_file
from parallelize.call.pickling import Trial
from parallelize.call.reachable import (
    CODE,
    CONTAINERS,
    GENERATORS,
    is_a,
    is_stateful,
    namespace,
)
from parallelize.cluster.code_owner import is_user_module
from parallelize.torch_patches.module_tensors import all_named_buffers, all_named_parameters
from parallelize.torch_patches.step import parameters_of

# Attributes of modules and optimizers that come back, or never change.
_OF_TORCH = frozenset({"training", "defaults", "param_groups", "state"})
# Not data. What datasets, samplers and loaders count or cache is not the result of a call.
_IGNORED = (*CODE, types.ModuleType, logging.Filterer, Dataset, Sampler, DataLoader)
# What weighs more is data: a comparison may not cost what a copy of it would.
_MAX_BYTES = 2**17
_MAX_BYTES_OF_TENSOR = 2**15  # as a list of numbers up to four times as much
_MAX_ATTRIBUTES = 1000
_MAX_SHOWN = 5


def _tensors(item: object) -> dict[str, Any]:
    """Return parameters and buffers of a module, or parameters of an optimizer, by name."""
    if is_a(item, nn.Module):
        return {**dict(all_named_parameters(item)), **dict(all_named_buffers(item))}
    parameters = parameters_of(item) if is_a(item, Optimizer) else ()
    return {f"parameter {index}": parameter for index, parameter in enumerate(parameters)}


def _state_of(item: Any) -> tuple[dict[str, torch.Tensor], Any] | None:
    """Return the tensors of a stateful object and the rest of its state; None: it is unreadable."""
    # A model that a block with restore=False left sharded has DTensors, which only all ranks
    # together can gather.
    tensors = {
        name: each.detach().requires_grad_(each.requires_grad)
        for name, each in _tensors(item).items()
        if not (is_lazy(each) or hasattr(each, "full_tensor"))
    }
    if is_a(item, nn.Module):
        return tensors, {name: each.training for name, each in item.named_modules()}
    with contextlib.suppress(Exception):  # a user's class may raise anything
        return tensors, _access(item)[0]()
    return None


def _access(item: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return functions that read and write an object's state."""
    if is_a(item, torch.Generator):
        return item.get_state, item.set_state
    if issubclass(type(item), GENERATORS):
        return lambda: item.__reduce__()[2], item.__setstate__
    return item.state_dict, item.load_state_dict


def bytes_of_models(stateful: Sequence[Any]) -> int:
    """Return the size of the parameters and buffers that come back."""
    models = [item for item in stateful if is_a(item, nn.Module)]
    tensors = (each for item in models for each in _tensors(item).values() if not is_lazy(each))
    return sum(each.nbytes for each in tensors if not each.is_meta)


class Changes:
    """Finds what a call changes in objects that the caller has, too; made before it, on rank 0.

    Args:
        stateful: the worker's copies of the caller's stateful objects.
        data: returns the other objects of the call, by name as shown to the user.
    """

    def __init__(self, stateful: Sequence[Any], data: Callable[[], Mapping[str, object]]) -> None:
        self._stateful, self._data = stateful, data
        self._returned = {id(part): part for item in stateful for part in _parts(item)}
        self._before = self._looks()

    def found(self) -> dict[str, Any]:
        """Return the states, by index, and the names of other objects that have changed."""
        states = {index: _state_of(item) for index, item in enumerate(self._stateful)}
        changed = []
        for name, look in self._looks().items():
            earlier = self._before.get(name)
            if earlier is None or look.differs_from(earlier):
                changed.append(name)
        return {
            "states": {index: state for index, state in states.items() if state is not None},
            "unreturned": sorted(changed),
        }

    def _looks(self) -> dict[str, _Look]:
        return {name: _Look(item, self._returned) for name, item in self._data().items()}


class _Look:
    """What an object looks like at one time, to tell whether it has changed.

    Small objects are looked at whole. Of large tensors and arrays, identity and version are noted:
    they are not read. Larger objects of other types, and their parts, always look the same.

    Args:
        item: the object.
        returned: what comes back from the call, by id.
    """

    def __init__(self, item: object, returned: Mapping[int, object]) -> None:
        self._returned = returned
        self._large = list[_Large]()
        self._digest = Trial(item, at_most=_MAX_BYTES, stand_in=self._stand_in).digest
        # A class may pickle a copy, which is gone by now, and is another one the next time.
        for large in self._large:
            large.is_temporary = large.reference() is None

    def differs_from(self, earlier: _Look) -> bool:
        """Whether the object has changed since an earlier look at it."""
        if self._digest != earlier._digest:
            return True
        if not self._digest:  # it weighs too much, or cannot be pickled
            return False
        pairs = zip(self._large, earlier._large, strict=True)  # their number is in the digest
        return any(large.differs_from(before) for large, before in pairs)

    def _stand_in(self, item: Any) -> object:
        if id(item) in self._returned or is_a(item, _IGNORED):
            return id(item)
        if is_a(item, torch.Tensor):
            if _is_small(item):
                return str(item.dtype), tuple(item.shape), item.detach().flatten().tolist()
            self._large.append(_Large(weakref.ref(item), _version_of(item)))
            shape = "" if item.is_nested else tuple(item.shape)
            return len(self._large), str(item.dtype), shape
        if is_a(item, np.ndarray) and (item.nbytes > _MAX_BYTES or is_in_file(item)):
            self._large.append(_Large(weakref.ref(item), None))
            return len(self._large), str(item.dtype), item.shape
        return None


@dataclass
class _Large:
    """A tensor or array that is not read.

    Attributes:
        reference: leads to it as long as it lives: its id may be another object's later.
        version: what changes when it is written to, as far as that can be told.
        is_temporary: whether it was made to be pickled.
    """

    reference: weakref.ref[Any]
    version: object
    is_temporary: bool = False

    def differs_from(self, earlier: _Large) -> bool:
        """Whether another object has taken the place of the earlier one, or it was written to."""
        if self.is_temporary or earlier.is_temporary:
            return False
        is_same = self.reference() is earlier.reference()
        return not is_same or self.version != earlier.version


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor may be compared."""
    has_elements = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested)
    return has_elements and tensor.nbytes <= _MAX_BYTES_OF_TENSOR


def _version_of(tensor: torch.Tensor) -> object:
    """Return how often a tensor was written to, and where its elements are."""
    version = 0 if tensor.is_inference() else tensor._version  # torch does not count their writes
    try:
        return version, tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own, such as a sparse one
        return version, 0


def _parts(item: Any) -> Iterable[object]:
    modules = item.modules() if is_a(item, nn.Module) else [item]
    return *modules, *_tensors(item).values()


def data_of(name: str, item: object) -> dict[str, object]:
    """Return the data of an object by name as shown: its attributes, but not those that come back."""
    attributes = namespace(item)
    if name.startswith("__") or is_a(item, _IGNORED):
        return {}
    if is_stateful(item):
        is_own = is_user_module(type(item).__module__) and is_a(item, (nn.Module, Optimizer))
        public = {key for key in attributes if is_own and not key.startswith("_")}
        attributes = {key: attributes[key] for key in public - _OF_TORCH}
    elif not 0 < len(attributes) <= _MAX_ATTRIBUTES or is_a(item, CONTAINERS):
        return {name: item}  # compared whole
    shown = {f"{name}.{key}": value for key, value in attributes.items()}
    return {key: value for key, value in shown.items() if not is_a(value, _IGNORED)}


def unreturned_warning(outcomes: Sequence[Any]) -> list[str]:
    """Return the warning that names what does not come back from rank 0, or from other ranks; none if all does."""
    names, own = outcomes[0].unreturned, repr(outcomes[0].value)
    other = next((each for each in outcomes if each.evaluated not in (None, own)), None)
    if other is not None:
        what = f"rank 0 returned {own}, and rank {other.rank} {other.evaluated}: each evaluated its own samples"
        return [f"{what}; loader.mean(values) and all_reduce(value, 'mean') are over all ranks"]
    if not names:
        return []
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    what = f"{', '.join(names[:_MAX_SHOWN])}{more} changed in the workers"
    why = (
        "only modules, optimizers, generators and what has state_dict and load_state_dict come back"
    )
    verb = "does" if len(names) == 1 else "do"
    return [f"{what} and {verb} not come back: {why}; return the rest from the function"]


def restore(objects: Sequence[Any], states: Mapping[int, Any]) -> list[str]:
    """Write the states that a call returned into the caller's objects, in place.

    Returns:
        Warnings about objects, or parts of them, that could not be written.
    """
    problems = []
    for index, state in states.items():
        try:
            missing = _write(objects[index], *state)
        except Exception as exc:  # noqa: BLE001 - a user's class may raise anything
            missing = [f"its state ({exc})"]
        if missing:
            problems.append(
                f"{type(objects[index]).__name__}: {', '.join(missing)} changed shape or name in the "
                "call, stayed sharded (restore=False) or cannot be overwritten: not copied back; "
                "return the object from the function, or its state"
            )
    return problems


def _write(item: Any, trained: dict[str, torch.Tensor], rest: Any) -> list[str]:
    """Write a state; return the names of tensors that cannot be written."""
    targets = _tensors(item)
    known = trained.keys() & targets.keys()
    copied = {name for name in known if _copy(targets[name], trained[name])}
    if is_a(item, nn.Module):
        for name, module in item.named_modules():
            module.training = rest.get(name, module.training)
    elif is_a(item, Optimizer) and type(item).load_state_dict is Optimizer.load_state_dict:
        _load_optimizer(item, rest)
    else:
        _access(item)[1](rest)
    lazy = {name for name, target in targets.items() if is_lazy(target)}
    return sorted({*trained, *targets} - copied - lazy)


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state into the optimizer's dictionaries: wrappers, such as SAM's, hold them, too."""
    loaded = object.__new__(type(optimizer))
    vars(loaded).update(vars(optimizer))
    loaded.load_state_dict(state)
    for group, new in zip(optimizer.param_groups, loaded.param_groups, strict=True):
        group.update(new)
    optimizer.state.clear()
    optimizer.state.update(loaded.state)


def _copy(target: torch.Tensor, trained: torch.Tensor) -> bool:
    """Copy `trained` into `target` in place; return whether the copy succeeded."""
    if is_lazy(target):  # initialized during the call
        target.materialize(trained.shape, dtype=trained.dtype)
    if target.shape != trained.shape or target.is_meta != trained.is_meta:
        return False
    try:
        # inference_mode(False) enables gradients.
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(trained)
    except RuntimeError:  # an expanded tensor: several elements share one memory location
        return torch.equal(target, trained.to(target.device, target.dtype))
    if target.is_leaf:
        target.requires_grad_(trained.requires_grad)
    return True
