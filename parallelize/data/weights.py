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

__all__ = ["Weight", "weighing"]


class Weight:
    """What the gradients of a loader's current batch count."""

    value = 1.0


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
        weight = self._weight()
        # A backward inside a backward goes on with a gradient that is weighted already: reentrant checkpointing, and
        # torch's own second call for a subclass of Tensor.
        if weight == 1.0 or self._is_running or torch._C._current_graph_task_id() != -1:
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
