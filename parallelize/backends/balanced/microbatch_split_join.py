"""One batch as micro-batches, and their outputs as one batch again.

Inputs: of the tensors anywhere in the arguments, those whose `batch_dim` is as long as the batch are cut; those of one
dimension have only that. All other values go to every micro-batch, and so does what an earlier batch has shown to be of
another length.

Outputs: tensors are joined along the dimension that follows the micro-batch's size; scalars are averaged, weighted by
samples, which is exact for a loss that is a mean over samples; what is equal in all micro-batches is returned once.
Anything else has no meaning for the whole batch and is refused.
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

__all__ = [
    "Batch",
    "Column",
    "batch_dims",
    "batch_size",
    "columns",
    "cut",
    "form",
    "named",
    "rebuild",
    "shapes",
    "take",
    "uneven",
]


def batch_size(inputs: Any, *, dim: int) -> int:
    """How many samples a batch has: the length of the first tensor that has a batch dimension.

    Raises:
        ConfigError: there is none, or the batch is packed sequences.
    """
    args, kwargs = inputs
    if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
        raise refusals.packed_sequence()
    for leaf in leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
            return leaf.shape[dim]
    raise refusals.no_batch(dim)


def rebuild(like: Any, flat: Sequence[Any]) -> Any:
    """Containers like those of `like`, around other leaves."""
    values = iter(flat)
    return map_leaves(lambda _: next(values), like)


def named(inputs: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf in the order of `leaves`, with a name that it has in every batch: its place, and its dimensions."""
    args, kwargs = inputs
    for place, value in [*((str(index), each) for index, each in enumerate(args)), *kwargs.items()]:
        for path, leaf in _paths(place, value):
            yield f"{path} ({leaf.dim()}-D)" if isinstance(leaf, torch.Tensor) else path, leaf


def uneven(inputs: Any, *, dim: int) -> set[str]:
    """Names of the tensors that cannot be per sample: their length is not that of the batch."""
    size = batch_size(inputs, dim=dim)
    found = ((name, leaf, _axis(leaf, dim)) for name, leaf in named(inputs))
    # What has a length of 1 may be broadcast here, and per sample in the next batch.
    return {name for name, leaf, axis in found if axis is not None and leaf.shape[axis] not in {1, size}}


def cut(inputs: Any, *, dim: int) -> dict[str, int]:
    """By name of each tensor that is cut, the dimension along which it is."""
    size = batch_size(inputs, dim=dim)
    axes = zip(named(inputs), _axes(inputs, size, dim=dim, whole=()), strict=True)
    return {name: axis for (name, _), axis in axes if axis is not None}


def take(inputs: Any, samples: int, *, dim: int, whole: Collection[str] = ()) -> Any:
    """The first samples of a batch; `whole` as of Batch."""
    size = batch_size(inputs, dim=dim)
    axes = zip(leaves(inputs), _axes(inputs, size, dim=dim, whole=whole), strict=True)
    return rebuild(inputs, [leaf if axis is None else leaf.narrow(axis, 0, min(samples, size)) for leaf, axis in axes])


