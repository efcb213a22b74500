"""Split a batch into micro-batches; join their outputs.

Inputs: a tensor anywhere in the arguments is split along `batch_dim` (a 1-D tensor along its only dimension) if that
dimension is as long as the batch, in this and in every earlier batch. All other values are passed to every micro-batch.

Outputs: tensors are concatenated along the dimension whose length is the micro-batch's size. Scalar losses add up to
that of the batch: means are weighted by the number of their targets, sums are added, other scalars are averaged by
samples. A value that is equal in all micro-batches is returned once. Other outputs are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from parallelize.backends.balanced import refusals
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.loss_counts import LossCount, join_weights

__all__ = [
    "JoinedOutput",
    "SplitBatch",
    "batch_size",
    "first_samples",
    "infer_batch_dims",
    "join_outputs",
    "named_leaves",
    "names_not_per_sample",
    "output_form",
    "output_shapes",
    "rebuild",
    "split_dims",
]


def batch_size(inputs: Any, *, dim: int) -> int:
    """Return the number of samples in a batch: the length of dimension `dim` in the first tensor that has one.

    Raises:
        ConfigError: no tensor has a dimension `dim`, or an argument is a PackedSequence.
    """
    args, kwargs = inputs
    if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
        raise refusals.packed_sequence()
    for leaf in leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
            return leaf.shape[dim]
    raise refusals.no_batch(dim)


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

    Attributes:
        sizes: number of samples of each micro-batch.
        parts: flat list of inputs of each micro-batch; tensors that require grad are detached to separate leaves.
        grad_inputs: (position, tensor) of each input that requires grad.
    """

    def __init__(self, inputs: Any, *, microbatches: int, dim: int, whole_inputs: Collection[str] = ()) -> None:
        self._inputs = inputs
        flat = list(leaves(inputs))
        size = batch_size(inputs, dim=dim)
        count = max(1, min(microbatches, size))
        self.sizes = tuple(size // count + (index < size % count) for index in range(count))
        self._axes = _axes(inputs, size, dim=dim, whole_inputs=whole_inputs)
        pieces = [self._split(leaf, axis) for leaf, axis in zip(flat, self._axes, strict=True)]
        self.parts = [list(part) for part in zip(*pieces, strict=True)]
        self.grad_inputs = [(i, x) for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.requires_grad]

    def inputs(self, index: int) -> Any:
        """Return the arguments and keyword arguments of one micro-batch."""
        return rebuild(self._inputs, self.parts[index])

    def gradient(self, position: int, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Join the gradients of an input's parts, one per micro-batch; return None if all of them are None."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        axis = self._axes[position]
        if axis is None:
            return torch.stack(found).sum(0) if len(found) > 1 else found[0]
        pieces = [torch.zeros_like(self.parts[i][position]) if p is None else p for i, p in enumerate(parts)]
        return torch.cat(pieces, axis)

    def _split(self, leaf: Any, axis: int | None) -> Sequence[Any]:
        if not isinstance(leaf, torch.Tensor) or (axis is None and not leaf.requires_grad):
            return [leaf] * len(self.sizes)
        plain = leaf.detach()
        pieces = (
            [plain.view_as(plain) for _ in self.sizes] if axis is None else torch.split(plain, list(self.sizes), axis)
        )
        return [piece.detach().requires_grad_(leaf.requires_grad) for piece in pieces]


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


@dataclass(frozen=True)
class JoinedOutput:
    """One output, joined over all micro-batches.

    Args:
        value: output of the full batch.
        dim: dimension of the concatenation; None if the output is not concatenated.
        weights: weight of each micro-batch's scalar; None if the output is no scalar.
        count: number of targets that a scalar loss averages over; None if the output is no scalar.
    """

    value: Any
    dim: int | None = None
    weights: tuple[float | torch.Tensor, ...] | None = None
    count: LossCount | None = None

    def split_gradient(self, gradient: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
        """Split the joined output's gradient into the gradients of the micro-batches' outputs."""
        if self.weights is not None:
            return [gradient * torch.as_tensor(weight).to(gradient) for weight in self.weights]
        if self.dim is not None:
            return torch.split(gradient, list(sizes), self.dim)
        return [gradient, *[None] * (len(sizes) - 1)]


def output_shapes(output: Any) -> tuple[tuple[int, ...] | None, ...]:
    """Return the shape of each leaf of an output, None for leaves that are not tensors."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves(output))


def infer_batch_dims(
    few: Sequence[tuple[int, ...] | None], many: Sequence[tuple[int, ...] | None]
) -> dict[int, int | None]:
    """Infer each output's batch dimension, None if it has none, from the output shapes for two batch sizes."""
    if few is many or len(few) != len(many):
        return {}
    found: dict[int, int | None] = {}
    for position, (one, other) in enumerate(zip(few, many, strict=True)):
        if one is not None and other is not None and len(one) == len(other):
            differing = [dim for dim, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
            if len(differing) <= 1:
                found[position] = differing[0] if differing else None
    return found


def output_form(shapes_: Sequence[tuple[int, ...] | None]) -> tuple[int | None, ...]:
    """Return the number of dimensions of each leaf of an output, None for leaves that are not tensors."""
    return tuple(None if each is None else len(each) for each in shapes_)


def join_outputs(
    rows: Sequence[Sequence[Any]],
    sizes: Sequence[int],
    *,
    device: torch.device,
    dims: Mapping[int, int | None],
    known_form: tuple[int | None, ...] | None = None,
    inputs: Any = (),
) -> list[JoinedOutput]:
    """Join the outputs of micro-batches.

    Args:
        rows: flat list of outputs of each micro-batch.
        sizes: number of samples of each micro-batch.
        device: device of the joined tensors.
        dims: position of an output -> its batch dimension, None if it has none; absent if not known.
        known_form: number of dimensions of each output; `dims` applies to this form only. None: to any form.
        inputs: the inputs of the model.

    Raises:
        ConfigError: an output differs between micro-batches, and can be neither concatenated nor averaged.
    """
    if len({len(row) for row in rows}) > 1:
        raise refusals.uneven_outputs([len(row) for row in rows])
    if known_form is not None and known_form != output_form(output_shapes(rows[0])):
        dims = {}  # not the planned outputs: without labels, for example, a model may return others
    return [
        _join_scalars(values, sizes, device=device, inputs=inputs)
        if all(_is_scalar(each) for each in values)
        else _join_output(values, tuple(sizes), position=position, device=device, dims=dims)
        for position, values in enumerate(zip(*rows, strict=True))
    ]


def _is_scalar(value: Any) -> bool:
    """Return whether an output is a scalar that forward has computed, such as a loss."""
    is_float = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
    return is_float and not (value.requires_grad and value.is_leaf)


def _join_scalars(
    values: tuple[torch.Tensor, ...], sizes: Sequence[int], *, device: torch.device, inputs: Any
) -> JoinedOutput:
    weights, count = join_weights(values, samples=sizes, inputs=inputs)
    joined: Any = sum(
        value.detach().to(device) * torch.as_tensor(weight).to(device, value.dtype)
        for value, weight in zip(values, weights, strict=True)
    )
    return JoinedOutput(joined, weights=tuple(weights), count=count)


def _join_output(
    values: tuple[Any, ...],
    sizes: tuple[int, ...],
    *,
    position: int,
    device: torch.device,
    dims: Mapping[int, int | None],
) -> JoinedOutput:
    first = values[0]
    if len(values) == 1 or all(value is first for value in values):
        is_ours = isinstance(first, torch.Tensor) and not (first.requires_grad and first.is_leaf)
        # A copy, since the user may change the output in place, and backward needs the original.
        return JoinedOutput(first.detach().to(device, copy=True) if is_ours else first)
    if not isinstance(first, torch.Tensor):
        if any(value != first for value in values):
            if hasattr(first, "__dict__"):
                raise refusals.not_a_tensor(position, type(first).__name__)
            raise refusals.unjoinable(position, f"{first!r} in the first micro-batch, another value in a later one")
        return JoinedOutput(first)
    dim = _batch_dim(values, sizes, known_dim=dims.get(position, -1))
    if dim is not None:
        shapes_ = [tuple(value.shape) for value in values]
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes_}) > 1:
            raise refusals.uneven_shapes(position, shapes_)
        return JoinedOutput(torch.cat([value.detach().to(device) for value in values], dim), dim=dim)
    if first.requires_grad or any(not torch.equal(value, first) for value in values):
        raise refusals.unjoinable(position, f"tensors of {tuple(first.shape)} for {sizes[0]} samples")
    return JoinedOutput(first.detach().to(device))


def _batch_dim(values: tuple[torch.Tensor, ...], sizes: tuple[int, ...], *, known_dim: int | None) -> int | None:
    """Return `known_dim` if its length is each micro-batch's size, else None; for -1, the first such dimension."""
    shapes_ = [value.shape for value in values]
    fitting = [dim for dim in range(values[0].dim()) if all(s[dim] == n for s, n in zip(shapes_, sizes, strict=True))]
    if known_dim == -1:
        return fitting[0] if fitting else None
    return known_dim if known_dim in fitting else None
