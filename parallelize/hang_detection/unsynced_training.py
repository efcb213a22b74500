"""Notices processes of one run that train apart: no block, and nothing sent between two steps of an optimizer."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["IN_BLOCK", "noticing_apart"]

# In what a run was told: one of its models is, or was, in a parallel_model block.
IN_BLOCK = "in block"


@contextlib.contextmanager
def noticing_apart(told: set[str]) -> Iterator[None]:
    """Warn, while this lasts and once, if the first optimizer that steps here averages nothing with other processes.

    Who wraps a model in torch's DistributedDataParallel, or averages by hand, sends something from step to step. That
    each process trains a model of its own can be meant, so it is a warning.

    Args:
        told: what the run was told; IN_BLOCK among it ends the matter.
    """
    first: list[tuple[weakref.ref[torch.optim.Optimizer], int]] = []  # who stepped first, and what was sent by then
    is_known = False

    def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        nonlocal is_known
        if is_known or IN_BLOCK in told:
            return
        if not first:
            first.append((weakref.ref(optimizer), _sent()))
            return
        stepped, sent = first[0]
        if stepped() is optimizer:
            is_known = True
            if _sent() == sent:
                _warn()

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()


def _sent() -> int:
    """How many collectives this process has begun, in all its groups."""
    groups: Any = dict(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def _warn() -> None:
    warnings.warn(
        f"each of {dist.get_world_size()} processes trains a model of its own: no parallel_model block was entered, "
        "and nothing is sent between two steps of an optimizer; put the loop in `with parallel_model(model):`, or, if "
        "this is meant, warnings.filterwarnings('ignore', 'each of .* processes trains')",
        stacklevel=4,
    )
