"""Batch norm of micro-batches, with running statistics of the full batch.

Each micro-batch is normalized by its own moments (mean, variance), since later micro-batches have not run yet. The call
of `batch_norm` stores these moments in scratch buffers instead of the running statistics. After the forward they are
merged into those of the full batch, which update the running statistics once. Micro-batch i has n_i of
the N values per channel:

    mean = sum(n_i mean_i) / N         variance = (sum((n_i - 1) var_i) + sum(n_i (mean_i - mean)^2)) / (N - 1)

For the first batch norm of a model, these are the exact moments of the full batch. For later ones they differ
slightly, since the inputs have been normalized per micro-batch.

Source: Chan, Golub & LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from parallelize.backends.balanced import refusals

__all__ = ["Moments", "deferred_running_stats"]

_SIGNATURE = inspect.signature(F.batch_norm)


@dataclass(frozen=True)
class _CallMoments:
    count: int
    mean: torch.Tensor  # shape (C,)
    variance: torch.Tensor  # shape (C,), unbiased


@dataclass
class _RunningStats:
    mean: torch.Tensor
    variance: torch.Tensor
    momentum: float
    calls: list[_CallMoments] = field(default_factory=list)


class Moments:
    """Moments computed by one micro-batch's calls of `batch_norm`, by the id of the module's `running_mean`."""

    def __init__(self) -> None:
        self.buffers: dict[int, _RunningStats] = {}
        self.is_recording = True

    def batch_norm(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, localize: Callable[[Any], Any]) -> Any:
        """Compute `F.batch_norm`; in training, record the moments and leave the running statistics unchanged.

        `localize` returns an argument with its tensors replaced by the current stage's versions.
        """
        given = _SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        mean, variance = call["running_mean"], call["running_var"]
        if not call["training"] or mean is None or variance is None:
            return F.batch_norm(**localize(dict(call)))
        x = localize(call["input"])
        scratch = torch.zeros_like(mean, device=x.device), torch.zeros_like(variance, device=x.device)
        if x.numel() == x.shape[1]:
            raise refusals.one_value_per_channel(x.shape[1])
        momentum = call["momentum"]
        weight, bias = localize(call["weight"]), localize(call["bias"])
        output = F.batch_norm(x, scratch[0], scratch[1], weight, bias, training=True, momentum=1.0, eps=call["eps"])
        if self.is_recording:
            kept = self.buffers.setdefault(id(mean), _RunningStats(mean, variance, momentum))
            kept.calls.append(_CallMoments(x.numel() // x.shape[1], *scratch))
        return output


@contextlib.contextmanager
def deferred_running_stats(model: nn.Module, moments: Sequence[Moments]) -> Iterator[None]:
    """Update batch norm's counters and running statistics once, on exit, from the micro-batches' `moments`."""
    tracking = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.training and module.num_batches_tracked is not None
    ]
    # Restored on exit, since the forward of every micro-batch increments the counter.
    before = [module.num_batches_tracked.clone() for module in tracking]  # type: ignore[union-attr]  # filtered above
    try:
        yield
    finally:
        for module, counted in zip(tracking, before, strict=True):
            module.num_batches_tracked.copy_(counted)  # type: ignore[union-attr]  # filtered above
    by_mean = {id(module.running_mean): module for module in tracking}
    with torch.no_grad():
        for key in dict.fromkeys(key for each in moments for key in each.buffers):
            _apply([each.buffers[key] for each in moments if key in each.buffers], by_mean.get(key))


def _apply(per_microbatch: list[_RunningStats], module: _BatchNorm | None) -> None:
    first = per_microbatch[0]
    # One update per call, since a model may call a module several times in one forward.
    for call in range(max(len(each.calls) for each in per_microbatch)):
        merged = _merge([each.calls[call] for each in per_microbatch if call < len(each.calls)])
        factor = first.momentum
        if module is not None and module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if module.momentum is None:
                factor = 1.0 / float(module.num_batches_tracked)
        first.mean.mul_(1 - factor).add_(merged.mean.to(first.mean.device), alpha=factor)
        first.variance.mul_(1 - factor).add_(merged.variance.to(first.variance.device), alpha=factor)


def _merge(parts: Sequence[_CallMoments]) -> _CallMoments:
    total = sum(part.count for part in parts)
    mean = sum((part.mean * part.count for part in parts[1:]), parts[0].mean * parts[0].count) / total
    squares = torch.zeros_like(mean)
    for part in parts:
        squares += part.variance * (part.count - 1) + (part.mean - mean) ** 2 * part.count
    return _CallMoments(total, mean, squares / (total - 1))
