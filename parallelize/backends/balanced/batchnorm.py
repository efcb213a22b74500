"""Batch norm of micro-batches, with running statistics of the full batch.

Each micro-batch is normalized by its own moments (mean, variance), since later micro-batches have not run yet. During a
call, the module has scratch buffers and a momentum of 1, and so stores these moments in place of running statistics.
After the forward they are merged into those of the full batch, which update the running statistics once. Micro-batch i
has n_i of the N values per channel:

    mean = sum(n_i mean_i) / N         variance = (sum((n_i - 1) var_i) + sum(n_i (mean_i - mean)^2)) / (N - 1)

For the first batch norm of a model, these are the exact moments of the full batch. For later ones they differ
slightly, since the inputs have been normalized per micro-batch.

Source: Chan, Golub & LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["BatchNorms"]

_STATE = ("running_mean", "running_var", "num_batches_tracked", "momentum")
_Moments = tuple[int, torch.Tensor, torch.Tensor]
"""Number of values per channel, mean and unbiased variance of one call."""


class BatchNorms:
    """The batch norms of a model, which compute moments instead of running statistics until `update`.

    Attributes:
        moments: for each micro-batch that has begun, by the module and the number of its call: a module may be called
            several times in a forward, and each call updates its statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = [each for each in model.modules() if isinstance(each, _BatchNorm)]
        self._before: dict[_BatchNorm, dict[str, Any]] = {}  # the state of a module during a call
        self.moments: list[dict[tuple[_BatchNorm, int], _Moments]] = []

    @property
    def is_training(self) -> bool:
        """Whether any of the modules normalizes by the moments of a batch."""
        return any(each.training for each in self.modules)

    def before(self, norm: Any, _args: Any) -> None:
        """Give a batch norm that is about to run scratch buffers, if it tracks statistics."""
        if norm.training and norm.running_mean is not None:
            self._before[norm] = {name: getattr(norm, name) for name in _STATE}
            norm.running_mean, norm.running_var = (torch.zeros_like(norm.running_mean) for _ in range(2))
            norm.momentum, norm.num_batches_tracked = 1.0, None

    def after(self, norm: Any, args: Any, _output: Any) -> None:
        """Restore a batch norm that has run; outside of a micro-batch, a checkpoint runs it again: count nothing."""
        before = self._before.pop(norm, None)
        if before is None:
            return
        if self.moments:
            calls = self.moments[-1]
            number = sum(each is norm for each, _ in calls)
            calls[norm, number] = args[0].numel() // args[0].shape[1], norm.running_mean, norm.running_var
        for name, value in before.items():
            setattr(norm, name, value)

    def update(self, *, is_counted: bool) -> None:
        """End all micro-batches, and update the running statistics from their moments if the batch is counted."""
        of_each, self.moments = self.moments, []
        with torch.no_grad():
            for call in dict.fromkeys(itertools.chain(*of_each)) if is_counted else ():
                _update(call[0], [each[call] for each in of_each if call in each])


def _update(norm: Any, parts: Sequence[_Moments]) -> None:
    total = sum(size for size, *_ in parts)
    mean: Any = sum(size * mean for size, mean, _ in parts) / total
    squares: Any = sum(variance * (size - 1) + (each - mean) ** 2 * size for size, each, variance in parts)
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    factor = 1.0 / float(norm.num_batches_tracked or 1) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean, factor)
    norm.running_var.lerp_(squares / (total - 1), factor)
