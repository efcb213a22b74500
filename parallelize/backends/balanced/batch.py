"""Batch: the inputs of a model, which can be split into micro-batches.

A tensor anywhere in the arguments is split along `batch_dim` (a 1-D tensor along its only dimension) if that dimension
is as long as the batch, in this and in every earlier batch. All other values are passed to every micro-batch.

Objects such as caches, neither tensors nor plain values, cannot be split, and micro-batches that shared one would see
what others have left in it: batches with such an opaque object are not split.
"""

from __future__ import annotations

import copy
import dataclasses
import types
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from parallelize.backends.balanced.refusals import CannotSplitError
from parallelize.errors import ConfigError
from parallelize.runtime.containers import map_leaves

__all__ = ["Batch", "Split", "Switches", "copy_inputs", "named_leaves", "opaque_inputs", "rebuild"]

_PLAIN_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, type),
    *(torch.Tensor, torch.dtype, torch.device, torch.Generator, torch.Size, nn.Module),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)


_MAX_NUMBERS, _MAX_TEXTS = 4, 8  # of each argument


@dataclass(frozen=True)
class Split:
    """A batch in micro-batches."""

    inputs: list[Any]  # (args, kwargs) of each
    sizes: tuple[int, ...]  # samples of each
    bounds: list[torch.Tensor]  # views in place of inputs that require grad; a backward of the micro-batches ends there


class Batch:
    """The inputs of a model, (args, kwargs).

    Args:
        dim: batch dimension; None: nothing is split, as if all of it were one sample.
        whole_inputs: names of tensors that are not split, even if they are as long as this batch.

    Attributes:
        size: number of samples: the length of the batch dimension in the first tensor that has one.
        not_per_sample: names of tensors of another length, and those in `whole_inputs`.
        split_dims: the dimension along which each split input is split, by the input's name.

    Raises:
        CannotSplitError: no tensor has the batch dimension, or an argument is packed or nested.
    """

    def __init__(self, inputs: Any, *, dim: int | None, whole_inputs: Collection[str] = ()) -> None:
        self.inputs, named = inputs, list(named_leaves(inputs))
        self.size = 1 if dim is None else _size([leaf for _, leaf in named], dim)
        self.not_per_sample, self.split_dims = {*whole_inputs}, dict[str, int]()
        self._leaves: list[tuple[Any, int | None]] = []
        for name, leaf in named:
            axis = None if dim is None else _axis(leaf, dim)
            length = self.size if axis is None else leaf.shape[axis]
            if length not in {1, self.size}:  # of length 1, it may be broadcast in this batch, and per sample in others
                self.not_per_sample.add(name)
            if axis is None or length != self.size or name in whole_inputs:
                self._leaves.append((leaf, None))
            else:
                self._leaves.append((leaf, axis))
                self.split_dims[name] = axis

    def first(self, samples: int) -> Any:
        """Return the inputs for the first samples."""
        return rebuild(self.inputs, [_part(leaf, axis, 0, min(samples, self.size)) for leaf, axis in self._leaves])

    def split(self, microbatches: int, *, is_bounded: bool = False) -> Split:
        """Split the batch; `is_bounded`: replace inputs that require grad by views."""
        count = max(1, min(microbatches, self.size))
        sizes = tuple(self.size // count + (index < self.size % count) for index in range(count))
        found = [
            (leaf.view_as(leaf) if is_bounded and isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf, axis)
            for leaf, axis in self._leaves
        ]
        parts = [
            [_part(leaf, axis if count > 1 else None, sum(sizes[:index]), size) for leaf, axis in found]
            for index, size in enumerate(sizes)
        ]
        bounds = [new for (new, _), (leaf, _) in zip(found, self._leaves, strict=True) if new is not leaf]
        return Split([rebuild(self.inputs, part) for part in parts], sizes, bounds)


class Switches:
    """Values of arguments that may switch the path of a forward: Booleans, and the first values of a number or text.

    A number such as a step counter has ever new values: those after the first ones are taken for one value. So are
    texts, with a warning, since one that switches the path may be among them.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bool], set[Any]] = {}

    def key(self, inputs: Any) -> Any:
        """Return the names of the inputs, Booleans, and the values of arguments that are text or numbers."""
        args, kwargs = inputs
        given = {**{str(index): each for index, each in enumerate(args)}, **kwargs}  # not those of a list, per sample
        names = ((name, leaf if isinstance(leaf, bool) else None) for name, leaf in named_leaves(inputs))
        return (*names, *((name, self._value(name, each)) for name, each in given.items()))

    def _value(self, name: str, value: Any) -> Any:
        is_text = isinstance(value, str)
        if not is_text and type(value) not in {int, float}:
            return None
        seen = self._seen.setdefault((name, is_text), set())
        if len(seen) < (_MAX_TEXTS if is_text else _MAX_NUMBERS):
            seen.add(value)
        elif is_text and value not in seen and None not in seen:
            seen.add(None)  # the warning is given once
            warnings.warn(
                f"argument {name} of the model has had {_MAX_TEXTS} different texts: under backend='balanced' others "
                "are validated once, and taken for one value from then on. If a text switches what forward does, pass "
                "those that do in the first batches, or use a Boolean.",
                stacklevel=2,
            )
        return value if value in seen else None


def opaque_inputs(inputs: Any) -> dict[str, Any]:
    """Return the opaque inputs by name: sets, deques, and objects with attributes that are not plain values."""
    return {name: leaf for name, leaf in named_leaves(inputs) if _is_opaque(leaf)}


def copy_inputs(inputs: Any) -> Any:
    """Return copies of the inputs, without their graphs, so that planning does not modify the user's objects.

    Raises:
        ConfigError: an object cannot be copied, for example because it holds a tensor with an autograd graph.
    """
    return rebuild(inputs, [_copied(name, leaf) for name, leaf in named_leaves(inputs)])


def rebuild(like: Any, flat: Collection[Any]) -> Any:
    """Return the nested containers of `like`, with the values of `flat` as leaves."""
    values = iter(flat)
    return map_leaves(lambda _: next(values), like)


def named_leaves(inputs: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) in the order of `leaves`; a name, such as `0.mask (2-D)`, is the same in every batch."""
    for key, value in [*enumerate(inputs[0]), *inputs[1].items()]:
        yield from _named(str(key), value)


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield f"{name} ({value.dim()}-D)", value
        return
    inner: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "to")):
        inner = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    else:
        yield name, value
        return
    for key, each in inner:
        yield from _named(f"{name}.{key}", each)


