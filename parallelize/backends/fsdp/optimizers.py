"""Steps of optimizers on sharded parameters. Optimizers keep the user's parameters and state.

    optimizer.step()
    ├── BeforeStep.PLACE of all optimizers     refuses lost gradients; puts the hooks below next to
    │                                          the step: all other hooks see full tensors
    │   pre-hook of this optimizer             cuts full state; parameters, gradients and state
    │   │                                      become rows, if the step is by element
    │   │   the step itself                    torch's own kernels, as on any plain tensors
    │   post-hook of this optimizer            rows become sharded tensors again

A step that is not by element, such as that of LBFGS or Muon, and a step with a closure get sharded
tensors, which behave as full ones.

A step that raises calls no post-hook: the next step, or the end of the block, turns its rows into
sharded tensors.

State is full if it is from before the block, or was loaded in it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from parallelize.backends.fsdp.calls import ShardedTensor, stand_for
from parallelize.backends.fsdp.full_tensors import ShardedParameter
from parallelize.backends.fsdp.shards import dtensor_of, mark_changed, shard_like
from parallelize.torch_patches.step import BeforeStep, before_step, parameters_of

# Files of torch.optim with steps that compute each element from the same element of the parameter,
# the gradient and the state, and from numbers.
_BY_ELEMENT = frozenset(
    {
        *("torch.optim.sgd", "torch.optim.asgd", "torch.optim.rprop", "torch.optim.rmsprop"),
        *("torch.optim.adam", "torch.optim.adamw", "torch.optim.adamax", "torch.optim.nadam"),
        *("torch.optim.radam", "torch.optim.adagrad", "torch.optim.adadelta"),
    }
)


@dataclass(frozen=True)
class _Step:
    """A step that is running.

    Attributes:
        optimizer: makes the step.
        parameters: its sharded parameters, of which it has one at least.
        is_on_rows: whether they, their gradients and their state are rows until the step ends.
    """

    optimizer: torch.optim.Optimizer
    parameters: list[Any]
    is_on_rows: bool


class Steps:
    """Hooks on the steps of the optimizers that hold sharded parameters, until `close`.

    Args:
        check: called with an optimizer before its step; may raise.
    """

    def __init__(self, check: Callable[[torch.optim.Optimizer], None]) -> None:
        self._check = check
        # The hooks of each optimizer: the one before its step, and the one after it.
        self._handles: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[RemovableHandle, RemovableHandle]
        ] = weakref.WeakKeyDictionary()
        self._running: _Step | None = None
        self._hooks = contextlib.ExitStack()
        self._hooks.enter_context(before_step(BeforeStep.PLACE, self._before))

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    def _before(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Hook the optimizer itself, next to its step: the user's hooks may be older or newer."""
        # A step that has raised has called no post-hook.
        self.end()
        if not _sharded_parameters(optimizer):
            return
        self._check(optimizer)
        if optimizer not in self._handles:
            begin = optimizer.register_step_pre_hook(self._begin)
            end = optimizer.register_step_post_hook(self.end)
            self._handles[optimizer] = (begin, end)
            self._hooks.callback(begin.remove)
            self._hooks.callback(end.remove)
        begin, end = self._handles[optimizer]
        # torch keeps an OrderedDict of each, and annotates it as a dict.
        hooks_before: Any = optimizer._optimizer_step_pre_hooks
        hooks_before.move_to_end(begin.id)
        hooks_after: Any = optimizer._optimizer_step_post_hooks
        hooks_after.move_to_end(end.id, last=False)

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = _sharded_parameters(optimizer)
        if not parameters:
            return
        parameters[0].registry.begin_step(parameters[0])
        for parameter in parameters:
            _cut_state(parameter, optimizer.state.get(parameter, {}))
        # A closure runs the user's code, which sees full tensors.
        has_closure = len(args) > 1 or bool(kwargs)
        is_on_rows = type(optimizer).step.__module__ in _BY_ELEMENT and not has_closure
        self._running = _Step(optimizer, parameters, is_on_rows)
        if is_on_rows:
            for parameter in parameters:
                _turn_into_rows(parameter, optimizer.state.get(parameter, {}))

    def end(self, *_: Any) -> None:
        """End the running step, if there is one: its rows become sharded tensors again."""
        step = self._running
        if step is None:
            return
        self._running = None
        step.parameters[0].registry.end_step()
        if step.is_on_rows:
            for parameter in step.parameters:
                _turn_into_shards(parameter, step.optimizer.state.get(parameter, {}))


def _sharded_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        parameter for parameter in parameters_of(optimizer) if type(parameter) is ShardedParameter
    ]


def _cut_state(parameter: Any, state: dict[Any, Any]) -> None:
    """Cut the full tensors in an optimizer's state of a parameter."""
    for key, value in state.items():
        if _has_shape(value, parameter.shard.shape):
            state[key] = stand_for(shard_like(value, parameter.shard), parameter.registry)


def _turn_into_rows(parameter: Any, state: dict[Any, Any]) -> None:
    """Turn a parameter, its gradient and its state into plain tensors: the rows, to be changed."""
    mark_changed(parameter.shard)
    gradient = parameter.shard.grad
    parameter.__class__ = nn.Parameter
    if gradient is not None:
        mark_changed(gradient)
        parameter.grad = gradient._local_tensor
    for value in state.values():
        if type(value) is ShardedTensor:
            mark_changed(value.shard)
            value.__class__ = torch.Tensor  # type: ignore[assignment]  # for the time of the step


def _turn_into_shards(parameter: Any, state: dict[Any, Any]) -> None:
    """Turn the rows of a parameter and of its state into sharded tensors."""
    # The shard has the gradient.
    parameter.grad = None
    parameter.__class__ = ShardedParameter
    for key, value in state.items():
        if not _has_shape(value, parameter.shard._local_tensor.shape):
            continue
        if "shard" in value.__dict__:
            value.__class__ = ShardedTensor
        else:
            # The step has made this state.
            state[key] = stand_for(dtensor_of(value, parameter.shard), parameter.registry)


def _has_shape(value: Any, shape: torch.Size) -> bool:
    """Return whether a value of a state is a plain tensor of the shape, and no number."""
    return type(value) is torch.Tensor and bool(value.ndim) and value.shape == shape
