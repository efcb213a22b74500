"""Compare outputs and gradients of micro-batches with those of the full batch: up to rounding, or for equality."""

from __future__ import annotations

import math
from typing import Any

import torch

from parallelize.backends.balanced.microbatch_split_join import Dims, Weights

__all__ = ["difference", "is_constant", "is_equal", "rounding", "sampled"]

# The largest relative difference that counts as rounding, by the dtype of an output; of gradients, four times as much.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
_ROUNDING_OF_HALF = 5e-2
_MAX_VALUES = 4096  # of each parameter's gradient that are compared


def is_constant(value: Any, position: int, dims: Dims, weights: Weights) -> bool:
    """Return whether an output is a number, or a tensor, that is joined only if it is equal in all micro-batches."""
    if isinstance(value, torch.Tensor):
        return position not in weights and dims.get(position) is None and not value.requires_grad
    return value is not None


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two outputs are equal, tensors up to their devices."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.is_floating_point() and one.shape == other.shape:
            return torch.allclose(one.cpu(), other.cpu(), rtol=1e-3, equal_nan=True)
        return torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)


def sampled(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return some values of a gradient, so that only one pass's gradients are in memory; None: there is none."""
    if gradient is None:
        return None
    flat = gradient.to_dense().flatten()
    return flat[:: max(1, flat.numel() // _MAX_VALUES)].clone()


def rounding(value: torch.Tensor) -> float:
    """Return the largest relative difference of an output that counts as rounding."""
    is_half = torch.is_autocast_enabled(value.device.type)
    return _ROUNDING_OF_HALF if is_half else _ROUNDING.get(value.dtype, _ROUNDING_OF_HALF)


def difference(one: Any, other: Any, *, rounding: float | None = None, least: float = 1e-6) -> float:
    """Return the largest difference, relative to the largest value of `one`, at least `least`; 0 if it is rounding."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return 0.0
    if one.shape != other.shape:
        return math.inf
    if one.is_complex() and other.is_complex():
        one, other = torch.view_as_real(one.detach().resolve_conj()), torch.view_as_real(other.detach().resolve_conj())
    if not one.is_floating_point() or one.numel() == 0:
        return 0.0
    wide, narrow = (each.detach().double().cpu().nan_to_num() for each in (one, other))
    relative = ((wide - narrow).abs().max() / wide.abs().max().clamp_min(max(least, 1e-6))).item()
    return relative if relative > (rounding or _ROUNDING.get(one.dtype, _ROUNDING_OF_HALF)) else 0.0
