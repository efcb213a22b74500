"""Outputs of micro-batches: joined into those of the batch, and compared with those of the full batch.

Tensors are concatenated along the dimension in which the full batch is as long as all micro-batches. Scalar losses add
up to that of the batch: means are weighted by the number of their targets, sums are added. Other scalars are averaged
by samples, or, under average="sum", added. A value that is equal in all micro-batches is returned once. In place of
another output, the caller gets a placeholder that raises when it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallelize.backends.balanced.refusals import UnjoinedOutput
from parallelize.runtime.loss_counts import LossCount, attach_count, join_weights

__all__ = [
    "Dims",
    "Form",
    "Weights",
    "difference",
    "infer_batch_dims",
    "is_constant",
    "is_equal",
    "join_outputs",
    "output_form",
    "rounding",
    "scalar_weights",
]

Form = tuple[int | tuple[str, bool] | None, ...]
"""For each leaf of an output, see `output_form`; outputs of other forms are joined in another way."""
Dims = Mapping[int, int | None]
"""Position of an output -> its batch dimension, None if it has none; absent if it cannot be joined."""
Weights = Mapping[int, tuple[Sequence[float | torch.Tensor], LossCount]]
"""Position of a scalar output -> the weight of each micro-batch's value, and what the scalar averages over."""

# The largest relative difference that counts as rounding, by the dtype of an output; of gradients, four times as much.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
_ROUNDING_OF_HALF = 5e-2


def output_form(values: Sequence[Any], weights: Weights | None = None) -> Form:
    """Return, for each leaf of an output, its number of dimensions, or how a scalar is joined; None for objects.

    Args:
        values: the leaves.
        weights: see `scalar_weights`; None: scalars have 0 dimensions.
    """
    forms: list[Any] = [each.dim() if isinstance(each, torch.Tensor) else None for each in values]
    for position, (parts, count) in (weights or {}).items():
        forms[position] = count.kind, isinstance(parts[0], float) and parts[0] == 1.0
    return tuple(forms)


def infer_batch_dims(whole: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Dims:
    """Infer each output's batch dimension from the shapes for the full batch and for the micro-batches."""
    found: dict[int, int | None] = {}
    for position, (value, *parts) in enumerate(zip(whole, *rows, strict=True)):
        if not all(isinstance(each, torch.Tensor) and each.dim() == value.dim() for each in (value, *parts)):
            continue
        joined = [dim for dim in range(value.dim()) if _joined_shape(parts, dim) == value.shape]
        if joined:
            found[position] = joined[0]
        elif all(part.shape == value.shape for part in parts):
            found[position] = None
    return found


def scalar_weights(
    rows: Sequence[Sequence[Any]], sizes: Sequence[int], *, inputs: Any, adds_unknown: bool = False
) -> Weights:
    """Return the weights of scalar outputs, read from the graphs that forward has recorded.

    Args:
        rows: flat list of outputs of each micro-batch.
        sizes: number of samples of each micro-batch.
        inputs: the inputs of the model.
        adds_unknown: whether scalars that are neither a known mean nor a known sum are added.
    """
    scalars = {i: each for i, each in enumerate(zip(*rows, strict=True)) if all(_is_scalar(one) for one in each)}
    found = {
        i: join_weights(each, samples=sizes, inputs=inputs, adds_unknown=adds_unknown) for i, each in scalars.items()
    }
    # `loss.detach()` is joined as the loss.
    of_losses = {scalars[i][0].data_ptr(): each for i, each in found.items() if scalars[i][0].requires_grad}
    return {
        i: each if scalars[i][0].requires_grad else of_losses.get(scalars[i][0].data_ptr(), each)
        for i, each in found.items()
    }


def join_outputs(rows: Sequence[Sequence[Any]], *, device: torch.device, dims: Dims, weights: Weights) -> list[Any]:
    """Join the outputs of micro-batches.

    Args:
        rows: flat list of outputs of each micro-batch.
        device: device of the joined tensors.
        dims: see `Dims`.
        weights: see `scalar_weights`.
    """
    return [
        _join_scalars(values, *weights[position], device=device)
        if position in weights
        else _join_output(values, position=position, device=device, dims=dims)
        for position, values in enumerate(zip(*rows, strict=True))
    ]


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


def _joined_shape(parts: Sequence[torch.Tensor], dim: int) -> tuple[int, ...] | None:
    """Return the shape of parts after concatenation along `dim`; None if they cannot be concatenated."""
    shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    if len(shapes) > 1:
        return None
    length = sum(part.shape[dim] for part in parts)
    return (*parts[0].shape[:dim], length, *parts[0].shape[dim + 1 :])


def _is_scalar(value: Any) -> bool:
    """Return whether an output is a scalar that forward has computed, such as a loss."""
    is_float = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
    return is_float and not (value.requires_grad and value.is_leaf)


def _join_scalars(
    values: tuple[torch.Tensor, ...], weights: Sequence[float | torch.Tensor], count: LossCount, *, device: torch.device
) -> torch.Tensor:
    pairs = list(zip(values, weights, strict=True))
    # A mean over no targets is nan.
    pairs = [pair for pair in pairs if isinstance(pair[1], torch.Tensor) or pair[1] != 0.0] or pairs
    parts = [
        value.to(device) * (weight.to(device, value.dtype) if isinstance(weight, torch.Tensor) else weight)
        for value, weight in pairs
    ]
    joined: torch.Tensor = sum(parts[1:], parts[0])
    if joined.requires_grad:
        attach_count(joined, count)
    return joined


def _join_output(values: tuple[Any, ...], *, position: int, device: torch.device, dims: Dims) -> Any:
    first, dim = values[0], dims.get(position, -1)
    if all(value is first for value in values):
        return first
    if not isinstance(first, torch.Tensor):
        if not hasattr(first, "__dict__") and all(value == first for value in values):
            return first
        what, why = f"a {type(first).__name__}", "micro-batches return others"
    elif dim is not None and 0 <= dim < first.dim():
        if _joined_shape(values, dim) is not None:
            return torch.cat([value.to(device) for value in values], dim)
        shapes = " and ".join(dict.fromkeys(str(tuple(each.shape)) for each in values))
        what, why = f"tensors of {shapes}", "they differ outside of the batch dimension"
    elif not first.requires_grad and all(torch.equal(value, first.to(value.device)) for value in values):
        return first.to(device)
    else:
        what, why = f"tensors of {tuple(first.shape)}", "they differ, and no dimension is as long as a micro-batch"
    return UnjoinedOutput(f"output {position} of the model: {what}", why)
