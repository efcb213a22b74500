"""Optimizer steps on sharded parameters: optimizers keep the user's parameters and what they know of them.

For the time of a step of torch.optim that goes element by element, parameters, gradients and state are
plain tensors, this rank's rows, and torch's own kernels run as on any tensors. Other optimizers see full
tensors. State from before the block, or loaded in it, is cut at the next step.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelize.backends.fsdp.full_tensors import (
    ShardedParameter,
    ShardedTensor,
    dtensor_of,
    shard_like,
    stand_for,
)
from parallelize.torch_patches.step import BeforeStep, before_step, parameters_of

__all__ = ["Steps"]

_BY_ELEMENT = re.compile(
    r"torch\.optim\.(sgd|adam|adamw|adagrad|rmsprop|rprop|nadam|radam|adamax|asgd|adadelta)"
)


class Steps:
    """Hooks on the steps of the optimizers that hold sharded parameters, until `close`.

    Args:
        check: called with each of them before its step.
    """

    def __init__(self, check: Callable[[torch.optim.Optimizer], None]) -> None:
        self._check = check
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._open: Any = (
            None,
            (),
        )  # the optimizer whose step runs on rows, and its sharded parameters
        self._hooks = contextlib.ExitStack()
        self._hooks.enter_context(before_step(BeforeStep.PLACE, self._before))
        self.close = self._hooks.close

    def _before(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Hook an optimizer itself: its own hooks run after those of all optimizers, which see full tensors."""
        if not any(type(each) is ShardedParameter for each in parameters_of(optimizer)):
            return
        self._check(optimizer)
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._hooks.callback(optimizer.register_step_pre_hook(self._begin).remove)
            self._hooks.callback(optimizer.register_step_post_hook(self.end).remove)

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.end()  # of a step that has raised
        sharded = [each for each in parameters_of(optimizer) if type(each) is ShardedParameter]
        for each in sharded:
            known = optimizer.state.get(each, {})
            for key, value in known.items():
                if type(value) is torch.Tensor and value.ndim and value.shape == each.shard.shape:
                    known[key] = stand_for(shard_like(value, each.shard), each.registry)
        # A closure sees full tensors.
        if not _BY_ELEMENT.fullmatch(type(optimizer).step.__module__) or len(args) > 1 or kwargs:
            return
        self._open = optimizer, sharded
        for each in sharded:
            each.registry.writes += 1
            gradient = each.shard.grad
            each.__class__ = nn.Parameter  # type: ignore[assignment]  # for the time of the step
            each.grad = None if gradient is None else gradient._local_tensor
            for value in optimizer.state.get(each, {}).values():
                if type(value) is ShardedTensor:
                    value.__class__ = torch.Tensor  # type: ignore[assignment]  # as well

    def end(self, *_: Any) -> None:
        """Let the tensors of the optimizer that has stepped stand for full ones again."""
        optimizer, sharded = self._open
        self._open = None, ()
        for each in sharded:
            each.grad = None
            each.__class__ = ShardedParameter
            known = optimizer.state.get(each, {})
            for key, value in known.items():
                if (
                    type(value) is torch.Tensor
                    and value.ndim
                    and value.shape == each.shard._local_tensor.shape
                ):
                    known[key] = value if "shard" in value.__dict__ else _standing(value, each)
                    known[key].__class__ = ShardedTensor


def _standing(rows: torch.Tensor, parameter: Any) -> Any:
    """Return the tensor that stands for these rows of a tensor like a parameter."""
    return stand_for(dtensor_of(rows, parameter.shard), parameter.registry)
