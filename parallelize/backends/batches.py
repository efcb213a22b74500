"""The inputs of a model divided into parts, and the outputs of the parts joined.

Three backends run a model on parts of a batch: "balanced" on micro-batches, one after another
through a pipeline; ddp with `logical=` on as many parts as it says; "dp" on the share of each
device, whose outputs dp_engine.py joins. They differ in what they do with a value without parts:

    inputs      divided                         other tensors and values
    balanced    along `batch_dim`               go to each part
    logical=    along the first dimension       go to each part
    dp          by torch's `scatter`            go to each part

    outputs     0-dim losses          0-dim others       rows of samples     other values
    balanced    by counts of targets  equal in all       concatenated        equal in all
    logical=    means, in a tree      equal in all       concatenated        equal in all
    dp          by counts of targets  stacked            concatenated        of the first part

If a value is not equal in all parts, logical= raises an error, and balanced runs the batch whole.

Glossary:

    sample     what a batch has several of; a part of a batch has some of them
    leaf       a value in the containers of inputs or outputs
    dim        of a leaf: the dimension in which it is divided or joined; None: it has no parts
    column     the leaves at one position of the outputs of all parts
    whole      a batch runs whole if it is not divided
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from parallelize.errors import ConfigError, Fault
from parallelize.gradients.target_counts import (
    LossCount,
    Number,
    attach_count,
    join_weights,
    number_on,
)
from parallelize.plugins.base import Arguments
from parallelize.run.containers import leaves, map_leaves, with_leaves

Dims = Sequence[int | None]
"""For each leaf: the dimension in which it is divided or joined; None: it has no parts."""

_UNCHANGED_TYPES = (
    *(Enum, type, nn.Module),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)
"""Types of objects that have attributes, and that no forward changes."""

_ROUNDING = 1e-3
"""Largest difference of outputs that is rounding, relative to the largest value."""

_ROUNDING_OF_HALF = 5e-2
"""As `_ROUNDING`, for outputs that were computed in half precision."""

_LEAST_VALUE = 1e-6
"""Outputs of smaller values are compared as if their largest value were this."""


@dataclass(frozen=True)
class WholeReason(Fault):
    """Why a batch runs whole: its micro-batches would not compute what the batch does."""

    def __str__(self) -> str:
        never = "use BalancedBackend(microbatches=1), which splits no batch, or backend='ddp'"
        return str(Fault(self.what, self.why, f"{self.fix}; or {never}"))


@dataclass(frozen=True, eq=False)
class Batch:
    """The inputs of a model, and how they are divided.

    Args:
        inputs: the arguments of the model.
        dims: the dimension in which each leaf is divided.
        size: number of samples.
    """

    inputs: Arguments
    dims: Dims
    size: int

    @classmethod
    def whole(cls, inputs: Arguments) -> Batch:
        """Return a batch that is not divided, as if all of it were one sample."""
        return cls(inputs, dims=[None] * len(leaves(inputs)), size=1)

    @classmethod
    def of_rows(cls, inputs: Arguments, size: int) -> Batch:
        """Return a batch in which each tensor of `size` rows has one row for each sample."""
        dims: list[int | None] = []
        for leaf in leaves(inputs):
            has_rows = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == size
            dims.append(0 if has_rows else None)
        return cls(inputs, dims, size)

    @classmethod
    def of(cls, inputs: Arguments, dim: int) -> Batch | WholeReason:
        """Return a batch of micro-batches, or why it has none.

        A 1-D tensor has one number for each sample, such as its length: it is divided along its
        only dimension. Other tensors are divided along `dim`. A tensor that is not as long as the
        batch goes to each micro-batch.

        Args:
            inputs: the arguments of the model.
            dim: the batch dimension. The first tensor that has it tells the number of samples.
        """
        batch_dims = []
        size = None
        for leaf in leaves(inputs):
            if _has_no_slices(leaf):
                return WholeReason(
                    f"an argument of the model is a {type(leaf).__name__} that is no dense tensor",
                    why="it has no slices of samples, and micro-batches would see what others have "
                    "left in it",
                    fix="pass dense tensors, alone or in containers, and pack or convert them in "
                    "forward",
                )
            batch_dim = _batch_dim(leaf, dim)
            batch_dims.append(batch_dim)
            if size is None and batch_dim == dim:
                size = leaf.shape[dim]
        if size is None:
            return WholeReason(
                f"no argument of the model has a dimension {dim}",
                why="batches are split along their batch dimension",
                fix="pass tensors, alone or in containers; set their batch dimension: "
                "BalancedBackend(batch_dim=1)",
            )
        dims: list[int | None] = []
        for leaf, batch_dim in zip(leaves(inputs), batch_dims, strict=True):
            is_divided = batch_dim is not None and leaf.shape[batch_dim] == size
            dims.append(batch_dim if is_divided else None)
        return cls(inputs, dims, size)

    def signature(self) -> tuple[Any, ...]:
        """Return what is equal for batches that are called and divided alike.

        It has the names and types of the arguments, which tensors are divided, and the values that
        may name what forward computes: Booleans, members of enums, and texts. Texts in containers
        have no part in it, since they may be those of samples, such as captions.
        """
        args, kwargs = self.inputs
        texts = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, str)]
        signature: list[Any] = [len(args), *kwargs, *texts]
        for leaf, dim in zip(leaves(self.inputs), self.dims, strict=True):
            if isinstance(leaf, (bool, Enum)):
                signature.append(leaf)
            else:
                signature.append(type(leaf))
            signature.append(dim)
        return tuple(signature)

    def part(self, start: int, samples: int) -> Arguments:
        """Return the inputs of some samples, in the memory of the batch.

        Args:
            start: the first of these samples.
            samples: their number.
        """
        leaves_of_part = []
        for leaf, dim in zip(leaves(self.inputs), self.dims, strict=True):
            if dim is None:
                leaves_of_part.append(leaf)
            else:
                # A slice, unlike an output of torch.split, may be changed in place.
                leaves_of_part.append(leaf.narrow(dim, start, samples))
        part: Arguments = with_leaves(self.inputs, leaves_of_part)
        return part

    def parts(self, sizes: Sequence[int]) -> list[Arguments]:
        """Return the inputs of consecutive parts. A single part is the batch itself.

        Args:
            sizes: number of samples of each part; they add up to all samples.
        """
        if len(sizes) == 1:
            return [self.inputs]
        parts = []
        start = 0
        for size in sizes:
            parts.append(self.part(start, size))
            start += size
        return parts

    def in_own_memory(self, part: Arguments) -> Arguments:
        """Return a copy of a part, whose tensors begin where an allocation does.

        Libraries choose their kernels by the alignment of addresses, too, such as cuBLAS up to 256
        bytes. With a copy, a part has the kernels of a process whose batch is this part alone.

        Args:
            part: as `parts` returns it.
        """
        copies = []
        for leaf, dim in zip(leaves(part), self.dims, strict=True):
            copies.append(leaf if dim is None else leaf.clone())
        copied: Arguments = with_leaves(part, copies)
        return copied

    def trial(self, samples: int) -> Batch:
        """Return copies of the first samples, so that a trial changes no object of the user's.

        The copies of tensors are leaves: backward ends at them.

        Args:
            samples: their number.
        """
        return replace(self, inputs=map_leaves(_copied, self.part(0, samples)), size=samples)

    def sizes(self, microbatches: int) -> list[int]:
        """Return the number of samples of each micro-batch; they differ by one sample at most.

        There are at most as many micro-batches as samples.
        """
        size, larger = divmod(self.size, microbatches)
        return [size + 1] * larger + [size] * (microbatches - larger)


def _has_no_slices(leaf: Any) -> bool:
    """Whether an argument can neither be divided nor go to each part, because it has a state.

    So are sparse and nested tensors, caches that a forward fills, sets, and PackedSequence, which
    is a tuple and no container.
    """
    if _is_dense(leaf) or isinstance(leaf, _UNCHANGED_TYPES):
        return False
    return isinstance(leaf, (torch.Tensor, tuple, set)) or hasattr(leaf, "__dict__")


def _is_dense(leaf: Any) -> bool:
    """Whether a leaf is a tensor that `narrow` can divide."""
    if not isinstance(leaf, torch.Tensor):
        return False
    return leaf.layout is torch.strided and not leaf.is_nested


def _batch_dim(leaf: Any, dim: int) -> int | None:
    """Return `dim`, or 0 for a 1-D tensor; None: the leaf has no such dimension."""
    if not _is_dense(leaf) or leaf.dim() == 0:
        return None
    if leaf.dim() == 1:
        return 0
    return dim if leaf.dim() > dim else None


def _copied(leaf: Any) -> Any:
    """Return a copy of an argument, or the argument itself: it is not changed, or has no copy."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    if isinstance(leaf, _UNCHANGED_TYPES):
        return leaf
    # It may be a cache that forward fills. Some objects have no copy, such as a lock, or a packed
    # sequence that another model has computed: forward gets the object itself.
    with contextlib.suppress(TypeError, RuntimeError):
        return copy.deepcopy(leaf)
    return leaf