class Batch:
    """Inputs, cut.

    Args:
        inputs: arguments and keyword arguments.
        microbatches: at most so many.
        dim: the batch dimension of the inputs.
        whole: names of tensors that are not per sample, though they may be as long as this batch.

    Attributes:
        sizes: samples of each micro-batch.
        parts: the inputs of each micro-batch, as flat lists; tensors that want a gradient are leaves of their own.
    """

    def __init__(self, inputs: Any, *, microbatches: int, dim: int, whole: Collection[str] = ()) -> None:
        self._inputs = inputs
        flat = list(leaves(inputs))
        size = batch_size(inputs, dim=dim)
        count = max(1, min(microbatches, size))
        self.sizes = tuple(size // count + (index < size % count) for index in range(count))
        self._axes = _axes(inputs, size, dim=dim, whole=whole)
        pieces = [self._pieces(leaf, axis) for leaf, axis in zip(flat, self._axes, strict=True)]
        self.parts = [list(part) for part in zip(*pieces, strict=True)]
        self.wanting = [(i, leaf) for i, leaf in enumerate(flat) if _wants_gradient(leaf)]

    def inputs(self, index: int) -> Any:
        """The arguments and keyword arguments of one micro-batch."""
        return rebuild(self._inputs, self.parts[index])

    def gradient(self, position: int, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The gradient of an input, from those of its pieces; None if no micro-batch has one."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        axis = self._axes[position]
        if axis is None:
            return torch.stack(found).sum(0) if len(found) > 1 else found[0]
        pieces = [torch.zeros_like(self.parts[i][position]) if p is None else p for i, p in enumerate(parts)]
        return torch.cat(pieces, axis)

    def _pieces(self, leaf: Any, axis: int | None) -> Sequence[Any]:
        if not isinstance(leaf, torch.Tensor) or (axis is None and not leaf.requires_grad):
            return [leaf] * len(self.sizes)
        plain = leaf.detach()
        pieces = (
            [plain.view_as(plain) for _ in self.sizes] if axis is None else torch.split(plain, list(self.sizes), axis)
        )
        return [piece.detach().requires_grad_(leaf.requires_grad) for piece in pieces]


def _axis(leaf: Any, dim: int) -> int | None:
    """The dimension that is the batch's, if the value is per sample; one number per sample has no other."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return None
    if leaf.dim() == 1:
        return 0
    return dim if leaf.dim() > dim else None


def _axes(inputs: Any, size: int, *, dim: int, whole: Collection[str]) -> list[int | None]:
    """Of every leaf, the dimension along which it is cut, None if it is not."""
    found = ((name, leaf, _axis(leaf, dim)) for name, leaf in named(inputs))
    return [
        axis if axis is not None and leaf.shape[axis] == size and name not in whole else None
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


def _wants_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


@dataclass(frozen=True)
class Column:
    """One output, over all micro-batches.

    Args:
        value: of the whole batch.
        dim: along which it was joined; None: not at all.
        weights: of each micro-batch in a mean; None: it is none.
    """

    value: Any
    dim: int | None = None
    weights: tuple[float, ...] | None = None

    def without_value(self) -> Column:
        """The same, without the value, for whoever must not keep it."""
        return Column(None, dim=self.dim, weights=self.weights)

    def gradients(self, gradient: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
        """What a gradient of the whole is for each micro-batch."""
        if self.weights is not None:
            return [gradient * weight for weight in self.weights]
        if self.dim is not None:
            return torch.split(gradient, list(sizes), self.dim)
        return [gradient, *[None] * (len(sizes) - 1)]


def shapes(output: Any) -> tuple[tuple[int, ...] | None, ...]:
    """Of every leaf of an output, None where it is no tensor."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves(output))


def batch_dims(few: Sequence[tuple[int, ...] | None], many: Sequence[tuple[int, ...] | None]) -> dict[int, int | None]:
    """The dimension of each output that differs between two sizes of batch."""
    if few is many or len(few) != len(many):
        return {}
    found: dict[int, int | None] = {}
    for position, (one, other) in enumerate(zip(few, many, strict=True)):
        if one is not None and other is not None and len(one) == len(other):
            differing = [dim for dim, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
            if len(differing) <= 1:
                found[position] = differing[0] if differing else None
    return found


def form(shapes_: Sequence[tuple[int, ...] | None]) -> tuple[int | None, ...]:
    """How many dimensions each leaf of an output has, None where it is no tensor."""
    return tuple(None if each is None else len(each) for each in shapes_)


def columns(
    rows: Sequence[Sequence[Any]],
    sizes: Sequence[int],
    *,
    device: torch.device,
    dims: Mapping[int, int | None],
    known: tuple[int | None, ...] | None = None,
) -> list[Column]:
    """The outputs of micro-batches as those of the batch.

    Args:
        rows: of each micro-batch, its outputs as a flat list.
        sizes: samples of each.
        device: where joined tensors are.
        dims: position of an output -> its batch dimension as far as it is known; None: it has none.
        known: the form of the outputs for which that is known; None: any.

    Raises:
        ConfigError: an output that differs between micro-batches and has no batch dimension.
    """
    if len({len(row) for row in rows}) > 1:
        raise refusals.uneven_outputs([len(row) for row in rows])
    if known is not None and known != form(shapes(rows[0])):
        dims = {}  # in evaluation, or without labels, a model may return something else
    return [
        _column(values, tuple(sizes), position=position, device=device, dims=dims)
        for position, values in enumerate(zip(*rows, strict=True))
    ]


def _column(
    values: tuple[Any, ...],
    sizes: tuple[int, ...],
    *,
    position: int,
    device: torch.device,
    dims: Mapping[int, int | None],
) -> Column:
    first = values[0]
    if len(values) == 1 or all(value is first for value in values):
        is_ours = isinstance(first, torch.Tensor) and not (first.requires_grad and first.is_leaf)
        # A copy: the user may change it in place, and backward needs the original.
        return Column(first.detach().to(device, copy=True) if is_ours else first)
    if not isinstance(first, torch.Tensor):
        if any(value != first for value in values):
            if hasattr(first, "__dict__"):
                raise refusals.not_a_tensor(position, type(first).__name__)
            raise refusals.unjoinable(position, f"values {first!r} and others")
        return Column(first)
    if first.dim() == 0 and first.is_floating_point():
        weights = tuple(size / sum(sizes) for size in sizes)
        return Column(sum(v.detach().to(device) * w for v, w in zip(values, weights, strict=True)), weights=weights)
    dim = _batch_dim(values, sizes, known=dims.get(position, -1))
    if dim is not None:
        shapes_ = [tuple(value.shape) for value in values]
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes_}) > 1:
            raise refusals.uneven_shapes(position, shapes_)
        return Column(torch.cat([value.detach().to(device) for value in values], dim), dim=dim)
    if first.requires_grad or any(not torch.equal(value, first) for value in values):
        raise refusals.unjoinable(position, f"tensors of {tuple(first.shape)} for {sizes[0]} samples")
    return Column(first.detach().to(device))


def _batch_dim(values: tuple[torch.Tensor, ...], sizes: tuple[int, ...], *, known: int | None) -> int | None:
    """The dimension that follows the micro-batch's size: the known one, else the first.

    Args:
        values: of each micro-batch.
        sizes: samples of each.
        known: the dimension; None: there is none; -1: not known.
    """
    shapes_ = [value.shape for value in values]
    fitting = [dim for dim in range(values[0].dim()) if all(s[dim] == n for s, n in zip(shapes_, sizes, strict=True))]
    if known == -1:
        return fitting[0] if fitting else None
    return known if known in fitting else None
