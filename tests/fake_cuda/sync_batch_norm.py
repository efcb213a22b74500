"""The operators of nn.SyncBatchNorm, which only CUDA has."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["install"]

LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """Implement forward and backward with element-wise operators and sums; statistics are in fp32."""
    library = torch.library.Library("aten", "IMPL")
    for name, implementation in {
        "batch_norm_stats": _stats,
        "batch_norm_gather_stats_with_counts": _gather_stats,
        "batch_norm_elemt": _normalize,
        "batch_norm_backward_reduce": _backward_sums,
        "batch_norm_backward_elemt": _backward,
    }.items():
        library.impl(name, implementation, "CUDA")
    LIBRARIES.append(library)


def _channels_last(x: Tensor) -> Tensor:
    return x.float().movedim(1, -1)


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = _channels_last(x).flatten(0, -2)
    return rows.mean(0), (rows.var(0, correction=0) + eps).rsqrt()


def _gather_stats(
    _x: Tensor,
    means: Tensor,
    inverse_deviations: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    total, shares = counts.sum(), (counts / counts.sum())[:, None]
    mean = (shares * means).sum(0)
    var = (shares * (inverse_deviations.pow(-2) - eps + (means - mean).square())).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean), momentum)
    if running_var is not None:
        running_var.lerp_((var * total / (total - 1)).to(running_var), momentum)
    return mean, (var + eps).rsqrt()


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse_deviation: Tensor, _eps: float
) -> Tensor:
    y = (_channels_last(x) - mean) * inverse_deviation
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return torch.empty_like(x).copy_(y.movedim(-1, 1))


def _backward_sums(
    grad: Tensor, x: Tensor, mean: Tensor, inverse_deviation: Tensor, weight: Tensor | None, *_needed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = _channels_last(grad).flatten(0, -2)
    grad_sum = rows.sum(0)
    product_sum = (rows * (_channels_last(x).flatten(0, -2) - mean)).sum(0)
    dtype = mean.dtype if weight is None else weight.dtype
    return grad_sum, product_sum, (product_sum * inverse_deviation).to(dtype), grad_sum.to(dtype)


def _backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse_deviation: Tensor,
    weight: Tensor | None,
    grad_sum: Tensor,
    product_sum: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    along = (_channels_last(x) - mean) * inverse_deviation.square() * product_sum / total
    scale = inverse_deviation if weight is None else inverse_deviation * weight
    found = (_channels_last(grad) - grad_sum / total - along) * scale
    return torch.empty_like(x).copy_(found.movedim(-1, 1))