# Outputs of balanced.


def joined_dims(whole: Any, part: Any) -> Dims:
    """Return in which dimension each output is joined: the first that is longer for more samples.

    Args:
        whole: the output for some samples.
        part: the output for a part of these samples.
    """
    dims: list[int | None] = []
    for leaf, leaf_of_part in zip(leaves(whole), leaves(part), strict=False):
        dims.append(_first_unequal_dim(leaf, leaf_of_part))
    return dims


def _first_unequal_dim(leaf: Any, leaf_of_part: Any) -> int | None:
    """Return the first dimension in which two tensors have other lengths; None: there is none."""
    if not _is_dense(leaf) or not _is_dense(leaf_of_part):
        return None
    lengths = zip(leaf.shape, leaf_of_part.shape, strict=False)
    for dim, (length, length_of_part) in enumerate(lengths):
        if length != length_of_part:
            return dim
    return None


def joined_outputs(
    outputs: Sequence[Any], dims: Dims, *, batch: Batch, device: torch.device
) -> Any | WholeReason:
    """Return the output of a batch, or why the outputs of its micro-batches cannot be joined.

    Args:
        outputs: of each micro-batch.
        dims: as `joined_dims` returns them.
        batch: the batch of these micro-batches.
        device: device of the result.
    """
    numbers_of_leaves = [len(leaves(output)) for output in outputs]
    unequal = _unequal_numbers([len(dims), *numbers_of_leaves])
    if unequal is not None:
        return unequal
    joined = []
    columns = zip(dims, columns_of(outputs), strict=True)
    for position, (dim, column) in enumerate(columns):
        leaf = _joined_leaf(position, dim, column, batch, device)
        if isinstance(leaf, WholeReason):
            return leaf
        joined.append(leaf)
    return with_leaves(outputs[0], joined)


