"""Split a batch into micro-batches; join their outputs.

Inputs: a tensor anywhere in the arguments is split along `batch_dim` (a 1-D tensor along its only dimension) if that
dimension is as long as the batch, in this and in every earlier batch. All other values are passed to every micro-batch.

Outputs: tensors are concatenated along the dimension in which the full batch is as long as all micro-batches. Scalar
losses add up to that of the batch: means are weighted by the number of their targets, sums are added. Other scalars are
averaged by samples, or, under average="sum", added. A value that is equal in all micro-batches is returned once. In
place of another output, the caller gets a placeholder that raises when it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from parallelize.backends.balanced.refusals import CannotSplitError, UnjoinedOutput, unjoinable
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.loss_counts import LossCount, attach_count, join_weights

__all__ = [
    "Form",
    "SplitBatch",
    "Weights",
    "batch_size",
    "first_samples",
    "infer_batch_dims",
    "join_outputs",
    "named_leaves",
    "names_not_per_sample",
    "output_form",
    "rebuild",
    "scalar_weights",
    "split_dims",
]

Form = tuple[int | tuple[str, bool] | None, ...]
"""For each leaf of an output, see `output_form`; outputs of other forms are joined in another way."""
Dims = Mapping[int, int | None]
"""Position of an output -> its batch dimension, None if it has none; absent if it cannot be joined."""
Weights = Mapping[int, tuple[Sequence[float | torch.Tensor], LossCount]]
"""Position of a scalar output -> the weight of each micro-batch's value, and what the scalar averages over."""


def batch_size(inputs: Any, *, dim: int) -> int:
    """Return the number of samples in a batch: the length of dimension `dim` in the first tensor that has one.

    Raises:
        CannotSplitError: no tensor has a dimension `dim`, or an argument is a PackedSequence.
    """
    args, kwargs = inputs
    if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
        raise CannotSplitError(
            "an input of the model is a PackedSequence",
            why="its samples are interleaved",
            fix="pass the padded tensor with its lengths, and pack it in forward",
        )
    for leaf in leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            raise CannotSplitError(
                "an input of the model is a nested tensor", why="it has no slices", fix="pass a padded tensor"
            )
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
            return leaf.shape[dim]
    raise CannotSplitError(
        f"no argument of the model has a dimension {dim}",
        why="batches are split along their batch dimension",
        fix="pass tensors, alone or in containers; set their batch dimension: BalancedBackend(batch_dim=1)",
    )


def rebuild(like: Any, flat: Sequence[Any]) -> Any:
    """Return the nested containers of `like`, with the values of `flat` as leaves."""
    values = iter(flat)
    return map_leaves(lambda _: next(values), like)


def named_leaves(inputs: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) in the order of `leaves`; a name, such as `0.mask (2-D)`, is the same in every batch."""
    args, kwargs = inputs
    for place, value in [*((str(index), each) for index, each in enumerate(args)), *kwargs.items()]:
        for path, leaf in _paths(place, value):
            yield f"{path} ({leaf.dim()}-D)" if isinstance(leaf, torch.Tensor) else path, leaf


def names_not_per_sample(inputs: Any, *, dim: int) -> set[str]:
    """Return the names of input tensors whose length in the batch dimension differs from the batch size."""
    size = batch_size(inputs, dim=dim)
    found = ((name, leaf, _axis(leaf, dim)) for name, leaf in named_leaves(inputs))
    # Length 1 is left out: the tensor may be broadcast in this batch, and per sample in the next one.
    return {name for name, leaf, axis in found if axis is not None and leaf.shape[axis] not in {1, size}}


def split_dims(inputs: Any, *, dim: int) -> dict[str, int]:
    """Return the dimension along which each split input is split, by the input's name."""
    size = batch_size(inputs, dim=dim)
    axes = zip(named_leaves(inputs), _axes(inputs, size, dim=dim, whole_inputs=()), strict=True)
    return {name: axis for (name, _), axis in axes if axis is not None}


def first_samples(inputs: Any, samples: int, *, dim: int, whole_inputs: Collection[str] = ()) -> Any:
    """Return the inputs for the first `samples` of a batch; tensors named in `whole_inputs` are not split."""
    size = batch_size(inputs, dim=dim)
    axes = zip(leaves(inputs), _axes(inputs, size, dim=dim, whole_inputs=whole_inputs), strict=True)
    return rebuild(inputs, [leaf if axis is None else leaf.narrow(axis, 0, min(samples, size)) for leaf, axis in axes])


