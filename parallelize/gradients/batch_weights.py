"""Weights of batches: a backward pass starts from the weight of its batch instead of 1.

Process `r` of `W` has `c_r` samples, and the gradient `g_r` of their mean loss. Gradients are averaged
over processes, so the weights `w_r` are:

    mean over all samples  =  sum_r c_r g_r / sum_r c_r  =  1/W sum_r w_r g_r    with  w_r = W c_r / sum_r c_r

Nothing else changes: gradient accumulation, all engines and all optimizers work as before. The mean of
the `w_r` is 1, so that regularization of parameters stays correct. All processes make the same steps
with the same gradients, so they cannot diverge, as they can under torch's `Join`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from parallelize.errors import ConfigError, SyncError
from parallelize.gradients.autograd_graph import scaled_start
from parallelize.torch_patches.backward import Order, Pass, Run, subscribed

__all__ = ["BatchWeight", "Weight", "batch_weight", "refuse_left", "weigh_batches", "weighted"]

Weight = float | torch.Tensor


class BatchWeight:
    """The gradient weight of a loader's latest batch.

    Attributes:
        value: the weight; 1 if all processes have equally many samples.
        is_new: whether no backward pass was made since the batch was taken, with gradients enabled.
    """

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self.is_new = False
        self._had_any_backward = self._is_batch_skipped = self._is_ambiguous = False

    def start_batch(self, value: float) -> None:
        """Set the weight of a batch that the loader is about to yield."""
        self._is_batch_skipped |= self.is_new
        self._is_ambiguous |= self._is_batch_skipped and value != self.value
        self.value, self.is_new = value, torch.is_grad_enabled()
        if self.is_new:
            _left.clear()

    def start_backward(self) -> None:
        """Record a backward pass of the latest batch.

        Raises:
            SyncError: the backward pass may belong to an earlier batch, with another weight.
        """
        if self._is_ambiguous:
            raise _batch_taken_ahead_error(
                "a batch was taken before the backward pass of the previous one, and their weights differ"
            )
        self.is_new, self._had_any_backward = False, True

    def end_epoch(self) -> None:
        """Record that the loader is exhausted.

        Raises:
            SyncError: the last batch has a weight other than 1, and no backward pass yet.
        """
        if self._had_any_backward and self.is_new and self.value != 1.0:
            raise _batch_taken_ahead_error("the loader was exhausted before the backward pass of the last batch")

    def end_loop(self) -> None:
        """Record that its loop has ended: a backward pass that follows may belong to batches of several weights."""
        if self.is_new and (self._is_ambiguous or self.value != 1.0):
            _left.append(self)


def _batch_taken_ahead_error(what: str) -> SyncError:
    return SyncError(
        f"tail='weighted': {what}",
        why="each backward pass uses the weight of the latest batch",
        fix="take one batch at a time and run its backward pass before taking the next, or use tail='pad'; "
        "evaluate under torch.no_grad()",
    )


# Global, because torch.autograd.backward belongs to the process.
_open: list[BatchWeight] = []  # that are being iterated
_of_loss: list[BatchWeight] = []  # those whose batches the latest loss was computed from
_left: list[BatchWeight] = []  # whose loops have ended before a backward pass, since the latest batch


def weighted(each: Pass, weight: Weight) -> Pass:
    """Return a backward pass with its loss multiplied by a weight.

    Raises:
        ConfigError: the loss has a weight already.
    """
    if each.is_weighted:
        raise ConfigError(
            "a loss through models of two parallel_model blocks, both with average='sum' or 'tokens'",
            why="each block would weight the loss",
            fix="use one block: parallel_model(first, second, average=...)",
        )
    if isinstance(weight, float) and weight == 1.0:
        return replace(each, is_weighted=True)

    def factor(gradient: torch.Tensor) -> Weight:
        # A kernel takes a number as an argument. A tensor of it would be copied to the device, and the host would wait
        # for all that the device has to do before.
        if not isinstance(weight, torch.Tensor):
            return weight
        return weight.to(gradient.device, gradient.dtype)

    return replace(each, gradients=scaled_start(each.roots, each.gradients, factor), is_weighted=True)


def batch_weight() -> float:
    """Return the weight of the batches from which the latest loss was computed."""
    values = {each.value for each in _of_loss if each in _open} or {1.0}
    if len(values) > 1:
        raise SyncError(
            f"a backward pass with batches of two loaders, of weights {' and '.join(map(str, sorted(values)))}",
            why="a backward pass has one weight, and the terms of its loss would need several",
            fix="use tail='pad' or 'drop' for both loaders, or, instead of zip(), take the batch of the second one "
            "by next() after the backward pass of the first one's",
        )
    return values.pop()


def _weigh(each: Pass, run: Run) -> None:
    weight = batch_weight()
    run(each if each.is_weighted or weight == 1.0 else weighted(each, weight))


def _begin(each: Pass, run: Run) -> None:
    """Find the loaders of a loss: those that have yielded a batch since the latest backward pass."""
    new = [weight for weight in _open if weight.is_new]
    if new:
        _of_loss[:] = new
    for weight in _of_loss:
        weight.start_backward()
    run(each)


def refuse_left(each: Pass, run: Run) -> None:
    """Refuse a pass after a loop that has taken batches of several weights, and made no pass of them. A subscriber."""
    if _left and not _open:
        _left.clear()
        raise _batch_taken_ahead_error("the loop over a loader ended before the backward pass of its batches")
    run(each)


@contextlib.contextmanager
def weigh_batches(weight: BatchWeight) -> Iterator[None]:
    """Start the backward passes in the context from the weight of a loader's latest batch."""
    with subscribed(Order.BEGIN, _begin), subscribed(Order.WEIGH_BATCH, _weigh):
        _open.append(weight)
        try:
            yield
        finally:
            _open.remove(weight)
            weight.end_loop()
            # After an inner loop, the next loss is that of the batch around it.
            _of_loss[:] = [each for each in _of_loss if each is not weight] or _open[-1:]