def _joined_leaf(
    position: int,
    dim: int | None,
    column: Sequence[Any],
    batch: Batch,
    device: torch.device,
) -> Any | WholeReason:
    """Return an output of the batch, or why it cannot be joined from those of micro-batches.

    Args:
        position: of the output among all outputs.
        dim: the dimension in which it is joined.
        column: the output of each micro-batch.
        batch: the batch of these micro-batches.
        device: device of the result.
    """
    first = column[0]
    if all(leaf is first for leaf in column):
        return first
    if isinstance(first, torch.Tensor) and not _is_dense(first):
        return _unjoined(position, first, "it is sparse or nested")
    if _is_loss(first):
        sizes = batch.sizes(len(column))
        weights, count = join_weights(column, samples=sizes, inputs=batch.inputs)
        if count.reduction == "unknown" and not _are_equal(column):
            why = "the number of targets that it averages over is not known"
            return _unjoined(position, first, why)
        return summed_loss(column, weights, count, device)
    if dim is not None:
        if _can_be_concatenated(column, dim):
            # Micro-batches end on one device: they are joined there, and sent as one tensor.
            return torch.cat([leaf.to(first.device) for leaf in column], dim).to(device)
    elif isinstance(first, torch.Tensor):
        # A tensor with dimensions was equal to the output of the batch when the first batch of this
        # kind was compared.
        if first.dim() or _are_equal(column):
            return first.to(device)
    elif _are_equal(column):
        return first
    return _unjoined(position, first, "micro-batches return others")


