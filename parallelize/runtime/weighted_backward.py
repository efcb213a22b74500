"""Weighted backward passes: torch.autograd.backward starts from a weight instead of 1, chosen by batches and losses.

Process `r` of `W` has `c_r` samples, and the gradient `g_r` of their mean loss. Every engine averages gradients over
processes, so the weights `w_r` are:

    mean over all samples  =  sum_r c_r g_r / sum_r c_r  =  1/W sum_r w_r g_r      with  w_r = W c_r / sum_r c_r

The backward pass starts from `w_r` instead of 1, and nothing else changes: gradient accumulation, all engines and all
optimizers work as before. Regularization of parameters stays correct, because the mean of the `w_r` is 1. All processes
make the same optimizer steps with the same gradients, so they cannot diverge, as they can under torch's `Join`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from parallelize.errors import ConfigError, SyncError
from parallelize.runtime.autograd_graph import Root, as_roots, scaled_start
from parallelize.runtime.gradients import is_in_backward, require_patchable_backward

__all__ = [
    "BatchWeight",
    "LossWeight",
    "Roots",
    "Weight",
    "bypasses_weights",
    "loss_weight",
    "weigh_batches",
    "weigh_losses",
]

Roots = tuple[Root, ...]
Weight = float | Tensor


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


class LossWeight(Protocol):
    """The weights of the losses of a parallel_model block.

    Attributes:
        is_uniform: whether all weights are 1.
    """

    is_uniform: bool

    def weigh(self, roots: Roots, batch_weight: float, backward: Callable[[Weight | None], None]) -> None:
        """Call `backward`, which runs a backward pass, with its weight; None: it is `batch_weight`.

        Args:
            roots: the tensors from which the backward pass starts.
            batch_weight: weight of the batch by its number of samples; 0: this rank has no samples.
            backward: runs the backward pass.
        """


# Global, because torch.autograd.backward belongs to the process. Other code may patch it between two of our patches;
# the outermost patch weights the backward pass.
_batches: list[BatchWeight] = []
_losses: list[LossWeight] = []
_value, _is_uniform = attrgetter("value"), attrgetter("is_uniform")


class _WeightedBackward:
    """Replacement for torch.autograd.backward."""

    is_running = False
    loss_weight: Weight | None = None  # of the latest backward pass; None: that was weighted by its batch

    def __init__(self, original: Callable[..., None]) -> None:
        self.original = original
        self.users = 0

    def __call__(
        self, tensors: Any, grad_tensors: Any = None, *args: Any, grad_variables: Any = None, **kwargs: Any
    ) -> None:
        given = grad_tensors if grad_variables is None else grad_variables  # the deprecated name
        # A nested backward pass (reentrant checkpointing, or torch's second call for a Tensor subclass) starts from a
        # gradient that is already weighted.
        if _WeightedBackward.is_running or is_in_backward():
            self.original(tensors, given, *args, **kwargs)
            return
        roots = as_roots(tensors)
        for each in _batches:
            each.start_backward()
        _Pass(roots, given, lambda start: self.original(roots, start, *args, **kwargs))(None)


class _Pass:
    """A backward pass, which each block weights in turn; the last call runs it.

    Args:
        roots: the tensors from which it starts.
        given: their gradients, as the user has given them.
        run: runs it from weighted gradients.
    """

    def __init__(self, roots: Roots, given: Any, run: Callable[[Any], None]) -> None:
        self._roots, self._given, self._run = roots, given, run
        self._batch_weight, self._pending = _batch_weight(), iter(_losses)
        self._weights: list[Weight] = []

    def __call__(self, weight: Weight | None) -> None:
        """Let the next block weight the pass; after the last one, run it."""
        if weight is not None:
            self._weights.append(weight)
        following = next(self._pending, None)
        if following is not None:
            following.weigh(self._roots, self._batch_weight, self)
            return
        if len(self._weights) > 1:
            raise _two_weights_error()
        _WeightedBackward.loss_weight = self._weights[0] if self._weights else None
        weight = self._weights[0] if self._weights else self._batch_weight
        is_one = not isinstance(weight, Tensor) and weight == 1.0
        start = self._given if is_one else scaled_start(self._roots, self._given, functools.partial(_factor, weight))
        _WeightedBackward.is_running = True
        try:
            self._run(start)
        finally:
            _WeightedBackward.is_running = False


def _factor(weight: Weight, gradient: Tensor) -> Weight:
    return weight.to(gradient.device, gradient.dtype) if isinstance(weight, Tensor) else weight


def _two_weights_error() -> ConfigError:
    return ConfigError(
        "a loss through models of two parallel_model blocks, both with average='sum' or 'tokens'",
        why="each block would weight the loss",
        fix="use one block: parallel_model(first, second, average=...)",
    )


def bypasses_weights() -> bool:
    """Return whether the running backward pass should be weighted, but did not start at torch.autograd.backward."""
    has_weights = any(map((1.0).__ne__, map(_value, _batches))) or not all(map(_is_uniform, _losses))
    return has_weights and not _WeightedBackward.is_running


def loss_weight() -> Weight:
    """Return the weight of this rank's latest loss in the mean over the ranks."""
    weight = _WeightedBackward.loss_weight
    return _batch_weight() if weight is None else weight


def _batch_weight() -> float:
    values = set(map(_value, _batches))
    if len(values) > 1:
        raise SyncError(
            f"a backward pass with batches of two loaders, of weights {' and '.join(map(str, sorted(values)))}",
            why="a single loss cannot be split into the parts of each batch",
            fix="use tail='pad' or 'drop' for one of the loaders",
        )
    return values.pop() if values else 1.0


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    require_patchable_backward()
    current = torch.autograd.backward
    patch = current if isinstance(current, _WeightedBackward) else _WeightedBackward(current)
    patch.users += 1
    autograd: Any = torch.autograd
    autograd.backward = patch
    try:
        yield
    finally:
        patch.users -= 1
        # If other code has patched the function since, its patch still calls this one, which then calls torch's.
        if not patch.users:
            _WeightedBackward.loss_weight = None
            if torch.autograd.backward is patch:
                autograd.backward = patch.original


@contextlib.contextmanager
def weigh_batches(weight: BatchWeight) -> Iterator[None]:
    """Start the backward passes in the block from the weight of a loader's latest batch."""
    _batches.append(weight)
    try:
        with _patched():
            yield
    finally:
        _batches.remove(weight)


@contextlib.contextmanager
def weigh_losses(weight: LossWeight) -> Iterator[None]:
    """Start the backward passes in the block from the weight of their loss."""
    _losses.append(weight)
    try:
        with _patched():
            yield
    finally:
        _losses.remove(weight)
