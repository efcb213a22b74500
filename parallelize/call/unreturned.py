"""What a call changes and does not bring back: it is found on rank 0, and named in a warning.

Rank 0 takes a snapshot of each object before the function runs, and another one after it. What has
another snapshot then has changed. Stateful objects (see `object_states`) are not compared: they
come back. Their attributes do not, if a user's class has added them.

Large data is not read for that, since a comparison may not cost what a copy would.
"""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from parallelize.call.arrays import is_in_file
from parallelize.call.object_states import tensors_of
from parallelize.call.own_state import caches_of, own_attributes, without_caches
from parallelize.call.pickler import Trial
from parallelize.call.reachable import (
    CODE,
    CONTAINERS,
    is_a,
    is_stateful,
    namespace,
)
from parallelize.cluster.code_owner import is_user_module

if TYPE_CHECKING:
    from parallelize.call.outcome import Outcome

# Attributes of modules and optimizers that come back, or never change.
_OF_TORCH = frozenset({"training", "defaults", "param_groups", "state"})
# Not data. What datasets, samplers and loaders count or cache is not the result of a call.
_IGNORED = (*CODE, types.ModuleType, logging.Filterer, Dataset, Sampler, DataLoader)
_MAX_BYTES = 2**17
# A small tensor is pickled as a list of numbers, which takes up to four times as many bytes.
_MAX_BYTES_OF_TENSOR = 2**15
_MAX_ATTRIBUTES = 1000
_MAX_SHOWN = 5


class UnreturnedChanges:
    """Finds what a call changes in objects that the caller has, too; made before it, on rank 0.

    Args:
        stateful: the worker's copies of the caller's stateful objects.
        data: returns the other objects of the call, by name as shown to the user.
    """

    def __init__(self, stateful: Sequence[Any], data: Callable[[], Mapping[str, object]]) -> None:
        self._data = data
        self._returned_by_id: dict[int, object] = {}
        for item in stateful:
            modules = item.modules() if is_a(item, nn.Module) else [item]
            for part in (*modules, *tensors_of(item).values()):
                self._returned_by_id[id(part)] = part
        self._before = self._snapshots()

    def names(self) -> list[str]:
        """Return the names of the objects that have changed."""
        changed = []
        for name, snapshot in self._snapshots().items():
            earlier = self._before.get(name)
            if earlier is None or snapshot.differs_from(earlier):
                changed.append(name)
        return sorted(changed)

    def _snapshots(self) -> dict[str, _Snapshot]:
        snapshots = {}
        for name, item in self._data().items():
            snapshots[name] = _Snapshot(item, self._returned_by_id)
        return snapshots


class _Snapshot:
    """What an object is at one time, to tell later whether it has changed.

    Small objects are read whole. Of large tensors and arrays, identity and version are noted.
    Larger objects of other types, and their parts, always have the same snapshot.

    Args:
        item: the object.
        returned_by_id: what comes back from the call, by id.
    """

    def __init__(self, item: object, returned_by_id: Mapping[int, object]) -> None:
        self._returned_by_id = returned_by_id
        self._large_parts: list[_LargePart] = []
        self._digest = _Comparison(item, at_most=_MAX_BYTES, stand_in=self._stand_in).digest
        # A class may pickle a copy, which is gone by now, and is another one the next time.
        for part in self._large_parts:
            part.is_temporary = part.reference() is None

    def differs_from(self, earlier: _Snapshot) -> bool:
        """Whether the object has changed since an earlier snapshot."""
        if self._digest != earlier._digest:
            return True
        if not self._digest:  # it weighs too much, or cannot be pickled
            return False
        # Equal digests have equally many large parts: `_stand_in` numbers them.
        pairs = zip(self._large_parts, earlier._large_parts, strict=True)
        return any(part.differs_from(before) for part, before in pairs)

    def _stand_in(self, item: Any) -> object:
        """Return what is pickled in place of an object; None: the object itself."""
        if id(item) in self._returned_by_id or is_a(item, _IGNORED):
            return id(item)
        if is_a(item, torch.Tensor):
            if _is_small(item):
                return str(item.dtype), tuple(item.shape), item.detach().flatten().tolist()
            self._large_parts.append(_LargePart(weakref.ref(item), _version_of(item)))
            shape = () if item.is_nested else tuple(item.shape)
            return len(self._large_parts), str(item.dtype), shape
        if is_a(item, np.ndarray) and (item.nbytes > _MAX_BYTES or is_in_file(item)):
            self._large_parts.append(_LargePart(weakref.ref(item), None))
            return len(self._large_parts), str(item.dtype), item.shape
        return None


