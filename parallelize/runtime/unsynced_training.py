"""Warning for unsynchronized training: optimizer steps outside of parallel_model, without collectives in between."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallelize.torch_patches import step

__all__ = ["ENTERED_PARALLEL_MODEL", "IN_PARALLEL_MODEL", "warn_if_unsynced"]

ENTERED_PARALLEL_MODEL = "parallel_model entered"
"""Member of Runtime.flags after the run has entered a parallel_model block."""
IN_PARALLEL_MODEL = "in parallel_model"
"""Member of Runtime.flags in parallel_model blocks."""


def warn_if_unsynced(
    flags: set[str], models: Sequence[weakref.ref[torch.nn.Module]]
) -> contextlib.AbstractContextManager[Any]:
    """Warn once if the first optimizer that steps in the context makes two steps without a collective between them.

    Steps in a parallel_model block do not count. After such a block, only an optimizer of its models is checked.

    DistributedDataParallel and manual averaging make collectives in every step, so they cause no warning. This is not
    an error, because independent models on each rank may be intended.

    Args:
        flags: `Runtime.flags` of the run.
        models: `Runtime.models` of the run, those that have entered a parallel_model block.
    """
    if dist.get_world_size() == 1:
        return contextlib.nullcontext()
    # The first optimizer, and the collectives before its step.
    first: list[tuple[weakref.ref[torch.optim.Optimizer], int | None]] = []
    is_decided = False

    def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        nonlocal is_decided
        if is_decided or IN_PARALLEL_MODEL in flags:
            return
        if not first:
            if ENTERED_PARALLEL_MODEL in flags and not _trains_any(optimizer, models):
                is_decided = True
                return
            first.append((weakref.ref(optimizer), _collectives_begun()))
            return
        first_optimizer, begun = first[0]
        if first_optimizer() is optimizer:
            is_decided = True
            if begun is not None and _collectives_begun() == begun:
                _warn()

    return step.before_step(before_step)


def _trains_any(optimizer: torch.optim.Optimizer, models: Sequence[weakref.ref[torch.nn.Module]]) -> bool:
    alive = [model for each in models if (model := each()) is not None]
    parameters = {id(parameter) for model in alive for parameter in model.parameters()}
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


def _collectives_begun() -> int | None:
    """Return the number of collectives that this process has begun in all its groups; None: a group counts none."""
    groups: Any = dict(dist.distributed_c10d._world.pg_map)
    try:
        return sum(int(group._get_sequence_number_for_group()) for group in groups)
    except RuntimeError:  # the backend of a group, such as one of a plug-in, has no sequence numbers
        return None


def _warn() -> None:
    warnings.warn(
        f"each of {dist.get_world_size()} processes trains a separate model: outside of a parallel_model block, an "
        "optimizer made two steps without a collective between them; put the loop in `with parallel_model(model):`, "
        "or, if separate models are intended, call warnings.filterwarnings('ignore', 'each of .* processes trains')",
        stacklevel=4,
    )
