"""Weights of batches by their samples: backward passes start from them, so that uneven batches average correctly.

Process `r` of `W` has `c_r` samples, and the gradient `g_r` of their mean loss. Every engine averages gradients over
processes, so the weights `w_r` are:

    mean over all samples  =  sum_r c_r g_r / sum_r c_r  =  1/W sum_r w_r g_r      with  w_r = W c_r / sum_r c_r

The backward pass starts from `w_r` instead of 1, and nothing else changes: gradient accumulation, all engines and all
optimizers work as before. Regularization of parameters stays correct, because the mean of the `w_r` is 1. All processes
make the same optimizer steps with the same gradients, so they cannot diverge, as they can under torch's `Join`.
"""

from __future__ import annotations

from parallelize.errors import SyncError

__all__ = ["BatchWeight"]


class BatchWeight:
    """The gradient weight of a loader's latest batch, to which every backward pass is assumed to belong.

    Attributes:
        value: the weight; 1 if all processes have equally many samples.
    """

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self._had_backward = True  # of the latest batch; true before the first batch
        self._had_any_backward = self._is_batch_skipped = self._is_ambiguous = False

    def start_batch(self, value: float) -> None:
        """Set the weight of a batch that the loader is about to yield."""
        self._is_batch_skipped |= not self._had_backward
        self._is_ambiguous |= self._is_batch_skipped and value != self.value
        self.value, self._had_backward = value, False

    def start_backward(self) -> None:
        """Record a backward pass of the latest batch.

        Raises:
            SyncError: the backward pass may belong to an earlier batch, with another weight.
        """
        if self._is_ambiguous:
            raise _batch_taken_ahead_error(
                "a batch was taken before the backward pass of the previous one, and their weights differ"
            )
        self._had_backward = self._had_any_backward = True

    def end_epoch(self) -> None:
        """Record that the loader is exhausted.

        Raises:
            SyncError: the last batch has a weight other than 1, and no backward pass yet.
        """
        if self._had_any_backward and not self._had_backward and self.value != 1.0:
            raise _batch_taken_ahead_error("the loader was exhausted before the backward pass of the last batch")


def _batch_taken_ahead_error(what: str) -> SyncError:
    return SyncError(
        f"tail='weighted': {what}",
        why="each backward pass uses the weight of the latest batch",
        fix="take one batch at a time and run its backward pass before taking the next, or use tail='pad'",
    )
