"""Gradients that count by samples where processes have unequal batches.

With `c_r` samples on process `r` of `W`, `g_r` the gradient of the mean loss of its batch, and gradients averaged over
processes as every engine does:

    mean over all samples  =  sum_r c_r g_r / sum_r c_r  =  1/W sum_r w_r g_r      with  w_r = W c_r / sum_r c_r

So backward starts from `w_r` instead of 1, and nothing else has to know: accumulation over several backwards, any
engine, any optimizer. Regularisers on the weights come out right as well, for the `w_r` have the mean 1. The optimizers
of all processes make the same steps with the same gradients and cannot drift apart, as they do under torch's `Join`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from parallelize.errors import SyncError
from parallelize.runtime.gradients import is_in_backward

__all__ = ["Weight", "weighing"]


class Weight:
    """What the gradients of a loader's current batch count; a backward is of the batch that was given last.

    Attributes:
        value: the weight, 1 where all processes have as many samples.
    """

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self._is_used = True  # whether the current batch had a backward; before the first one there is none to have it
        self._was_used = self._is_behind = self._is_unclear = False

    def give(self, value: float) -> None:
        """The next batch counts this much."""
        self._is_behind |= not self._is_used
        self._is_unclear |= self._is_behind and value != self.value
        self.value, self._is_used = value, False

    def use(self) -> None:
        """A backward begins.

        Raises:
            SyncError: it may be of an earlier batch, which counts differently.
        """
        if self._is_unclear:
            raise _taken_ahead(
                "a batch was taken while the one before it had no backward yet, and they count differently"
            )
        self._is_used = self._was_used = True

    def end(self) -> None:
        """There are no more batches.

        Raises:
            SyncError: the last one counts differently, and its backward has yet to come.
        """
        if self._was_used and not self._is_used and self.value != 1.0:
            raise _taken_ahead("the loader was read to its end before the last batch had its backward")


def _taken_ahead(what: str) -> SyncError:
    return SyncError(
        f"tail='weighted': {what}",
        why="each backward counts by the samples of the batch that was taken last",
        fix="take one batch at a time, each with a backward of its own before the next, or use tail='pad'",
    )


class _Weighing:
    """Stands for torch.autograd.backward while weighted loaders are read."""

    def __init__(self, original: Callable[..., None]) -> None:
        self.original = original
        self.weights: list[Weight] = []
        self._is_running = False

    def __call__(
        self, tensors: Any, grad_tensors: Any = None, *args: Any, grad_variables: Any = None, **kwargs: Any
    ) -> None:
        given = grad_tensors if grad_variables is None else grad_variables  # the deprecated name of the same
        is_inside = self._is_running or is_in_backward()
        weight = 1.0 if is_inside else self._weight()
        # A backward inside a backward goes on with a gradient that is weighted already: reentrant checkpointing, and
        # torch's own second call for a subclass of Tensor.
        if weight == 1.0:
            self.original(tensors, given, *args, **kwargs)
            return
        roots = (tensors,) if isinstance(tensors, (Tensor, GradientEdge)) else tuple(tensors)
        starts = (given,) * len(roots) if given is None or isinstance(given, Tensor) else tuple(given)
        self._is_running = True
        try:
            weighted = [_started(root, start, weight) for root, start in zip(roots, starts, strict=True)]
            self.original(roots, weighted, *args, **kwargs)
        finally:
            self._is_running = False

    def _weight(self) -> float:
        for each in self.weights:
            each.use()
        values = {weight.value for weight in self.weights}
        if len(values) > 1:
            raise SyncError(
                f"backward with batches of two weighted loaders, of weights {' and '.join(map(str, sorted(values)))}",
                why="one loss cannot tell which part of it comes from which batch",
                fix="use tail='pad' or 'drop' for one of the loaders",
            )
        return values.pop() if values else 1.0


def _started(root: Tensor | GradientEdge, start: Tensor | None, weight: float) -> Tensor | None:
    """The gradient from which backward starts at a root."""
    if start is not None:
        return start * weight
    like: Any = root if isinstance(root, Tensor) else root.node._input_metadata[root.output_nr]
    if math.prod(like.shape) != 1:
        return None  # torch has something to say about this one
    return torch.full(tuple(like.shape), weight, dtype=like.dtype, device=like.device)


@contextlib.contextmanager
def weighing(weight: Weight) -> Iterator[None]:
    """Let every backward start from the value that `weight` has then; Tensor.backward calls the one replaced here."""
    current = torch.autograd.backward
    weighs = current if isinstance(current, _Weighing) else _Weighing(current)
    weighs.weights.append(weight)
    replace: Any = torch.autograd
    replace.backward = weighs
    try:
        yield
    finally:
        weighs.weights.remove(weight)
        # Who has replaced it in the meantime calls us, and we call torch's.
        if not weighs.weights and torch.autograd.backward is weighs:
            replace.backward = weighs.original
