"""What comes back from a call: rank 0's state of every object of the caller that has one, written in place.

Stateful objects are modules, optimizers, generators of random numbers, and whatever has state_dict and load_state_dict.
They are found while the call is pickled. Their list is the last part of the pickled call, so that the workers' list
holds their copies in the same order. Other objects that have changed are named.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import random
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from parallelize.call.pickling import Trial
from parallelize.call.reachable import (
    CODE,
    CONTAINERS,
    PROXY,
    free_variables,
    is_a,
    is_stateful,
    is_user_code,
    namespace,
)

__all__ = ["Changes", "data_of", "restore", "unreturned_warning", "variables_of"]

_OF_TORCH = frozenset({"training", "defaults", "param_groups", "state"})  # attributes that come back, or never change
_CODE = (*CODE, types.ModuleType, PROXY)
_MAX_BYTES = 2**17  # larger objects are data, and not compared
_MAX_SHOWN = 5


class _ModuleState(NamedTuple):
    """Parameters and buffers by name, the names of submodules in training mode, those of trainable parameters."""

    tensors: Mapping[str, torch.Tensor]
    training: frozenset[str]
    trainable: frozenset[str]


def _tensors(item: object) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module, or the parameters of an optimizer, by name."""
    named: list[tuple[str, torch.Tensor]] = []
    if isinstance(item, nn.Module):
        named = [*item.named_parameters(), *item.named_buffers()]
    elif isinstance(item, Optimizer):
        groups = enumerate(item.param_groups)
        named = [(f"param_groups[{g}]['params'][{i}]", p) for g, each in groups for i, p in enumerate(each["params"])]
    return dict(named)


def _plain_tensors(item: object) -> dict[str, torch.Tensor]:
    # A model that a block with restore=False left sharded has DTensors, which only all ranks together can gather.
    tensors = _tensors(item).items()
    return {name: each.detach() for name, each in tensors if not (is_lazy(each) or hasattr(each, "full_tensor"))}


def _state_of(item: Any) -> Any:
    """Return the state of a stateful object; None if it cannot be read."""
    if is_a(item, nn.Module):
        training = frozenset(name for name, each in item.named_modules() if each.training)
        trainable = frozenset(name for name, each in item.named_parameters() if each.requires_grad)
        return _ModuleState(_plain_tensors(item), training, trainable)
    if is_a(item, np.random.Generator):
        return item.bit_generator.state
    with contextlib.suppress(Exception):  # a user's class may raise anything
        state = getattr(item, _access(item)[0])()
        return (_plain_tensors(item), state) if is_a(item, Optimizer) else state
    return None


def _access(item: object) -> tuple[str, str]:
    """Return the names of the methods that read and write a state."""
    if is_a(item, random.Random):
        return "getstate", "setstate"
    is_generator = is_a(item, (torch.Generator, np.random.RandomState))
    return ("get_state", "set_state") if is_generator else ("state_dict", "load_state_dict")


class Changes:
    """Finds what a call changes in objects that the caller has, too; made before the call, in rank 0's process.

    Args:
        stateful: the worker's copies of the caller's stateful objects.
        data: returns the other objects of the call, by name as shown to the user.
    """

    def __init__(self, stateful: Sequence[Any], data: Callable[[], Mapping[str, object]]) -> None:
        self._stateful, self._data = stateful, data
        self._returned = {id(part): part for each in stateful for part in _parts(each)}
        self._before = self._digests()

    def found(self) -> dict[str, Any]:
        """Return the states that have changed, by index, and the names of other objects that have."""
        (states, names), (old_states, old_names) = self._digests(), self._before
        return {
            "states": {
                index: _state_of(self._stateful[index]) for index in states if states[index] != old_states[index]
            },
            "unreturned": sorted(name for name in names if names[name] != old_names.get(name)),
        }

    def _digests(self) -> tuple[dict[int, object], dict[str, object]]:
        states = dict(enumerate(map(_state_of, self._stateful)))
        return (
            {index: Trial.of(state, at_most=math.inf, compares=True)[1:] for index, state in states.items()},
            {
                name: Trial.of(item, at_most=_MAX_BYTES, skips=self._is_skipped, compares=True)[1:]
                for name, item in self._data().items()
            },
        )

    def _is_skipped(self, item: object) -> bool:
        # What datasets, samplers and loaders count or cache is not the result of a call.
        return id(item) in self._returned or is_a(item, (Dataset, Sampler, DataLoader))


def _parts(item: object) -> Iterable[object]:
    modules = item.modules() if is_a(item, nn.Module) else [item]
    return *modules, *_tensors(item).values()