class SplitBatch:
    """Inputs of a batch, split into micro-batches.

    Args:
        microbatches: maximum number of micro-batches.
        whole_inputs: names of tensors that are not split, even if they are as long as this batch.
        is_bounded: whether inputs that require grad are replaced by views, where a backward of the micro-batches ends.

    Attributes:
        sizes: number of samples of each micro-batch.
        bounds: these views.
    """

    def __init__(
        self,
        inputs: Any,
        *,
        microbatches: int,
        dim: int,
        whole_inputs: Collection[str] = (),
        is_bounded: bool = False,
    ) -> None:
        self._inputs = inputs
        self.bounds: list[torch.Tensor] = []
        flat = list(leaves(inputs))
        size = batch_size(inputs, dim=dim)
        count = max(1, min(microbatches, size))
        self.sizes = tuple(size // count + (index < size % count) for index in range(count))
        axes = _axes(inputs, size, dim=dim, whole_inputs=whole_inputs)
        if is_bounded:
            flat = [self._bounded(leaf) for leaf in flat]
        pieces = [self._split(leaf, axis) for leaf, axis in zip(flat, axes, strict=True)]
        self._parts = [list(part) for part in zip(*pieces, strict=True)]

    def inputs(self, index: int) -> Any:
        """Return the arguments and keyword arguments of one micro-batch."""
        return rebuild(self._inputs, self._parts[index])

    def _bounded(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        self.bounds.append(leaf.view_as(leaf))
        return self.bounds[-1]

    def _split(self, leaf: Any, axis: int | None) -> Sequence[Any]:
        if axis is None or len(self.sizes) == 1:
            return [leaf] * len(self.sizes)
        # Slices, unlike the outputs of torch.split, may be changed in place.
        starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        return [leaf.narrow(axis, start, size) for start, size in zip(starts, self.sizes, strict=True)]


def _axis(leaf: Any, dim: int) -> int | None:
    """Return the batch dimension of a leaf: `dim`, or 0 for a 1-D tensor; None if the leaf has no such dimension."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return None
    if leaf.dim() == 1:
        return 0
    return dim if leaf.dim() > dim else None


def _axes(inputs: Any, size: int, *, dim: int, whole_inputs: Collection[str]) -> list[int | None]:
    """Return the dimension along which each leaf is split, None for leaves that are not split."""
    found = ((name, leaf, _axis(leaf, dim)) for name, leaf in named_leaves(inputs))
    return [
        axis if axis is not None and leaf.shape[axis] == size and name not in whole_inputs else None
        for name, leaf, axis in found
    ]


def _paths(at: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        inner: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "to")):
        inner = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    else:
        yield at, value
        return
    for key, each in inner:
        yield from _paths(f"{at}.{key}", each)


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
    # A mean over no targets is nan.
    pairs = [pair for pair in zip(values, weights, strict=True) if not isinstance(pair[1], float) or pair[1] != 0.0]
    pairs = pairs or list(zip(values, weights, strict=True))
    parts = [value.to(device) * _weight(weight, value, device) for value, weight in pairs]
    joined: torch.Tensor = sum(parts[1:], parts[0])
    if joined.requires_grad:
        attach_count(joined, count)
    return joined


def _weight(weight: float | torch.Tensor, value: torch.Tensor, device: torch.device) -> float | torch.Tensor:
    return weight.to(device, value.dtype) if isinstance(weight, torch.Tensor) else weight


def _join_output(values: tuple[Any, ...], *, position: int, device: torch.device, dims: Dims) -> Any:
    first = values[0]
    if all(value is first for value in values):
        return first
    name = f"output {position} of the model"
    if not isinstance(first, torch.Tensor):
        is_equal = not hasattr(first, "__dict__") and all(value == first for value in values)
        if is_equal:
            return first
        return UnjoinedOutput(unjoinable(f"{name}: a {type(first).__name__}", "micro-batches return others"))
    dim = dims.get(position, -1)
    if dim is not None and 0 <= dim < first.dim():
        if _joined_shape(values, dim) is not None:
            return torch.cat([value.to(device) for value in values], dim)
        shapes = " and ".join(dict.fromkeys(str(tuple(each.shape)) for each in values))
        return UnjoinedOutput(unjoinable(f"{name}: tensors of {shapes}", "they differ outside of the batch dimension"))
    is_constant = not first.requires_grad and all(
        value.shape == first.shape and torch.equal(value, first.to(value.device)) for value in values
    )
    if is_constant:
        return first.to(device)
    why = "they differ, and no dimension is as long as a micro-batch"
    return UnjoinedOutput(unjoinable(f"{name}: tensors of {tuple(first.shape)}", why))
