"""Which batch's weight belongs to which loss: the state of a run, without its backward passes.

At the end of an epoch, ranks may have batches of different sizes. The gradients of such a batch
have a weight, so that their average over the ranks is the average over samples: see
`gradients/batch_weights.py`. A loop over a loader has the weight of its latest batch:

    batch is taken      the loop yields it                          LoaderWeights.take_batch
         |
    loss                computed by the user
         |
    backward begins     the loss is of all loops whose batch        LoaderWeights.begin_backward
         |              awaits its backward pass                    LoaderWeights.weight_of_loss
         |
    next batch          of the same loop, or the loop ends          take_batch, end_loop

A backward pass gets the weight of the latest batch. In a loop that runs ahead, the pass may be of
an earlier batch: a loop may take two batches, and then make a pass for each. This does no harm as
long as all batches have the same weight. A loop never goes back to an earlier pace:

    IN_STEP ---- a batch is taken before the pass of the batch before ----> AHEAD
       |                                                                      |
       '---- the same, and the weights of the two differ ---> AMBIGUOUS <-----'
                                                       a batch has another weight

The next pass of an AMBIGUOUS loop is refused, because it may need the weight of an earlier batch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from parallelize.errors import SyncError


class Pace(enum.Enum):
    """Whether a loop takes batches in step with backward passes; drawn at the top of the file."""

    IN_STEP = enum.auto()
    AHEAD = enum.auto()
    AMBIGUOUS = enum.auto()


@dataclass(eq=False)
class LoaderLoop:
    """A loop over a loader, with the weight of its latest batch.

    Attributes:
        weight: of the latest batch; 1 if all processes have equally many samples.
        awaits_backward: whether the latest batch was taken with gradients enabled, and no backward
            pass was made since. A batch of an evaluation awaits no pass.
        has_trained: whether a backward pass was made in the loop.
        pace: whether batches are taken in step with backward passes.
    """

    weight: float = 1.0
    awaits_backward: bool = False
    has_trained: bool = False
    pace: Pace = Pace.IN_STEP

    def take_batch(self, weight: float) -> None:
        """Note the weight of the batch that the loop is about to yield, and the pace."""
        if self.awaits_backward and self.pace is Pace.IN_STEP:
            self.pace = Pace.AHEAD
        if self.pace is Pace.AHEAD and weight != self.weight:
            self.pace = Pace.AMBIGUOUS
        self.weight = weight
        self.awaits_backward = torch.is_grad_enabled()

    def begin_backward(self) -> None:
        """Note that a backward pass begins, which may be a further pass of the same batch.

        Raises:
            SyncError: the backward pass may belong to an earlier batch, with another weight.
        """
        if self.pace is Pace.AMBIGUOUS:
            raise _batch_taken_ahead_error(
                "a batch was taken before the backward pass of the previous one, and their weights "
                "differ"
            )
        self.awaits_backward = False
        self.has_trained = True

    def end_epoch(self) -> None:
        """Check that the weight of the last batch was used; called when the loader is exhausted.

        After the loop, a pass of that batch would have the weight 1. A loop without any pass is let
        through: it may be an evaluation that has left gradients enabled.

        Raises:
            SyncError: the last batch has a weight other than 1, and no backward pass yet.
        """
        if self.has_trained and self.awaits_backward and self.weight != 1.0:
            raise _batch_taken_ahead_error(
                "the loader was exhausted before the backward pass of the last batch"
            )

    @property
    def needs_weight(self) -> bool:
        """Whether a pass that comes after the loop, for one of its batches, may need its weight."""
        return self.awaits_backward and (self.pace is Pace.AMBIGUOUS or self.weight != 1.0)


@dataclass(eq=False)
class LoaderWeights:
    """The loops over the loaders of one run in this process.

    Attributes:
        loops: the loops that have not ended, outer loops first.
        loops_of_loss: the loops from whose batches the latest loss was computed.
        has_lost_weight: whether a loop has ended before a backward pass that needs its weight, and
            no batch for training was taken since. Such a pass would silently have the weight 1.
    """

    loops: list[LoaderLoop] = field(default_factory=list)
    loops_of_loss: list[LoaderLoop] = field(default_factory=list)
    has_lost_weight: bool = False

    def begin_loop(self, loop: LoaderLoop) -> None:
        """Note a loop that begins, as the innermost one."""
        self.loops.append(loop)

    def take_batch(self, loop: LoaderLoop, weight: float) -> None:
        """Note that a loop is about to yield a batch."""
        loop.take_batch(weight)
        # The next pass is of this batch, and not of a loop that has ended.
        if loop.awaits_backward:
            self.has_lost_weight = False

    def begin_backward(self) -> None:
        """Find the loops of the loss whose backward pass begins: their batches await a pass.

        If no batch awaits a pass, this is a second loss of the same batches, and its loops stay
        those of the first loss. So several calls for one pass do no harm.

        Raises:
            SyncError: the loss may be of an earlier batch, with another weight.
        """
        awaiting_loops = [loop for loop in self.loops if loop.awaits_backward]
        if awaiting_loops:
            self.loops_of_loss = awaiting_loops
        for loop in self.loops_of_loss:
            loop.begin_backward()

    def weight_of_loss(self) -> float:
        """Return the weight of the batches from which the latest loss was computed.

        Raises:
            SyncError: the batches have different weights.
        """
        if not self.loops_of_loss:
            return 1.0
        weights = {loop.weight for loop in self.loops_of_loss}
        if len(weights) > 1:
            values = " and ".join(map(str, sorted(weights)))
            raise SyncError(
                f"a backward pass with batches of two loaders, of weights {values}",
                why="a backward pass has one weight, and the terms of its loss would need several",
                fix="use tail='pad' or 'drop' for both loaders, or, instead of zip(), take the "
                "batch of the second one by next() after the backward pass of the first one's",
            )
        return weights.pop()

    def end_loop(self, loop: LoaderLoop) -> None:
        """Note the end of a loop.

        If the latest loss was of this loop alone, the next loss is taken for one of the loop around
        it.
        """
        self.loops.remove(loop)
        if loop.needs_weight:
            self.has_lost_weight = True
        if loop in self.loops_of_loss:
            self.loops_of_loss.remove(loop)
        if not self.loops_of_loss:
            # This stays empty after the outermost loop.
            self.loops_of_loss = self.loops[-1:]

    def refuse_lost_weight(self) -> None:
        """Refuse a backward pass whose weight is gone; called at the beginning of each pass.

        In another loop the pass is taken for one of that loop.

        Raises:
            SyncError: a loop has ended before the passes of its batches.
        """
        if self.has_lost_weight and not self.loops:
            self.has_lost_weight = False
            raise _batch_taken_ahead_error(
                "the loop over a loader ended before the backward pass of its batches"
            )


def _batch_taken_ahead_error(event: str) -> SyncError:
    return SyncError(
        f"tail='weighted': {event}",
        why="each backward pass uses the weight of the latest batch",
        fix="take one batch at a time and run its backward pass before taking the next, or use "
        "tail='pad'; evaluate under torch.no_grad()",
    )
