"""Warning that losses average over different numbers of targets, although gradients are averaged with equal weights."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallelize.runtime.context import Runtime
from parallelize.runtime.loss_counts import loss_counts
from parallelize.runtime.weighted_backward import Roots

__all__ = ["CountRange", "UnevenCounts"]

_FIRST_PASSES = 8


class CountRange(NamedTuple):
    """The counts of the backward passes of one step.

    Args:
        loss: name of the reduction of their losses, and the number by which these are divided.
        bounds: (largest count, negated smallest count), to be combined by the maximum.
    """

    loss: str
    bounds: torch.Tensor


class UnevenCounts:
    """Compares the counts of ranks and passes under average="ranks": in the first passes, then ever more rarely.

    One asynchronous all-reduce of two numbers, which is read in the next compared pass.

    Args:
        run: the run in this process.

    Attributes:
        compared: the counts of the running pass, for `start_reduction`; None: they are not compared.
    """

    def __init__(self, run: Runtime) -> None:
        self._run = run
        self._passes = 0
        self.compared: torch.Tensor | None = None
        self._pending: tuple[dist.Work | None, torch.Tensor] | None = None
        self._has_warned = False

    def compare(
        self, former: CountRange | None, roots: Roots, batch_weight: float, *, is_local: bool
    ) -> CountRange | None:
        """Compare the count of a loss with those of other ranks and of earlier passes of the step.

        Args:
            former: the earlier passes of the step.
            roots: the tensors from which the backward pass starts.
            batch_weight: weight of the batch by its number of samples, which makes up for a smaller count.
            is_local: whether the other ranks have no such pass now: a pass under no_sync, or of another engine.

        Returns:
            The range with this pass; None if nothing is compared.
        """
        is_alone = self._run.world.world_size == 1
        self._passes += is_alone or not is_local
        is_due = self._passes <= _FIRST_PASSES or not self._passes & (self._passes - 1)
        if is_due and (is_alone or not is_local):
            self.warn()
        if self._has_warned or not is_due:
            return None
        counts: list[Any] = [each for each in loss_counts(roots) if each.count is not None]
        loss = f"{counts[0].loss} / {counts[0].divisor}" if counts else ""
        # Micro-batches of one loss, and not several losses, such as a discriminator's of real and of generated samples.
        is_micro_batch = bool(counts) and (is_local if not is_alone else counts[0].divisor is not None)
        bounds = torch.full((2,), -math.inf, dtype=torch.float64, device=self._run.device)
        if counts and batch_weight:
            bounds[0], bounds[1] = counts[0].count / batch_weight, -counts[0].count / batch_weight
        earlier = former if former is not None and former.loss == loss else None
        if earlier is not None:
            bounds = torch.maximum(bounds, earlier.bounds)
        # A single pass of a single process is compared with nothing: do not wait for the device to read it.
        is_compared = earlier is not None if is_alone else not is_local
        self.compared = bounds.clone() if is_compared else None
        return CountRange(loss, bounds) if is_micro_batch else None

    def start_reduction(self) -> None:
        """Start the all-reduce; after backward, so that deadlocks in backward are reported as those of gradients."""
        bounds, self.compared = self.compared, None
        if bounds is not None:
            is_alone = self._run.world.world_size == 1
            work = None if is_alone else dist.all_reduce(bounds, dist.ReduceOp.MAX, async_op=True)
            self._pending = work, bounds

    def warn(self) -> None:
        """Warn, once, if the counts of an earlier pass differed; all ranks find the same in the same pass."""
        if self._pending is None:
            return
        (work, bounds), self._pending = self._pending, None
        if work is not None:
            work.wait()
        most, negated = bounds.tolist()  # waits for the device once
        least = -negated
        if not math.isfinite(most) or most <= least * (1 + 1e-6):
            return
        self._has_warned = True
        if self._run.world.is_main:
            warnings.warn(
                f"losses average over different numbers of targets: {least:g} to {most:g} on different ranks or in "
                "different backward passes of a step. Gradients are averaged with equal weights, so that a target in "
                f"a small batch counts up to {most / max(least, 1):.3g} times as much as another, unlike in one batch "
                "of one process. parallel_model(model, average='tokens') weights them by the number of targets.",
                stacklevel=2,
            )
