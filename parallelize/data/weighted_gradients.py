"""Weighted gradients: a backward pass starts from its batch's weight, so that uneven batches average correctly.

Process `r` of `W` has `c_r` samples, and the gradient `g_r` of their mean loss. Every engine averages gradients over
processes, so the weights `w_r` are:

    mean over all samples  =  sum_r c_r g_r / sum_r c_r  =  1/W sum_r w_r g_r      with  w_r = W c_r / sum_r c_r

The backward pass starts from `w_r` instead of 1, and nothing else changes: gradient accumulation, all engines and all
optimizers work as before. Regularization of parameters stays correct, because the mean of the `w_r` is 1. All processes
make the same optimizer steps with the same gradients, so they cannot diverge, as they can under torch's `Join`.
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

__all__ = ["BatchWeight", "weighted_backward"]


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


class _WeightedBackward:
    """Replacement for torch.autograd.backward while weighted loaders are iterated."""

    def __init__(self, original: Callable[..., None]) -> None:
        self.original = original
        self.weights: list[BatchWeight] = []
        self._is_running = False

    def __call__(
        self, tensors: Any, grad_tensors: Any = None, *args: Any, grad_variables: Any = None, **kwargs: Any
    ) -> None:
        given = grad_tensors if grad_variables is None else grad_variables  # the deprecated name
        is_nested = self._is_running or is_in_backward()
        # A nested backward pass (reentrant checkpointing, or torch's second call for a Tensor subclass) starts from a
        # gradient that is already weighted.
        weight = 1.0 if is_nested else self._current_weight()
        if weight == 1.0:
            self.original(tensors, given, *args, **kwargs)
            return
        roots = (tensors,) if isinstance(tensors, (Tensor, GradientEdge)) else tuple(tensors)
        grads = (given,) * len(roots) if given is None or isinstance(given, Tensor) else tuple(given)
        self._is_running = True
        try:
            weighted = [_weighted_grad(root, grad, weight) for root, grad in zip(roots, grads, strict=True)]
            self.original(roots, weighted, *args, **kwargs)
        finally:
            self._is_running = False

    def _current_weight(self) -> float:
        for each in self.weights:
            each.start_backward()
        values = {weight.value for weight in self.weights}
        if len(values) > 1:
            raise SyncError(
                f"a backward pass with batches of two loaders, of weights {' and '.join(map(str, sorted(values)))}",
                why="a single loss cannot be split into the parts of each batch",
                fix="use tail='pad' or 'drop' for one of the loaders",
            )
        return values.pop() if values else 1.0


def _weighted_grad(root: Tensor | GradientEdge, grad: Tensor | None, weight: float) -> Tensor | None:
    """Return the weighted gradient from which a backward pass starts at a root tensor."""
    if grad is not None:
        return grad * weight
    like: Any = root if isinstance(root, Tensor) else root.node._input_metadata[root.output_nr]
    if math.prod(like.shape) != 1:
        return None  # torch raises its own error
    return torch.full(tuple(like.shape), weight, dtype=like.dtype, device=like.device)


@contextlib.contextmanager
def weighted_backward(weight: BatchWeight) -> Iterator[None]:
    """Start every backward pass in the block from `weight.value`, by patching what Tensor.backward calls, too."""
    current = torch.autograd.backward
    patch = current if isinstance(current, _WeightedBackward) else _WeightedBackward(current)
    patch.weights.append(weight)
    autograd: Any = torch.autograd
    autograd.backward = patch
    try:
        yield
    finally:
        patch.weights.remove(weight)
        # If other code has patched the function since, its patch still calls this one, which then calls torch's.
        if not patch.weights and torch.autograd.backward is patch:
            autograd.backward = patch.original