class _Comparison(Trial):
    """Pickles an object without the caches of what is inside."""

    def reducer_override(self, obj: Any) -> Any:
        return without_caches(obj, super().reducer_override(obj))


@dataclass
class _LargePart:
    """A tensor or array that is not read.

    Args:
        reference: leads to it as long as it lives: its id may be another object's later.
        version: what changes when it is written to, as far as that can be told.
        is_temporary: whether it was made to be pickled.
    """

    reference: weakref.ref[Any]
    version: object
    is_temporary: bool = False

    def differs_from(self, earlier: _LargePart) -> bool:
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
    # torch does not count what is written to tensors of inference mode.
    version = 0 if tensor.is_inference() else tensor._version
    try:
        return version, tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own, such as a sparse one
        return version, 0


def data_of(name: str, item: object) -> dict[str, object]:
    """Return what is compared of an object, by name as shown to the user.

    These are its attributes, but not those that come back. An object without attributes, or with
    too many, is compared whole.
    """
    if name.startswith("__") or is_a(item, _IGNORED):
        return {}
    attributes: Mapping[str, Any]
    if is_stateful(item):
        attributes = _attributes_of_user_class(item)
    else:
        attributes = own_attributes(item)
        if not 0 < len(attributes) <= _MAX_ATTRIBUTES or is_a(item, CONTAINERS):
            return {name: item}
    data = {}
    for key, value in attributes.items():
        # Names with two underscores are Python's, or a library's notes about the object.
        if not key.startswith("__") and not is_a(value, _IGNORED):
            data[f"{name}.{key}"] = value
    return data


def _attributes_of_user_class(item: object) -> dict[str, Any]:
    """Return the public attributes that a user's class has added to a module or optimizer."""
    attributes: dict[str, Any] = {}
    if is_user_module(type(item).__module__) and is_a(item, (nn.Module, Optimizer)):
        attributes.update(namespace(item))
    for key in list(attributes):
        if key.startswith("_") or key in _OF_TORCH or key in caches_of(item):
            del attributes[key]
    return attributes


def unreturned_warnings(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what to tell the caller about that which does not come back; nothing if all does.

    Args:
        outcomes: of all ranks, in rank order, or of rank 0 alone.
    """
    first = outcomes[0]
    result = repr(first.value)
    warnings = []
    for outcome in outcomes:
        if outcome.evaluated is not None and outcome.evaluated != result:
            warnings.append(
                f"rank 0 returned {result}, and rank {outcome.rank} {outcome.evaluated}: each "
                "evaluated its own samples; loader.mean(values) and all_reduce(value, 'mean') are "
                "over all ranks"
            )
            return warnings
    names = first.unreturned
    if names:
        shown = ", ".join(names[:_MAX_SHOWN])
        if len(names) > _MAX_SHOWN:
            shown += f" and {len(names) - _MAX_SHOWN} more"
        verb = "does" if len(names) == 1 else "do"
        warnings.append(
            f"{shown} changed in the workers and {verb} not come back: only modules, optimizers, "
            "generators and what has state_dict and load_state_dict come back; return the rest "
            "from the function"
        )
    return warnings
