"""Batch: the inputs of a model, split into micro-batches, and the outputs of micro-batches, joined again.

inputs    a tensor anywhere in the arguments is split along `batch_dim` (a 1-D tensor along its only dimension), if this
          is as long as the batch; other values go to every micro-batch
outputs   tensors that have the batch dimension are concatenated; 0-dim losses that forward computes are averaged by the
          numbers of their targets, or added if they are sums; a value that is equal in all micro-batches is taken once

All else, such as caches and sparse tensors, has no parts: such a batch runs whole.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import types
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from parallelize.errors import ConfigError
from parallelize.gradients.target_counts import attach_count, join_weights, number_on
from parallelize.run.containers import leaves, map_leaves, with_leaves
from parallelize.torch_patches.gradients_by_parts import Parts, gradients_by_parts

__all__ = ["Batch", "RunsWhole", "difference", "joined_dims", "joined_outputs", "seeing_joined_outputs"]

_PLAIN = (Enum, type, nn.Module, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
"""Types of objects with attributes that no forward changes."""
_PARTS = "parallelize: parts of a joined output"
_ROUNDING, _ROUNDING_OF_HALF = 1e-3, 5e-2  # of outputs, relative to the largest value

Dims = Sequence[int | None]
"""For each leaf of an output: the dimension in which it is joined; None: it is 0-dim, no tensor, or equal in all."""


class RunsWhole(ConfigError):  # noqa: N818  # a reason, not a failure
    """The reason why micro-batches do not compute what the batch does: it is not split."""

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        never = "use BalancedBackend(microbatches=1), which splits no batch, or backend='ddp'"
        super().__init__(what, why=why, fix=f"{fix}; or {never}")


class Batch:
    """The inputs of a model, (args, kwargs).

    Args:
        dim: batch dimension; None: nothing is split, as if all of it were one sample.

    Attributes:
        size: number of samples: the length of the batch dimension in the first tensor that has one.
        kind: what is equal for batches with the same arguments: their names and types, the values of Booleans, and
            which tensors are split.

    Raises:
        RunsWhole: no tensor has the batch dimension, or a value has no parts.
    """

    def __init__(self, inputs: Any, *, dim: int | None) -> None:
        self.inputs, flat = inputs, leaves(inputs)
        axes = [None if dim is None else _axis(leaf, dim) for leaf in flat]
        lengths = [leaf.shape[dim] for leaf, axis in zip(flat, axes, strict=True) if axis is not None and axis == dim]
        if dim is not None and not lengths:
            raise RunsWhole(
                f"no argument of the model has a dimension {dim}",
                why="batches are split along their batch dimension",
                fix="pass tensors, alone or in containers; set their batch dimension: BalancedBackend(batch_dim=1)",
            )
        self.size = lengths[0] if lengths else 1
        # A leaf, and the dimension in which it is split, or None.
        self._leaves = [
            (leaf, axis if axis is not None and leaf.shape[axis] == self.size else None)
            for leaf, axis in zip(flat, axes, strict=True)
        ]
        values = ((each if isinstance(each, bool) else type(each), axis) for each, axis in self._leaves)
        self.kind = len(inputs[0]), *inputs[1], *values

    def first(self, samples: int, start: int = 0) -> Any:
        """Return the inputs of some samples."""
        parts = [
            # A slice, unlike an output of torch.split, may be changed in place.
            leaf if axis is None else leaf.narrow(axis, start, samples)
            for leaf, axis in self._leaves
        ]
        return with_leaves(self.inputs, parts)

    def trial(self, samples: int) -> Batch:
        """Return copies of some samples, without their graphs, so that a trial changes no object of the user's."""

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return leaf.detach().clone().requires_grad_(leaf.requires_grad)
            return leaf if isinstance(leaf, _PLAIN) else copy.deepcopy(leaf)  # a cache that forward fills

        found = copy.copy(self)
        found.inputs, found.size = map_leaves(copied, self.first(samples)), samples
        axes = (axis for _, axis in self._leaves)
        found._leaves = [*zip(leaves(found.inputs), axes, strict=True)]
        return found

    def sizes(self, microbatches: int) -> list[int]:
        """Return the numbers of samples of as many micro-batches."""
        count = min(microbatches, self.size)
        return [self.size // count + (index < self.size % count) for index in range(count)]

    def split(self, microbatches: int) -> list[Any]:
        """Return the inputs of each micro-batch."""
        sizes = self.sizes(microbatches)
        if len(sizes) == 1:
            return [self.inputs]
        return [self.first(size, sum(sizes[:index])) for index, size in enumerate(sizes)]


def joined_dims(whole: Any, part: Any) -> Dims:
    """Return in which dimension each output is joined: where it is longer for some samples than for a part of them."""
    found: list[int | None] = []
    for one, other in zip(leaves(whole), leaves(part), strict=False):
        are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        lengths = zip(one.shape, other.shape, strict=False) if are_tensors else ()
        found.append(next((dim for dim, (long, short) in enumerate(lengths) if long != short), None))
    return found


def joined_outputs(outputs: Sequence[Any], dims: Dims, *, batch: Batch, device: torch.device) -> Any:
    """Return the output of the batch, on a device.

    Args:
        outputs: of each micro-batch.
        dims: of `joined_dims`.
        batch: whose micro-batches these are.
        device: of the result.

    Raises:
        RunsWhole: outputs of micro-batches cannot be joined.
    """

    def joined(position: int, dim: int | None, column: Sequence[Any]) -> Any:
        first, why = column[0], "micro-batches return others"
        if all(each is first for each in column):
            return first
        if _is_loss(first):
            weights, count = join_weights(column, samples=batch.sizes(len(outputs)), inputs=batch.inputs)
            if count.reduction != "unknown" or all(_is_equal(first, each) for each in column):
                return _sum(column, weights, count, device)
            why = "the number of targets that it averages over is not known"
        elif dim is None:
            # Tensors have been compared by a spot check.
            if getattr(first, "shape", ()) or all(_is_equal(first, each) for each in column):
                return first.to(device) if isinstance(first, torch.Tensor) else first
        elif None not in (shapes := {_shape_beside(each, dim) for each in column}) and len(shapes) == 1:
            return _concatenated(column, dim, device)
        raise _unjoined(position, first, why)

    columns = itertools.zip_longest(dims, *map(leaves, outputs))
    return with_leaves(outputs[0], [joined(position, dim, column) for position, (dim, *column) in enumerate(columns)])


def seeing_joined_outputs() -> contextlib.AbstractContextManager[None]:
    """Let torch.autograd.grad differentiate with respect to joined outputs, as StyleGAN does: images by latents.

    The images are computed from the latents of each micro-batch, not from the joined ones: gradients are joined, too.
    """

    def parts_of(tensor: Any) -> Parts | None:
        node = getattr(tensor, "grad_fn", None)
        parts: Parts | None = getattr(node, "metadata", {}).get(_PARTS)
        return parts

    return gradients_by_parts(parts_of)


def difference(whole: Any, joined: Any, dims: Dims) -> float:
    """Return the largest difference of joined outputs, relative to the largest value; 0 if it is rounding.

    Raises:
        RunsWhole: an output that is not joined differs, or one is not as long as that of the batch.
    """
    largest = 0.0
    columns = itertools.zip_longest(leaves(whole), leaves(joined), dims)
    for position, (one, other, dim) in enumerate(columns):
        has_parts = dim is not None or _is_loss(one)
        if not (getattr(other, "shape", None) == one.shape if has_parts else _is_equal(one, other)):
            raise _unjoined(position, one, "micro-batches return others, and no dimension is as long as the batch")
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel():
            wide, narrow = (each.detach().double().cpu().nan_to_num() for each in (one, other))
            relative = ((wide - narrow).abs().max() / wide.abs().max().clamp_min(1e-6)).item()
            is_half = torch.is_autocast_enabled(one.device.type) or one.element_size() < 4
            largest = max(largest, relative if relative > (_ROUNDING_OF_HALF if is_half else _ROUNDING) else 0.0)
    return largest


def _concatenated(column: Sequence[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    joined = torch.cat([each.to(device) for each in column], dim)
    node: Any = joined.grad_fn
    if node is not None and all(each.requires_grad for each in column):
        node.metadata[_PARTS] = Parts(dim, [get_gradient_edge(each) for each in column])
    return joined


def _sum(losses: Sequence[torch.Tensor], weights: Sequence[Any], count: Any, device: torch.device) -> torch.Tensor:
    pairs = list(zip(losses, weights, strict=True))
    # A mean over no targets is nan.
    pairs = [pair for pair in pairs if isinstance(pair[1], torch.Tensor) or pair[1] != 0.0] or pairs
    joined: Any = sum(loss.to(device) * number_on(device, weight, loss.dtype) for loss, weight in pairs)
    if joined.requires_grad:
        attach_count(joined, count)
    return joined  # type: ignore[no-any-return]  # of `sum`


def _unjoined(position: int, value: Any, why: str) -> RunsWhole:
    kind = f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    return RunsWhole(
        f"output {position} of the model, {kind}, cannot be joined",
        why=why,
        fix="return tensors per sample, padded to one length, and losses that are means or sums of torch's; train a "
        "Hugging Face language model with model.config.use_cache = False",
    )


def _axis(leaf: Any, dim: int) -> int | None:
    """Return the batch dimension of a leaf: `dim`, or 0 for a 1-D tensor; None if the leaf has no such dimension."""
    is_dense = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    has_state = isinstance(leaf, (torch.Tensor, tuple, set)) or hasattr(leaf, "__dict__")
    if has_state and not is_dense and not isinstance(leaf, _PLAIN):
        raise RunsWhole(
            f"an argument of the model is a {type(leaf).__name__} that is no dense tensor",
            why="it has no slices of samples, and micro-batches would see what others have left in it",
            fix="pass dense tensors, alone or in containers, and pack or convert them in forward",
        )
    dims = leaf.dim() if is_dense else 0
    return (0 if dims else None) if dims < 2 else dim if dims > dim else None


def _shape_beside(part: Any, dim: int) -> tuple[int, ...] | None:
    """Return the shape of a part without the dimension in which it is joined; None if it has no such dimension."""
    return (*part.shape[:dim], *part.shape[dim + 1 :]) if getattr(part, "ndim", 0) > dim else None


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and not hasattr(one, "__dict__") and bool(one == other)


def _is_loss(value: Any) -> bool:
    """Return whether an output is a scalar that forward has computed."""
    is_float = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
    return is_float and not (value.requires_grad and value.is_leaf)
