"""Check of unmanaged parameters: in no block, but in the optimizer of a model in a block, and so never averaged."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallelize.errors import SyncError
from parallelize.inplace.forward_routing import count_routes, routed_parameter_ids
from parallelize.inplace.model_consistency import first_difference
from parallelize.runtime.gradients import parameters_of

__all__ = ["refuse_unmanaged_parameters"]


@contextlib.contextmanager
def refuse_unmanaged_parameters(model: nn.Module) -> Iterator[None]:
    """Refuse, while the context lasts, a step on an unmanaged parameter whose gradient differs between ranks.

    Examples are the weights of a criterion, a temperature or a second model that is in no block. Their gradients are
    not averaged, so the ranks would train different values. Gradients that the user has averaged are accepted.

    Args:
        model: a model in a block; only optimizers that hold one of its parameters are checked.
    """
    checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]] = weakref.WeakKeyDictionary()

    def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        held = list(parameters_of(optimizer))
        state = [count_routes(), *map(id, held)]
        if checked.get(optimizer) == state:
            return
        unmanaged = _unmanaged(held, model)
        if any(each.grad is not None for each in unmanaged):
            _require_equal_gradients(unmanaged, optimizer, model)
        elif not unmanaged:
            checked[optimizer] = state

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()


def _unmanaged(held: list[torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    """Return the `held` parameters that are in no block; an empty list if none of them belongs to the model."""
    model_ids = {id(each) for each in model.parameters()}
    others = [each for each in held if id(each) not in model_ids and _is_unsharded(each)]
    if len(others) == len(held):
        return []
    routed_ids = routed_parameter_ids()
    return [each for each in others if id(each) not in routed_ids]


def _require_equal_gradients(unmanaged: list[torch.Tensor], optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    device = next(model.parameters()).device
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in unmanaged]
    difference = first_difference([each.to(device) for each in gradients])
    if difference is None:
        return
    index, rank = difference
    raise SyncError(
        f"{type(optimizer).__name__} holds a parameter of shape {tuple(unmanaged[index].shape)} that is in no model "
        f"of a parallel_model block, and its gradient differs between rank 0 and rank {rank}",
        why=f"only gradients of models in a block, such as {type(model).__name__}, are averaged over the ranks",
        fix="pass its module to the block too, parallel_model(model, criterion), and call the module; or average the "
        "gradient with parallelize.all_reduce before the step",
    )


def _is_unsharded(parameter: torch.Tensor) -> bool:
    # A DTensor belongs to a model in an fsdp block, even while fully_shard registers a full parameter in its place.
    return not hasattr(parameter, "full_tensor")
