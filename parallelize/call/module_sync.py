"""Return of what a call has trained: rank 0's weights and optimizer states, written into the caller's own objects.

The modules, optimizers and schedulers of a call are found while the call is pickled (`StatefulObjects`). Their list is
the last part of the pickled call, so that the workers' list holds their copies in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from parallelize.call.reachable import STATEFUL, is_a

__all__ = [
    "ModuleState",
    "StatefulObjects",
    "TrainingState",
    "copy_module_state",
    "module_state",
    "restore",
    "signature",
    "tensor_fingerprint",
    "tensor_ids",
]

_SAMPLE_SIZE = 64


class StatefulObjects(list[Any]):
    """The modules, optimizers and schedulers of a call, each once; submodules only as part of their module."""

    def __init__(self) -> None:
        super().__init__()
        self._ids: set[int] = set()

    def __reduce__(self) -> Any:
        return list, (list(self),)  # without the ids, which are those of this process

    def __contains__(self, item: object) -> bool:
        return id(item) in self._ids

    def add(self, item: object) -> None:
        """Add an object if it is a module, optimizer or scheduler that is not yet contained."""
        if not is_a(item, STATEFUL) or id(item) in self._ids:
            return
        self._ids.update(map(id, item.modules() if isinstance(item, nn.Module) else [item]))
        self.append(item)


@dataclass(frozen=True)
class ModuleState:
    """Parameters and buffers by name, the names of submodules in training mode, those of trainable parameters."""

    tensors: Mapping[str, torch.Tensor]
    training: frozenset[str]
    trainable: frozenset[str]


def module_state(module: nn.Module) -> ModuleState:
    """Return the state of a module; without lazy tensors that are not initialized."""
    return ModuleState(
        _named_tensors(module),
        _modules_in_training(module),
        frozenset(name for name, each in module.named_parameters() if each.requires_grad),
    )


def _modules_in_training(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, each in module.named_modules() if each.training)


def _named_tensors(item: object) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module, or the parameters of an optimizer, by name."""
    named: list[tuple[str, torch.Tensor]] = []
    if isinstance(item, nn.Module):
        named = [*item.named_parameters(), *item.named_buffers()]
    elif isinstance(item, Optimizer):
        groups = enumerate(item.param_groups)
        named = [(f"param_groups[{g}]['params'][{i}]", p) for g, each in groups for i, p in enumerate(each["params"])]
    # A model that a block with restore=False left sharded has DTensors, which only all ranks together can gather.
    return {name: each.detach() for name, each in named if not (is_lazy(each) or hasattr(each, "full_tensor"))}


def _fingerprint(item: object) -> object:
    """Return a value that changes when an optimizer, or any large part of a module's weights, changes."""
    if not isinstance(item, (nn.Module, Optimizer)):
        return object()
    tensors = {name: tensor_fingerprint(tensor) for name, tensor in _named_tensors(item).items()}
    if isinstance(item, nn.Module):
        return tensors, _modules_in_training(item)
    settings = [{key: repr(value) for key, value in group.items() if key != "params"} for group in item.param_groups]
    parts: list[tuple[str, Any]] = [part for each in item.state.values() for part in each.items()]
    state = [(key, value._version if isinstance(value, torch.Tensor) else repr(value)) for key, value in parts]
    return tensors, settings, state