def _can_be_concatenated(column: Sequence[Any], dim: int) -> bool:
    """Whether all outputs are tensors of equal shapes beside a dimension."""
    shapes = set()
    for leaf in column:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() <= dim:
            return False
        shapes.add((*leaf.shape[:dim], *leaf.shape[dim + 1 :]))
    return len(shapes) == 1


def difference(whole: Any, joined: Any, dims: Dims) -> float | WholeReason:
    """Return the largest difference of joined outputs, relative to the largest value.

    It is 0 if it is rounding. An output that has no parts and differs, or that is not as long as
    the output of the batch, is a reason to run the batch whole.

    Args:
        whole: the output of the batch.
        joined: as `joined_outputs` returns it.
        dims: as `joined_dims` returns them.
    """
    unequal = _unequal_numbers([len(leaves(whole)), len(dims)])
    if unequal is not None:
        return unequal
    largest = 0.0
    pairs = zip(leaves(whole), leaves(joined), dims, strict=True)
    for position, (leaf, joined_leaf, dim) in enumerate(pairs):
        if dim is not None or _is_loss(leaf):
            is_alike = getattr(joined_leaf, "shape", None) == leaf.shape
        else:
            is_alike = _is_equal(leaf, joined_leaf)
        if not is_alike:
            why = "micro-batches return others, and no dimension is as long as the batch"
            return _unjoined(position, leaf, why)
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            largest = max(largest, _relative_difference(leaf, joined_leaf))
    return largest


