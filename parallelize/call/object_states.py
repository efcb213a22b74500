"""The states of stateful objects: read on rank 0, and written into the caller's objects, in place.

An object is stateful if a state can be read from it and written to it (`reachable.is_stateful`):

    a module                     parameters and buffers, and which modules are in training mode
    an optimizer                 its parameters, and its state_dict
    a generator of numbers       its own state
    whatever has state_dict      its state_dict
    and load_state_dict

Stateful objects are found while the call is pickled. Their list is the last part of the pickled
call, so that the workers' list holds their copies in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from parallelize.call.reachable import GENERATORS, is_a
from parallelize.torch_patches.module_tensors import all_named_buffers, all_named_parameters
from parallelize.torch_patches.step import parameters_of


@dataclass(frozen=True)
class ObjectState:
    """The state of a stateful object.

    Args:
        tensors: parameters and buffers of a module, or parameters of an optimizer, by name.
        rest: training modes by the names of modules, or what `state_dict` returns, or the state of
            a generator; of an optimizer with sharded tensors: None.
    """

    tensors: Mapping[str, torch.Tensor]
    rest: Any


def states_of(stateful: Sequence[Any]) -> dict[int, ObjectState]:
    """Return the states of stateful objects, by their index, without those that have none yet."""
    states = {}
    for index, item in enumerate(stateful):
        state = _state_of(item)
        if state is not None:
            states[index] = state
    return states


def _state_of(item: Any) -> ObjectState | None:
    """Return the state of an object; None: its class cannot read it, as before the first use."""
    tensors = {}
    for name, tensor in tensors_of(item).items():
        if not is_lazy(tensor) and not _is_sharded(tensor):
            tensors[name] = tensor.detach().requires_grad_(tensor.requires_grad)
    if is_a(item, nn.Module):
        modes = {name: module.training for name, module in item.named_modules()}
        return ObjectState(tensors, modes)
    if is_a(item, Optimizer) and _has_sharded_state(item):
        return ObjectState(tensors, rest=None)
    read, _ = _reader_and_writer(item)
    try:
        return ObjectState(tensors, read())
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return None


def _has_sharded_state(optimizer: Optimizer) -> bool:
    """Whether fsdp has left some of an optimizer's state sharded."""
    for state_of_parameter in optimizer.state.values():
        is_mapping = isinstance(state_of_parameter, Mapping)
        if is_mapping and any(map(_is_sharded, state_of_parameter.values())):
            return True
    return False


def _is_sharded(value: object) -> bool:
    """Whether a value is a tensor that fsdp has left sharded after a block.

    It has the methods of a DTensor. Only all ranks together can gather it, and rank 0 reads states
    alone.
    """
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def tensors_of(item: object) -> dict[str, Any]:
    """Return parameters and buffers of a module, or parameters of an optimizer, by name."""
    tensors: dict[str, Any] = {}
    if is_a(item, nn.Module):
        tensors.update(all_named_parameters(item))
        tensors.update(all_named_buffers(item))
    elif is_a(item, Optimizer):
        for index, parameter in enumerate(parameters_of(item)):
            tensors[f"parameter {index}"] = parameter
    return tensors


def _reader_and_writer(item: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return functions that read and write an object's state."""
    if is_a(item, torch.Generator):
        return item.get_state, item.set_state
    if issubclass(type(item), GENERATORS):
        return lambda: item.__reduce__()[2], item.__setstate__
    return item.state_dict, item.load_state_dict


def bytes_of_models(stateful: Sequence[Any]) -> int:
    """Return the size of the parameters and buffers that come back."""
    size = 0
    for item in stateful:
        if not is_a(item, nn.Module):
            continue
        for tensor in tensors_of(item).values():
            if not is_lazy(tensor) and not tensor.is_meta:
                size += tensor.nbytes
    return size


def restore(objects: Sequence[Any], states: Mapping[int, ObjectState]) -> list[str]:
    """Write the states that a call returned into the caller's objects, in place.

    Returns:
        Warnings about objects, or parts of them, that could not be written.
    """
    problems = []
    for index, state in states.items():
        try:
            missing = _write(objects[index], state)
        except Exception as exc:  # noqa: BLE001 - a user's class may raise anything
            missing = [f"its state ({exc})"]
        if missing:
            problems.append(
                f"{type(objects[index]).__name__}: {', '.join(missing)} changed shape or name in "
                "the call, stayed sharded or cannot be overwritten: not copied back; return the "
                "object from the function, or its state, or use parallelize.save() in the call if "
                "it is sharded"
            )
    return problems


def _write(item: Any, state: ObjectState) -> list[str]:
    """Write a state; return the names of tensors that cannot be written."""
    targets = tensors_of(item)
    copied = set()
    for name, trained in state.tensors.items():
        if name in targets and _copy(targets[name], trained):
            copied.add(name)
    if is_a(item, nn.Module):
        for name, module in item.named_modules():
            module.training = state.rest.get(name, module.training)
    elif is_a(item, Optimizer) and state.rest is None:
        return ["its state"]
    elif is_a(item, Optimizer) and type(item).load_state_dict is Optimizer.load_state_dict:
        _load_optimizer(item, state.rest)
    else:
        _, write = _reader_and_writer(item)
        write(state.rest)
    # Lazy parameters that the call has not initialized, either, have no values to copy.
    lazy = {name for name, target in targets.items() if is_lazy(target)}
    return sorted({*state.tensors, *targets} - copied - lazy)


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state into the optimizer's own dictionaries.

    `load_state_dict` would replace them, and wrappers of the optimizer, such as SAM's, hold them.
    """
    loaded = object.__new__(type(optimizer))
    vars(loaded).update(vars(optimizer))
    loaded.load_state_dict(state)
    for group, loaded_group in zip(optimizer.param_groups, loaded.param_groups, strict=True):
        group.update(loaded_group)
    optimizer.state.clear()
    optimizer.state.update(loaded.state)


def _copy(target: torch.Tensor, trained: torch.Tensor) -> bool:
    """Copy `trained` into `target` in place; return whether the copy succeeded."""
    if is_lazy(target):
        # The call has initialized its copy of the parameter.
        target.materialize(trained.shape, dtype=trained.dtype)
    if target.shape != trained.shape or target.is_meta != trained.is_meta:
        return False
    try:
        # inference_mode(False) enables gradients.
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(trained)
    except RuntimeError:
        # An expanded tensor, of which several elements share one memory location, is not written.
        return torch.equal(target, trained.to(target.device, target.dtype))
    if target.is_leaf:
        target.requires_grad_(trained.requires_grad)
    return True
