"""Which batch's weight belongs to which loss: the state of a run, without its backward passes.

A loop over a loader has a weight for its latest batch. A batch lives so:

    batch is taken      the loop yields it                          LoaderWeights.take_batch
         |
    loss                computed by the user
         |
    backward begins     the loss is of all loops whose batch        LoaderWeights.begin_backward
         |              awaits its backward pass                    LoaderWeights.weight_of_loss
         |
    next batch          of the same loop, or the loop ends          take_batch, end_loop

A pass has the weight of the latest batch. This is wrong for a loop that runs ahead, as one that
takes two batches and then makes a pass for each of them; but as long as all its batches have one
weight, nobody can tell. The paces of a loop, of which no one leads back:

    IN_STEP ---- a batch is taken before the pass of the one before it ----> AHEAD
       |                                                                       |
       '---- the same, and the weights of the two differ ----> AMBIGUOUS <-----'
                                                        a batch has another weight

The next pass of an AMBIGUOUS loop is refused, because its weight may be that of an earlier batch.
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
        awaits_backward: whether no backward pass was made since the batch was taken, with gradients
            enabled. An evaluation takes batches that await none.
        has_trained: whether a backward pass was made of any batch.
        pace: whether batches are taken in step with backward passes.
    """

    weight: float = 1.0
    awaits_backward: bool = False
    has_trained: bool = False
    pace: Pace = Pace.IN_STEP

    def take_batch(self, weight: float) -> None:
        """Set the weight of a batch that the loader is about to yield."""
        if self.awaits_backward and self.pace is Pace.IN_STEP:
            self.pace = Pace.AHEAD
        if self.pace is Pace.AHEAD and weight != self.weight:
            self.pace = Pace.AMBIGUOUS
        self.weight = weight
        self.awaits_backward = torch.is_grad_enabled()

    def begin_backward(self) -> None:
        """Record a backward pass of the latest batch.

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
        """Record that the loader is exhausted.

        Raises:
            SyncError: the last batch has a weight other than 1, and no backward pass yet.
        """
        if self.has_trained and self.awaits_backward and self.weight != 1.0:
            raise _batch_taken_ahead_error(
                "the loader was exhausted before the backward pass of the last batch"
            )

    @property
    def needs_weight(self) -> bool:
        """Whether a pass of its batches, made after its end, would need a weight that is gone."""
        return self.awaits_backward and (self.pace is Pace.AMBIGUOUS or self.weight != 1.0)


@dataclass(eq=False)
class LoaderWeights:
    """The loops over the loaders of one run in this process.

    Attributes:
        loops: those that go on, outer ones first.
        loops_of_loss: those whose batches the latest loss was computed from.
        has_lost_weight: whether a loop has ended before a backward pass that needs its weight, and
            no batch was taken since. Such a pass would have the weight 1, silently.
    """

    loops: list[LoaderLoop] = field(default_factory=list)
    loops_of_loss: list[LoaderLoop] = field(default_factory=list)
    has_lost_weight: bool = False

    def begin_loop(self, loop: LoaderLoop) -> None:
        """Note a loop that begins, inside the present ones."""
        self.loops.append(loop)

    def take_batch(self, loop: LoaderLoop, weight: float) -> None:
        """Note that a loop is about to yield a batch."""
        loop.take_batch(weight)
        if loop.awaits_backward:
            self.has_lost_weight = False

    def begin_backward(self) -> None:
        """Find the loops of a loss, those that have yielded a batch since the latest backward pass.

        A second loss of the same batches has the loops of the first one.

        Raises:
            SyncError: the loss may be of an earlier batch, with another weight.
        """
        new = [loop for loop in self.loops if loop.awaits_backward]
        if new:
            self.loops_of_loss = new
        for loop in self.loops_of_loss:
            loop.begin_backward()

    def weight_of_loss(self) -> float:
        """Return the weight of the batches from which the latest loss was computed.

        Raises:
            SyncError: they have different weights.
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
        """Note the end of a loop; after an inner one, the next loss is of the batch around it."""
        self.loops.remove(loop)
        if loop.needs_weight:
            self.has_lost_weight = True
        if loop in self.loops_of_loss:
            self.loops_of_loss.remove(loop)
        if not self.loops_of_loss:
            self.loops_of_loss = self.loops[-1:]

    def refuse_lost_weight(self) -> None:
        """Refuse a pass after a loop that has ended before the passes of its batches.

        Raises:
            SyncError: there was such a loop, and the pass may be of its batches.
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
