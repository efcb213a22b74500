"""Averages the values of closures over the ranks, so that `optimizer.step(closure)` decides alike on every rank."""

from __future__ import annotations

import contextlib
import functools
import numbers
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallelize.collectives import all_reduce
from parallelize.runtime.containers import map_leaves
from parallelize.runtime.gradients import Closure, change_closure, parameters_of
from parallelize.runtime.weighted_backward import loss_weight

__all__ = ["average_closures"]

_MARK = "_parallelize_is_averaged"


def average_closures(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Average, until the context ends, what closures return to the optimizers that hold a parameter of the model.

    A line search, or an optimizer that accepts or rejects a step, compares losses. Gradients are averaged over the
    ranks, but a closure's loss is that of this rank's batch: ranks that compare their own losses take other steps, or
    evaluate the closure another number of times and then wait for each other.

    Args:
        model: a model whose engine averages gradients over the ranks; an fsdp model has its shards already.
    """
    ids_at_start = {id(each) for each in model.parameters()}  # during a forward, fsdp registers full parameters

    def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 and not kwargs:
            return None
        ids = ids_at_start | {id(each) for each in model.parameters()}
        is_held = any(id(each) in ids for each in parameters_of(optimizer))
        return change_closure(_averaged, args, kwargs) if is_held else None

    return register_optimizer_step_pre_hook(before_step)


def _averaged(closure: Closure) -> Closure:
    # An optimizer may pass its closure on to another one, or hold parameters of two models; `wraps` copies the mark.
    if hasattr(closure, _MARK):
        return closure

    @functools.wraps(closure)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        return map_leaves(_average, closure(*args, **kwargs))

    setattr(averaged, _MARK, True)
    return averaged


def _average(value: Any) -> Any:
    """Return the mean of a loss over the ranks; values other than numbers and tensors of real numbers are unchanged.

    It is weighted as the gradients of the closure's backward are: `average="sum"` adds losses. The gradient of a tensor
    flows to this rank's loss, unchanged: some optimizers call backward on what they get.
    """
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        averaged = value.clone()
        averaged.detach().copy_(all_reduce(value.detach() * loss_weight()))
        return averaged
    is_number = not isinstance(value, bool) and isinstance(value, numbers.Real)
    return all_reduce(float(value) * float(loss_weight())) if is_number else value
