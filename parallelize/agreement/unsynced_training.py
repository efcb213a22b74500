"""Warning for unsynchronized training: optimizer steps outside of parallel_model, without collectives in between."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist

from parallelize.run.state import RunState
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.step import BeforeStep, before_step

__all__ = ["warn_if_unsynced"]


def warn_if_unsynced(state: RunState) -> contextlib.AbstractContextManager[Any]:
    """Warn if the first optimizer that steps in the context makes two steps without a block or a collective.

    DistributedDataParallel and manual averaging make collectives in every step, so they cause no warning. This is not
    an error, because independent models on each rank may be intended.

    Args:
        state: of the run.
    """
    if dist.get_world_size() == 1:
        return contextlib.nullcontext()
    first: Any = None  # the first optimizer, and the collectives before its step
    is_decided = False

    def look(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        nonlocal first, is_decided
        if first is None:
            first = weakref.ref(optimizer), _collectives_begun(state)
        elif not is_decided and first[0]() is optimizer:
            is_decided = True
            if first[1] is not None and _collectives_begun(state) == first[1]:
                _warn()

    return before_step(BeforeStep.WATCH, look)


def _collectives_begun(state: RunState) -> int | None:
    """Return the number of collectives that this process has begun; None: in a block, or a group counts none."""
    groups: Any = dict(dist.distributed_c10d._world.pg_map)
    try:
        begun = sum(int(group._get_sequence_number_for_group()) for group in groups)
    except RuntimeError:  # the backend of a group, such as one of a plug-in, has no sequence numbers
        return None
    return None if state.is_in_block else begun


def _warn() -> None:
    warnings.warn(
        f"each of {dist.get_world_size()} processes trains a separate model: outside of a parallel_model block, an "
        "optimizer made two steps without a collective between them; put the loop in `with parallel_model(model):`, "
        "or, if separate models are intended, call warnings.filterwarnings('ignore', 'each of .* processes trains')",
        stacklevel=user_stacklevel(),
    )
