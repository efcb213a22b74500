"""Outputs of micro-batches: joined into those of the batch, and compared with those of the full batch.

Tensors are concatenated along the dimension in which the full batch is as long as all micro-batches. Scalar losses add
up to that of the batch: means are weighted by the number of their targets, sums are added. Other scalars are averaged
by samples, or, under average="sum", added. A value that is equal in all micro-batches is returned once. In place of
another output, the caller gets a placeholder that raises when it is used.

Outputs beside a loss, such as the logits of a language model, are often not used, and the largest tensors of a step;
`OutputBuffers` holds them once at a time. They are not joined at their first use: a tensor without memory passes
isinstance, but autograd functions and DLPack take it as it is, without a graph and without values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallelize.backends.balanced.batch import rebuild
from parallelize.backends.balanced.refusals import UnjoinedOutput
from parallelize.runtime.containers import leaves
from parallelize.runtime.loss_counts import LossCount, attach_count, join_weights

__all__ = [
    "Dims",
    "Form",
    "OutputBuffers",
    "Weights",
    "differ",
    "difference",
    "infer_batch_dims",
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


class OutputBuffers:
    """Memory of the joined outputs beside a loss, to which those of each micro-batch are copied when it ends.

    Concatenated after the last micro-batch, they would be in memory twice. Until then, a stand-in is returned for each
    copied tensor: it has its shape and its gradient, and no memory. Tensors on other devices are not copied: the next
    micro-batch would wait there for the copy.

    Args:
        known: dimensions in which outputs of earlier batches like this one are joined, by their form.
        sizes: number of samples of each micro-batch.
    """

    def __init__(self, known: Mapping[Form, Dims], sizes: Sequence[int], *, device: torch.device) -> None:
        with_loss = [form for form in known if any(isinstance(each, tuple) for each in form)]
        self._form: Form = with_loss[-1] if with_loss else ()
        self._dims: Dims = known.get(self._form, {})
        self._sizes, self._kind = sizes, (torch.strided, device)
        self._buffers: dict[int, torch.Tensor] = {}
        self._parts: dict[tuple[int, int], torch.Tensor] = {}

    def copy(self, index: int, output: Any) -> Any:
        """Copy the outputs of a micro-batch, and return them with stand-ins."""
        row = leaves(output)
        dims = [each.dim() if isinstance(each, torch.Tensor) else None for each in row]
        if dims != [0 if isinstance(each, tuple) else each for each in self._form]:
            return output
        return rebuild(output, [self._copied(index, position, each) for position, each in enumerate(row)])

    def replace_stand_ins(self, rows: Sequence[list[Any]], dims: Dims) -> None:
        """Replace stand-ins by the joined tensor or, if another dimension or shape was found, by their own values."""
        for position, buffer in self._buffers.items():
            dim, copied = self._dims[position], [i for i in range(len(rows)) if (position, i) in self._parts]
            if dim == dims.get(position) and len(copied) == len(rows):
                joined = _joined([buffer], dim, *(row[position] for row in rows))
                for row in rows:
                    row[position] = joined
            else:
                for i in copied:
                    rows[i][position] = _joined([self._parts[position, i].clone()], 0, rows[i][position])

    def _copied(self, index: int, position: int, value: Any) -> Any:
        dim = self._dims.get(position)
        if dim is None or type(value) is not torch.Tensor or (value.layout, value.device) != self._kind:
            return value
        length, rest = divmod(value.shape[dim], self._sizes[index])
        shape = (*value.shape[:dim], length * sum(self._sizes), *value.shape[dim + 1 :])
        if rest or not value.is_contiguous() or not value.is_floating_point():
            return value
        if position not in self._buffers:  # two threads may get here: the first one's is kept
            self._buffers.setdefault(position, torch.empty(shape, dtype=value.dtype, device=value.device))
        buffer = self._buffers[position]
        if buffer.shape != shape or buffer.dtype != value.dtype:
            return value
        part = buffer.narrow(dim, length * sum(self._sizes[:index]), value.shape[dim])
        part.copy_(value.detach())
        self._parts[position, index] = part
        with torch.no_grad():
            stand_in = value.new_full((), math.nan).expand(value.shape)
        return _joined([stand_in], 0, value)


class _Joined(torch.autograd.Function):
    """Joined tensor in given memory, with the gradient of its parts; a stand-in has one part, and one value."""

    @staticmethod
    def forward(ctx: Any, memory: list[torch.Tensor], dim: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.lengths = dim, [each.shape[dim] for each in parts]
        ctx.set_materialize_grads(False)
        return memory.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        whole = gradients[0]
        return None, None, *([None] * len(ctx.lengths) if whole is None else torch.split(whole, ctx.lengths, ctx.dim))


_joined: Any = _Joined.apply


def output_form(values: Sequence[Any], weights: Weights | None = None) -> Form:
    """Return, for each leaf of an output, its number of dimensions, or how a scalar is joined; None for objects."""
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
    """Return the weights of scalar outputs, read from the graphs that forward has recorded; see `join_weights`."""
    scalars = {i: each for i, each in enumerate(zip(*rows, strict=True)) if all(_is_scalar(one) for one in each)}
    found = {
        i: join_weights(each, samples=sizes, inputs=inputs, adds_unknown=adds_unknown) for i, each in scalars.items()
    }
    # `loss.detach()` is joined as the loss.
    of_losses = {scalars[i][0].data_ptr(): each for i, each in found.items() if scalars[i][0].requires_grad}
    return {i: of_losses.get(scalars[i][0].data_ptr(), each) for i, each in found.items()}


def join_outputs(rows: Sequence[Sequence[Any]], *, device: torch.device, dims: Dims, weights: Weights) -> list[Any]:
    """Join the outputs of micro-batches, given as a flat list for each, on a device."""
    return [
        _join_scalars(values, *weights[position], device=device)
        if position in weights
        else _join_output(values, position=position, device=device, dims=dims)
        for position, values in enumerate(zip(*rows, strict=True))
    ]


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


def differ(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether any two outputs differ by more than rounding."""
    return any(difference(*pair) > 0 for pair in zip(one, other, strict=True))


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
