"""A warning about training apart: optimizer steps outside of parallel_model, and no collectives.

    first step of an optimizer        next step of the same one
    ──────────┬───────────────────────────────┬──────────────────
              number of collectives   ==      number of collectives     a warning, once in a run

Ranks that make no collective between two steps have not averaged their gradients.
"""

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


def warn_if_unsynced(state: RunState) -> contextlib.AbstractContextManager[Any]:
    """Warn of an optimizer that makes two steps without a block or a collective between them.

    The optimizer that steps first in the context is watched. DistributedDataParallel and manual
    averaging make collectives in every step, so that they cause no warning. This is no error,
    because independent models of the ranks may be intended.

    Args:
        state: state of the run, which says whether a block is open.
    """
    if dist.get_world_size() == 1:
        return contextlib.nullcontext()
    return before_step(BeforeStep.WATCH, _StepsApart(state))


class _StepsApart:
    """A hook before the steps of all optimizers, which watches the first one until its second step.

    Args:
        state: state of the run.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._first_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._collectives_at_first_step: int | None = None
        self._is_decided = False

    def __call__(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Note the collectives before the first step, and compare them before the second."""
        if self._is_decided:
            return
        if self._first_optimizer is None:
            self._first_optimizer = weakref.ref(optimizer)
            self._collectives_at_first_step = self._collectives_outside_of_blocks()
        elif self._first_optimizer() is optimizer:
            self._is_decided = True
            before = self._collectives_at_first_step
            if before is not None and self._collectives_outside_of_blocks() == before:
                _warn()

    def _collectives_outside_of_blocks(self) -> int | None:
        """Return the number of collectives so far; None in a block, or if it is not known."""
        return None if self._state.is_in_block else collectives_begun()


def collectives_begun() -> int | None:
    """Return the number of collectives that this process has begun in all groups.

    None: it is not known, because a group does not count its collectives.
    """
    groups: Any = dict(dist.distributed_c10d._world.pg_map)
    number = 0
    try:
        for group in groups:
            number += int(group._get_sequence_number_for_group())
    except RuntimeError:
        # The backend of the group, such as that of a plug-in, does not count.
        return None
    return number


def _warn() -> None:
    """Warn that the ranks train separate models, on the rank that calls it."""
    warnings.warn(
        f"each of {dist.get_world_size()} processes trains a separate model: outside of a "
        "parallel_model block, an optimizer made two steps without a collective between them; put "
        "the loop in `with parallel_model(model):`, or, if separate models are intended, call "
        "warnings.filterwarnings('ignore', 'each of .* processes trains')",
        stacklevel=user_stacklevel(),
    )