def tensor_fingerprint(tensor: torch.Tensor) -> object:
    """Return shape, version and a sample: writes through `.data`, as in an EMA, do not change the version."""
    version = -1 if tensor.is_inference() else tensor._version
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return tensor.shape, version
    step = max(1, tensor.numel() // _SAMPLE_SIZE)
    return tensor.shape, version, tensor.view(-1)[::step].contiguous().view(torch.uint8).tolist()


def signature(module: nn.Module) -> str:
    """Return the class and the shapes of a module's parameters, as text."""
    return f"{type(module).__qualname__} {[(name, tuple(each.shape)) for name, each in _named_tensors(module).items()]}"


def tensor_ids(items: Iterable[object]) -> set[int]:
    """Return the ids of the parameters and buffers of modules, and of the parameters of optimizers."""
    found: set[int] = set()
    for item in items:
        if isinstance(item, nn.Module):
            found.update(map(id, (*item.parameters(), *item.buffers())))
        elif isinstance(item, Optimizer):
            found.update(id(each) for group in item.param_groups for each in group["params"])
    return found


class TrainingState:
    """Finds what a call changes in the modules, optimizers and schedulers that the caller has, too.

    Args:
        objects: the worker's copies of the caller's objects.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._before = [_fingerprint(item) for item in objects]

    def changed(self, trained: Iterable[nn.Module]) -> dict[int, Any]:
        """Return the state of each changed object, by its index.

        Args:
            trained: modules that ran in a parallel_model block; they always count as changed.
        """
        in_block = tensor_ids(trained)
        return {
            index: _state_of(item)
            for index, (item, before) in enumerate(zip(self._objects, self._before, strict=True))
            if tensor_ids([item]) & in_block or _fingerprint(item) != before
        }


def _state_of(item: Any) -> Any:
    if isinstance(item, nn.Module):
        return module_state(item)
    return (_named_tensors(item), item.state_dict()) if isinstance(item, Optimizer) else item.state_dict()


def restore(objects: Sequence[Any], states: Mapping[int, Any]) -> list[str]:
    """Write the states that a call returned into the caller's objects, in place.

    Returns:
        Warnings about objects, or parts of them, that could not be written.
    """
    problems = [_restore_one(item, states[index]) for index, item in enumerate(objects) if index in states]
    return [each for each in problems if each]


def _restore_one(item: Any, state: Any) -> str | None:
    if isinstance(item, nn.Module):
        return copy_module_state(item, state)
    if isinstance(item, Optimizer):
        tensors, state = state
        targets = _named_tensors(item)
        for name in targets.keys() & tensors.keys():
            if targets[name].shape == tensors[name].shape:
                _copy(targets[name], tensors[name])
    try:
        _load(item, state)
    except Exception as exc:  # noqa: BLE001 - a user's class may raise anything
        return (
            f"the state of {type(item).__name__} after the call does not fit the caller's ({exc}): not copied back; "
            "return its state_dict() from the function"
        )
    return None


def _load(item: Any, state: Any) -> None:
    """Load a state dict; keep the dictionaries of an optimizer, which others may hold, as wrappers such as SAM do."""
    if type(item).load_state_dict is not Optimizer.load_state_dict:
        item.load_state_dict(state)
        return
    groups, states = item.param_groups, item.state
    item.load_state_dict(state)
    for group, loaded in zip(groups, item.param_groups, strict=True):
        group.update(loaded)
    states.clear()
    states.update(item.state)
    item.param_groups, item.state = groups, states


def copy_module_state(module: nn.Module, state: ModuleState) -> str | None:
    """Copy rank 0's parameters, buffers, training modes and requires_grad into the caller's module, in place.

    Returns:
        A warning about tensors that cannot be copied; None: all are copied.
    """
    trained = state.tensors
    targets: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
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
    missing = sorted({*trained, *targets} - copied)
    if not missing:
        return None
    return (
        f"{type(module).__name__}: {', '.join(missing)} changed shape or name in the call, stayed sharded "
        "(restore=False) or cannot be overwritten: not copied back; return the module from the function to get its "
        "trained weights"
    )


def _copy(target: torch.Tensor, trained: torch.Tensor) -> bool:
    """Copy `trained` into `target` in place; return whether the copy succeeded."""
    if target.is_meta or trained.is_meta:
        return target.is_meta and trained.is_meta
    try:
        with torch.no_grad(), torch.inference_mode(target.is_inference()):
            target.copy_(trained)
    except RuntimeError:  # an expanded tensor: several elements share one memory location
        return _replace_data(target, trained.to(target.device, target.dtype))
    return True


def _replace_data(target: torch.Tensor, trained: torch.Tensor) -> bool:
    try:
        if not torch.equal(target, trained):
            target.data = trained.clone()
    except RuntimeError:
        return False
    return True
