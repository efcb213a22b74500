"""Checks that all ranks hold the same model: its structure at the entry of a block, its values every few steps."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from parallelize.errors import SyncError
from parallelize.runtime.gradients import parameters_of
from parallelize.runtime.rank_comparison import differences, unequal_error

__all__ = ["require_same_model", "verify_every"]


def require_same_model(model: nn.Module) -> None:
    """Check that a model has the same structure on all ranks; a collective that compares a hash.

    Raises:
        SyncError: a parameter or buffer differs in name, shape, dtype or `requires_grad`; raised on every rank.
    """
    local = _signature(model)
    hashed = hashlib.blake2b(repr(local).encode(), digest_size=8).digest()
    digest = torch.tensor(int.from_bytes(hashed, "big", signed=True))
    difference = next(differences([digest]), None)
    if difference is None:
        return
    _, rank = difference
    signatures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(signatures, local)
    for first, other in itertools.zip_longest(signatures[0], signatures[rank]):
        if first != other:
            raise SyncError(
                f"{type(model).__name__} on rank {rank} has {_describe(other)} where rank 0 has {_describe(first)}",
                why="parallel training needs the same model on every rank",
                fix="build the model from the same arguments on every rank; freeze the same parameters",
            )


def verify_every(model: nn.Module, *, every: int) -> contextlib.AbstractContextManager[Any]:
    """Check, until the context ends, that a model's parameters are bitwise equal on all ranks, every `every` steps."""
    steps = itertools.count(1)

    def after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = dict(model.named_parameters())
        known = {id(parameter) for parameter in parameters.values()}
        if any(id(each) in known for each in parameters_of(optimizer)):
            step = next(steps)
            for index, rank in differences(list(parameters.values())) if step % every == 0 else ():
                name = f"{list(parameters)[index]} of {type(model).__name__}"
                raise unequal_error(name, rank, when=f"after {step} optimizer steps")

    return register_optimizer_step_post_hook(after_step)


def _signature(model: nn.Module) -> list[tuple[str, str, tuple[int, ...], str]]:
    parameters = [
        (name, "trained" if each.requires_grad else "frozen", tuple(each.shape), str(each.dtype))
        for name, each in model.named_parameters()
    ]
    buffers = [(name, "buffer", tuple(each.shape), str(each.dtype)) for name, each in model.named_buffers()]
    return parameters + buffers


def _describe(part: tuple[str, str, tuple[int, ...], str] | None) -> str:
    if part is None:
        return "nothing more"
    name, kind, shape, dtype = part
    return f"{name} ({kind}, {shape}, {dtype})"
