"""Batch norm's running statistics, as the whole batch would have moved them.

Each micro-batch is normalised by its own mean and variance: it cannot know those of micro-batches that come later. The
running statistics can: every call of `batch_norm` gets scratch buffers instead of the module's, and after the forward
the micro-batches' moments are merged into those of the whole batch and applied once.

    mean = sum(n_i mean_i) / N         variance = (sum((n_i - 1) var_i) + sum(n_i (mean_i - mean)^2)) / (N - 1)

For the first batch norm of a model these are exactly the moments of the batch; for later ones those of activations
that were normalised by micro-batch.

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

__all__ = ["Moments", "deferred"]

_SIGNATURE = inspect.signature(F.batch_norm)


@dataclass(frozen=True)
class _Moment:
    count: int
    mean: torch.Tensor  # C
    variance: torch.Tensor  # C, unbiased


@dataclass
class _Buffers:
    mean: torch.Tensor
    variance: torch.Tensor
    momentum: float
    calls: list[_Moment] = field(default_factory=list)


class Moments:
    """Those that one micro-batch's calls of `batch_norm` have seen, by the running mean that they were meant for."""

    def __init__(self) -> None:
        self.buffers: dict[int, _Buffers] = {}
        self.is_recording = True

    def batch_norm(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, localize: Callable[[Any], Any]) -> Any:
        """`F.batch_norm`, which in training leaves the running statistics alone.

        Args:
            args: as it was called.
            kwargs: as it was called.
            localize: brings a tensor to the stage that runs.
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
            raise refusals.one_value(x.shape[1])
        momentum = call["momentum"]
        weight, bias = localize(call["weight"]), localize(call["bias"])
        output = F.batch_norm(x, scratch[0], scratch[1], weight, bias, training=True, momentum=1.0, eps=call["eps"])
        if self.is_recording:
            kept = self.buffers.setdefault(id(mean), _Buffers(mean, variance, momentum))
            kept.calls.append(_Moment(x.numel() // x.shape[1], *scratch))
        return output


@contextlib.contextmanager
def deferred(model: nn.Module, moments: Sequence[Moments]) -> Iterator[None]:
    """While micro-batches run, count and track nothing; at the end, what the whole batch would have left.

    Args:
        model: whose batch norms' counters are held.
        moments: one per micro-batch, filled meanwhile.
    """
    tracking = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.training and module.num_batches_tracked is not None
    ]
    # Each micro-batch counts as a batch in the module's forward, and cumulative averages read the counter there.
    before = [module.num_batches_tracked.clone() for module in tracking]  # type: ignore[union-attr]  # asked above
    try:
        yield
    finally:
        for module, counted in zip(tracking, before, strict=True):
            module.num_batches_tracked.copy_(counted)  # type: ignore[union-attr]  # asked above
    by_mean = {id(module.running_mean): module for module in tracking}
    with torch.no_grad():
        for key in dict.fromkeys(key for each in moments for key in each.buffers):
            _apply([each.buffers[key] for each in moments if key in each.buffers], by_mean.get(key))


def _apply(per_microbatch: list[_Buffers], module: _BatchNorm | None) -> None:
    first = per_microbatch[0]
    # A module that is called several times moves its statistics several times.
    for call in range(max(len(each.calls) for each in per_microbatch)):
        merged = _merge([each.calls[call] for each in per_microbatch if call < len(each.calls)])
        factor = first.momentum
        if module is not None and module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if module.momentum is None:
                factor = 1.0 / float(module.num_batches_tracked)
        first.mean.mul_(1 - factor).add_(merged.mean.to(first.mean.device), alpha=factor)
        first.variance.mul_(1 - factor).add_(merged.variance.to(first.variance.device), alpha=factor)


def _merge(parts: Sequence[_Moment]) -> _Moment:
    total = sum(part.count for part in parts)
    mean = sum((part.mean * part.count for part in parts[1:]), parts[0].mean * parts[0].count) / total
    squares = torch.zeros_like(mean)
    for part in parts:
        squares += part.variance * (part.count - 1) + (part.mean - mean) ** 2 * part.count
    return _Moment(total, mean, squares / (total - 1))
