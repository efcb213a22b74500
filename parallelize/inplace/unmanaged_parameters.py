"""Parameters that an optimizer steps together with a model's, and that are in no block."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallelize.errors import SyncError
from parallelize.inplace.forward_routing import blocks_open, in_blocks
from parallelize.inplace.model_consistency import differing
from parallelize.runtime.gradients import parameters_of

__all__ = ["watching_strangers"]


@contextlib.contextmanager
def watching_strangers(model: nn.Module) -> Iterator[None]:
    """Refuse, while this lasts, to step on a stranger's gradient that differs between ranks.

    A criterion with weights of its own, a temperature, a second model: nobody averages their gradients, so that each
    rank would train another one. What the user has averaged is welcome.

    Args:
        model: whose optimizers are looked at.
    """
    acquainted: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]] = weakref.WeakKeyDictionary()

    def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        held = list(parameters_of(optimizer))
        seen = [blocks_open(), *map(id, held)]
        if acquainted.get(optimizer) == seen:
            return
        strangers = _strangers(held, model)
        if any(each.grad is not None for each in strangers):
            _compare(strangers, optimizer, model)
        elif not strangers:
            acquainted[optimizer] = seen

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()


def _strangers(held: list[torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    """What is in no block, of parameters that an optimizer holds with some of the model's; none if it holds none."""
    own = {id(each) for each in model.parameters()}
    others = [each for each in held if id(each) not in own and _is_whole(each)]
    if len(others) == len(held):
        return []
    known = in_blocks()
    return [each for each in others if id(each) not in known]


def _compare(strangers: list[torch.Tensor], optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    device = next(model.parameters()).device
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in strangers]
    found = differing([each.to(device) for each in gradients])
    if found is None:
        return
    index, rank = found
    raise SyncError(
        f"{type(optimizer).__name__} holds a parameter of shape {tuple(strangers[index].shape)} that no model of a "
        f"block has, and its gradient differs between rank 0 and rank {rank}",
        why=f"only what is in a block is averaged, as {type(model).__name__} is: each rank would train another one",
        fix="give its module to the block too, parallel_model(model, criterion), and call that; or average the "
        "gradient by parallelize.all_reduce before the step",
    )


def _is_whole(parameter: torch.Tensor) -> bool:
    # A part of a model that an fsdp block has divided is no stranger, though the model may be without it for a forward.
    return not hasattr(parameter, "full_tensor")