def data_of(name: str, item: object) -> dict[str, object]:
    """Return the data of an object by name as shown to the user: its attributes, without those that come back."""
    attributes = dict(namespace(item))
    if is_a(item, (nn.Module, Optimizer)) and is_user_code(type(item).__module__):
        attributes = {
            key: value for key, value in attributes.items() if key not in _OF_TORCH and not key.startswith("_")
        }
    elif is_stateful(item):
        return {}
    elif not attributes or is_a(item, CONTAINERS):
        return {name: item}
    return {f"{name}.{key}": value for key, value in attributes.items() if not is_a(value, _CODE)}


def variables_of(function: object) -> dict[str, object]:
    """Return the data in the closure of a function, and in its globals if it was pickled by value."""
    inner = inspect.unwrap(function) if callable(function) else function
    if not is_a(inner, types.FunctionType):
        return {}
    is_imported = inner.__globals__ is namespace(sys.modules.get(inner.__module__))
    found = {**({} if is_imported else inner.__globals__), **dict(free_variables(inner))}
    return {name: value for name, value in found.items() if not (name.startswith("__") or is_a(value, _CODE))}


def unreturned_warning(names: Sequence[str]) -> list[str]:
    """Return the warning that names what does not come back; none if there are no names."""
    if not names:
        return []
    shown = ", ".join(names[:_MAX_SHOWN]) + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
    why = "only modules, optimizers, generators and what has state_dict and load_state_dict come back"
    verb = "does" if len(names) == 1 else "do"
    return [f"{shown} changed in the workers and {verb} not come back: {why}; return the rest from the function"]


def restore(objects: Sequence[Any], states: Mapping[int, Any]) -> list[str]:
    """Write the states that a call returned into the caller's objects, in place.

    Returns:
        Warnings about objects, or parts of them, that could not be written.
    """
    problems = []
    for index, state in states.items():
        name = type(objects[index]).__name__
        try:
            missing = _write(objects[index], state)
        except Exception as exc:  # noqa: BLE001 - a user's class may raise anything
            problems.append(
                f"the state of {name} after the call does not fit the caller's ({exc}): not copied back; "
                "return its state from the function"
            )
        else:
            if missing:
                problems.append(
                    f"{name}: {', '.join(missing)} changed shape or name in the call, stayed sharded (restore=False) "
                    "or cannot be overwritten: not copied back; return the module from the function to get its "
                    "trained weights"
                )
    return problems


def _write(item: Any, state: Any) -> list[str]:
    """Write a state; return the names of tensors that cannot be written."""
    if is_a(item, nn.Module):
        return _write_module(item, state)
    if is_a(item, np.random.Generator):
        item.bit_generator.state = state
        return []
    if is_a(item, Optimizer):
        tensors, state = state
        for name, target in _plain_tensors(item).items():
            if name in tensors and target.shape == tensors[name].shape:
                _copy(target, tensors[name])
        # Its dictionaries stay: wrappers, such as SAM's, hold them, too.
        groups, states = item.param_groups, item.state
        item.load_state_dict(state)
        if item.state is not states and type(item).load_state_dict is Optimizer.load_state_dict:
            for group, loaded in zip(groups, item.param_groups, strict=True):
                group.update(loaded)
            states.clear()
            states.update(item.state)
            item.param_groups, item.state = groups, states
        return []
    getattr(item, _access(item)[1])(state)
    return []


def _write_module(module: nn.Module, state: _ModuleState) -> list[str]:
    """Copy parameters, buffers, training modes and requires_grad into a module, in place."""
    trained, targets = state.tensors, dict[str, Any](_tensors(module))
    for name in [name for name, tensor in targets.items() if is_lazy(tensor)]:
        if name in trained:  # lazy in the caller, initialized during the call
            targets[name].materialize(trained[name].shape, dtype=trained[name].dtype)
        else:
            del targets[name]
    fitting = (name for name, tensor in trained.items() if name in targets and targets[name].shape == tensor.shape)
    copied = {name for name in fitting if _copy(targets[name], trained[name])}
    for name, each in module.named_modules():
        each.training = name in state.training
    for name, parameter in module.named_parameters():
        if name in copied and parameter.is_leaf:
            parameter.requires_grad_(name in state.trainable)
    return sorted({*trained, *targets} - copied)


def _copy(target: torch.Tensor, trained: torch.Tensor) -> bool:
    """Copy `trained` into `target` in place; return whether the copy succeeded."""
    if target.is_meta or trained.is_meta:
        return target.is_meta and trained.is_meta
    try:
        with torch.no_grad(), torch.inference_mode(target.is_inference()):
            target.copy_(trained)
    except RuntimeError:  # an expanded tensor: several elements share one memory location
        if not torch.equal(target, trained.to(target.device, target.dtype)):
            target.data = trained.to(target.device, target.dtype, copy=True)
    return True
