"""Batch norm of micro-batches, with running statistics of the full batch.

    before a call    a batch norm gets scratch buffers and a momentum of 1
    it runs          and stores its moments (mean, variance) there, not in the running statistics
    after the call   its own buffers and momentum come back; the moments are kept
    the batch ends   the moments of all micro-batches are merged, and update the running statistics

Each micro-batch is normalized by its own moments, since later micro-batches have not run yet.
Micro-batch i has n_i of the N values per channel:

    mean = sum(n_i mean_i) / N
    variance = (sum((n_i - 1) variance_i) + sum(n_i (mean_i - mean)^2)) / (N - 1)

For the first batch norm of a model, these are the exact moments of the full batch. For later ones
they differ slightly, since the inputs have been normalized per micro-batch.

Source: Chan, Golub & LeVeque, Updating formulae and a pairwise algorithm for computing sample
variances (1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallelize.torch_patches.backward import is_in_backward

_STATE = ("running_mean", "running_var", "num_batches_tracked", "momentum")
"""Attributes of a batch norm that are others during a call."""


@dataclass(frozen=True)
class _Moments:
    """Moments of the input of one call.

    Args:
        count: number of values per channel.
        mean: shape (channels,).
        variance: unbiased, shape (channels,).
    """

    count: int
    mean: torch.Tensor
    variance: torch.Tensor


class BatchNorms:
    """The batch norms of a model, which compute moments in place of running statistics.

    Attributes:
        modules: the batch norms.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[_BatchNorm] = []
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                self.modules.append(module)
        self._state_before_call: dict[_BatchNorm, dict[str, Any]] = {}
        # For each micro-batch of the batch that runs: batch norm -> the moments of its calls. A
        # module may be called several times in a forward, and each call updates its statistics.
        self._microbatches: list[dict[_BatchNorm, list[_Moments]]] = []

    @property
    def is_training(self) -> bool:
        """Whether any of the modules normalizes by the moments of a batch."""
        return any(module.training for module in self.modules)

    @property
    def least_samples(self) -> int:
        """Return how many samples a micro-batch has at least: a batch norm trains on two."""
        return 2 if self.is_training else 1

    def begin_microbatch(self) -> None:
        """Keep the moments of the following calls as those of a new micro-batch."""
        self._microbatches.append({})

    def forget_microbatch(self) -> None:
        """Drop the moments of the latest micro-batch, whose forward runs again."""
        self._microbatches.pop()

    def forget_batch(self) -> None:
        """Drop the moments of all micro-batches, which run again as one batch."""
        self._microbatches.clear()

    def before(self, norm: Any, _args: Any) -> None:
        """Give a batch norm that is about to run scratch buffers, if it updates statistics."""
        is_updating = norm.training and norm.track_running_stats and norm.running_mean is not None
        # Outside of the model's forward, the user calls a plain batch norm.
        is_called_by_user = not self._microbatches and not is_in_backward()
        if not is_updating or is_called_by_user:
            return
        self._state_before_call[norm] = {name: getattr(norm, name) for name in _STATE}
        norm.running_mean = torch.zeros_like(norm.running_mean)
        norm.running_var = torch.zeros_like(norm.running_var)
        norm.momentum = 1.0
        norm.num_batches_tracked = None

    def after(self, norm: Any, args: Any, kwargs: Any, _output: Any) -> None:
        """Restore a batch norm that has run, and keep its moments."""
        state = self._state_before_call.pop(norm, None)
        if state is None:
            return
        # In backward, an activation checkpoint calls the module again: these moments have been
        # counted.
        if self._microbatches:
            arguments = [*args, *kwargs.values()]
            values = arguments[0]  # (samples, channels, ...)
            count = values.numel() // values.shape[1]
            moments = _Moments(count, norm.running_mean, norm.running_var)
            self._microbatches[-1].setdefault(norm, []).append(moments)
        for name, value in state.items():
            setattr(norm, name, value)

    @torch.no_grad()
    def update(self, *, is_counted: bool) -> None:
        """End the batch; update the running statistics from its moments if it is counted."""
        microbatches = self._microbatches
        self._microbatches = []
        if not is_counted:
            return
        for norm in self.modules:
            calls_by_microbatch = [calls.get(norm, []) for calls in microbatches]
            # Data may decide how often a micro-batch calls the module.
            most_calls = max(map(len, calls_by_microbatch), default=0)
            for number in range(most_calls):
                moments_of_call = []
                for calls in calls_by_microbatch:
                    moments_of_call += calls[number : number + 1]
                _update_running_statistics(norm, moments_of_call)


def _update_running_statistics(norm: Any, moments: Sequence[_Moments]) -> None:
    """Update a batch norm as its call on all samples would.

    Args:
        norm: the batch norm.
        moments: of one call of it, in the micro-batches that have made this call.
    """
    total = 0
    mean = torch.zeros_like(norm.running_mean)
    for part in moments:
        total += part.count
        mean += part.mean * part.count
    mean /= total
    squares = torch.zeros_like(norm.running_var)
    for part in moments:
        squares += part.variance * (part.count - 1) + (part.mean - mean) ** 2 * part.count
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    # What torch does (torch/nn/modules/batchnorm.py): without a momentum, the mean of all batches,
    # and no update if these are not counted.
    factor = norm.momentum
    if factor is None:
        factor = 0.0
        if norm.num_batches_tracked is not None:
            factor = 1.0 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean, factor)
    norm.running_var.lerp_(squares / (total - 1), factor)