def _relative_difference(whole: torch.Tensor, joined: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value; 0: it is rounding.

    Args:
        whole: an output of the batch.
        joined: the same output, joined from those of micro-batches.
    """
    exact = _real_doubles(whole)
    compared = _real_doubles(joined)
    largest_value = exact.abs().max().clamp_min(_LEAST_VALUE)
    relative = ((exact - compared).abs().max() / largest_value).item()
    return relative if relative > _rounding(whole) else 0.0


def _real_doubles(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor as real numbers of double precision, on the CPU."""
    values = tensor.detach().cpu()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.double().nan_to_num()


def _rounding(output: torch.Tensor) -> float:
    """Return the largest difference that is rounding; integers and Booleans are not rounded."""
    if not output.is_floating_point() and not output.is_complex():
        return 0.0
    if torch.is_autocast_enabled(output.device.type) or output.element_size() < 4:
        return _ROUNDING_OF_HALF
    return _ROUNDING


def _unequal_numbers(numbers_of_leaves: Sequence[int]) -> WholeReason | None:
    """Return why outputs of these numbers of values cannot be joined; None: they can."""
    if len(set(numbers_of_leaves)) == 1:
        return None
    listed = " or ".join(map(str, sorted(set(numbers_of_leaves))))
    return WholeReason(
        f"the output of the model, of {listed} values, cannot be joined",
        why="micro-batches return others, and outputs are joined value by value",
        fix="return tensors per sample, which have the batch dimension, and no lists of samples",
    )


def _unjoined(position: int, leaf: Any, why: str) -> WholeReason:
    """Return the reason to run a batch whole by one of its outputs.

    Args:
        position: of the output among all outputs.
        leaf: the output of the first micro-batch.
        why: why it cannot be joined.
    """
    return WholeReason(
        f"output {position} of the model, {_described(leaf)}, cannot be joined",
        why=why,
        fix="return tensors per sample, padded to one length, and losses that are means or sums of "
        "torch's; train a Hugging Face language model with model.config.use_cache = False",
    )


# Outputs of logical=.


def joined_parts(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the output of a process's batch under `logical=`.

    Args:
        outputs: of each part.
        sizes: number of samples of each part.

    Raises:
        ConfigError: an output differs between the parts, and has no row for each sample.
    """
    joined = []
    for column in columns_of(outputs):
        first = column[0]
        if _have_rows(column, sizes):
            joined.append(torch.cat(column))
        elif isinstance(first, torch.Tensor) and first.dim() == 0 and first.is_floating_point():
            joined.append(_mean_in_tree(column, sizes))
        elif _are_equal(column):
            joined.append(first)
        else:
            raise ConfigError(
                f"an output of forward under logical=: {_described(first)}",
                why="it differs between the parts of a batch, and has no batch dimension in which "
                "they could be joined",
                fix="return tensors with the batch dimension first, or losses that are means over "
                "samples",
            )
    return with_leaves(outputs[0], joined)


def _have_rows(column: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether an output of each part is a tensor with one row for each sample."""
    for leaf, size in zip(column, sizes, strict=True):
        if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (size,):
            return False
    return True


def _mean_in_tree(losses: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return the mean over all samples of losses that are means over the samples of each part.

    The losses are added by pairs, and then the sums by pairs, as the reducer adds gradients over
    the processes. So the sum has the same bits at any number of processes.
    """
    sums = []
    for loss, size in zip(losses, sizes, strict=True):
        # Equal parts have the factor 1, which does not round.
        sums.append(loss * (size * len(sizes) / sum(sizes)))
    while len(sums) > 1:
        sums = [_sum_of_pair(sums[index : index + 2]) for index in range(0, len(sums), 2)]
    return sums[0] / len(sizes)


def _sum_of_pair(pair: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of two tensors, or a tensor that is alone."""
    return pair[0] if len(pair) == 1 else pair[0] + pair[1]


# What the backends share.


def columns_of(outputs: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Return the leaves at each position of the outputs of all parts.

    Args:
        outputs: of each part, with equally many leaves.
    """
    leaves_of_parts = [leaves(output) for output in outputs]
    return zip(*leaves_of_parts, strict=True)


def summed_loss(
    losses: Sequence[torch.Tensor],
    weights: Sequence[Number],
    count: LossCount,
    device: torch.device,
) -> torch.Tensor:
    """Return the loss of a batch, which knows its number of targets.

    Args:
        losses: 0-dim, of each part.
        weights: as `join_weights` returns them.
        count: as `join_weights` returns it.
        device: device of the result.
    """
    # A loss times its samples may overflow fp16, and bf16 has integers up to 256 only.
    wide_dtype = torch.promote_types(losses[0].dtype, torch.float32)
    total = torch.zeros((), dtype=wide_dtype, device=device)
    has_targets = any(map(_may_have_targets, weights))
    for loss, weight in zip(losses, weights, strict=True):
        # A mean over no targets is nan, and so is nan * 0.
        if _may_have_targets(weight) or not has_targets:
            total = total + loss.to(device, wide_dtype) * number_on(device, weight, wide_dtype)
    joined = total.to(losses[0].dtype)
    if joined.requires_grad:
        attach_count(joined, count)
    return joined


def _may_have_targets(weight: Number) -> bool:
    """Whether the weight of a loss is not 0; the host does not wait to read an accelerator."""
    return isinstance(weight, torch.Tensor) or weight != 0.0


def _is_loss(leaf: Any) -> bool:
    """Whether an output is a 0-dim tensor that forward has computed, and no parameter."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() or not leaf.is_floating_point():
        return False
    is_parameter = leaf.requires_grad and leaf.is_leaf
    return not is_parameter


def _described(leaf: Any) -> str:
    """Return the words for an output in a message."""
    if _is_dense(leaf):
        return f"a tensor of {tuple(leaf.shape)}"
    return f"a {type(leaf).__name__}"


def _are_equal(column: Sequence[Any]) -> bool:
    """Whether an output is the same object, or equal, in all parts."""
    first = column[0]
    return all(leaf is first or _is_equal(first, leaf) for leaf in column[1:])


def _is_equal(leaf: Any, other_leaf: Any) -> bool:
    """Whether two outputs are equal; objects of classes with attributes do not tell."""
    if isinstance(leaf, torch.Tensor) and isinstance(other_leaf, torch.Tensor):
        return leaf.shape == other_leaf.shape and torch.equal(leaf.cpu(), other_leaf.cpu())
    if type(leaf) is not type(other_leaf) or hasattr(leaf, "__dict__"):
        return False
    return bool(leaf == other_leaf)