def _size(flat: list[Any], dim: int) -> int:
    for leaf in flat:
        if isinstance(leaf, PackedSequence) or (isinstance(leaf, torch.Tensor) and leaf.is_nested):
            raise CannotSplitError(
                f"an input of the model is a {'nested tensor' if isinstance(leaf, torch.Tensor) else 'PackedSequence'}",
                why="it has no slices of samples",
                fix="pass the padded tensor with its lengths, and pack or nest it in forward",
            )
    for leaf in flat:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
            return leaf.shape[dim]
    raise CannotSplitError(
        f"no argument of the model has a dimension {dim}",
        why="batches are split along their batch dimension",
        fix="pass tensors, alone or in containers; set their batch dimension: BalancedBackend(batch_dim=1)",
    )


def _axis(leaf: Any, dim: int) -> int | None:
    """Return the batch dimension of a leaf: `dim`, or 0 for a 1-D tensor; None if the leaf has no such dimension."""
    dims = leaf.dim() if isinstance(leaf, torch.Tensor) else 0
    return (0 if dims else None) if dims < 2 else dim if dims > dim else None


def _part(leaf: Any, axis: int | None, start: int, length: int) -> Any:
    # Slices, unlike the outputs of torch.split, may be changed in place.
    return leaf if axis is None else leaf.narrow(axis, start, length)


def _copied(name: str, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    try:
        return copy.deepcopy(leaf) if _is_opaque(leaf) else leaf
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"argument {name} of the model, a {type(leaf).__name__}, cannot be copied",
            why="the first batch runs several times while the pipeline is planned, which could change the object",
            fix="pass a plan made from other batches, plan=; or run another batch first",
        ) from error


def _is_opaque(leaf: Any) -> bool:
    return not isinstance(leaf, _PLAIN_TYPES) and (isinstance(leaf, (set, deque)) or hasattr(leaf, "__dict__"))
