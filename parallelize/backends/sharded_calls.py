"""One call of a torch function with shards among its arguments: on the shards alone, or on gathered full tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parallelize.backends.function_kinds import EXPORTS, KINDS, Kind, is_in_place
from parallelize.backends.sharded_copies import FollowedTensor
from parallelize.backends.sharded_tensors import Gather, WithShardedGradient, full_tensor, shard

__all__ = ["PLAIN", "ShardedCall", "map_tensors"]

PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
"""Types of tensors that may follow a shard."""


# One rank alone often calls these, to save or to print.
_READS = frozenset({"__array__", "__reduce_ex__", "numpy", "tolist"})


class ShardedCall:
    """One call of a torch function with shards, or tensors that follow shards, among its arguments.

    Args:
        mode: the `FullTensorSemantics` that has intercepted the call.
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.
    """

    def __init__(self, mode: Any, func: Any, args: Any, kwargs: Any) -> None:
        self._mode = mode
        self._followed = mode.followed
        self._func, self._args, self._kwargs = func, args, kwargs
        self._name = func.__name__
        self._is_in_place = is_in_place(func) or "out" in kwargs
        self._gathered: dict[int, tuple[torch.Tensor, Any]] = {}
        self._written: list[FollowedTensor] = []

    def run(self, kind: Kind) -> Any:
        """Return the result, on this rank's shards if `kind` allows."""
        if self._is_in_place:
            self._mode.num_writes += 1
        result = self._run_separately(kind)
        if result is not NotImplemented:
            return result
        is_nonzero = self._name == "where" and len(self._args) == 1 and not self._kwargs
        if kind is Kind.ELEMENTWISE and not is_nonzero:
            result = self._run_on_shards()
        elif kind is Kind.REDUCTION:
            result = self._reduce()
        elif kind is Kind.RANDOM:
            result = self._draw()
        return self._run_on_full() if result is NotImplemented else result

    def _run_separately(self, kind: Kind) -> Any:
        """Run torch._foreach_* on the rows with shards and on those without, which DTensor does not accept together."""
        lists = [each for each in self._args if _is_list_of_tensors(each)]
        if kind not in (Kind.ELEMENTWISE, Kind.REDUCTION) or not lists:
            return NotImplemented
        is_plain = [
            all(type(each) in PLAIN and not self._followed.find(each) for each in row)
            for row in zip(*lists, strict=True)
        ]
        if len(set(is_plain)) < 2:
            return NotImplemented
        results = {}
        for plain in (True, False):
            args = [
                list(itertools.compress(each, [mark is plain for mark in is_plain]))
                if isinstance(each, (list, tuple)) and len(each) == len(is_plain)
                else each
                for each in self._args
            ]
            run = functools.partial(self._func, *args, **self._kwargs)
            if not plain:
                run = functools.partial(ShardedCall(self._mode, self._func, args, self._kwargs).run, kind)
            results[plain] = iter(run() or ())
        return None if self._is_in_place else [next(results[plain]) for plain in is_plain]

    def _run_on_shards(self) -> Any:
        """Run an element-wise function on this rank's slices; NotImplemented if it needs the full tensors."""
        args = list(self._args)
        lists = [index for index, each in enumerate(args) if _is_list_of_tensors(each)]
        if lists:  # torch._foreach_*
            rows = [self._slice_row(row) for row in zip(*(args[index] for index in lists), strict=True)]
            for index, column in zip(lists, zip(*rows, strict=True), strict=True) if None not in rows else ():
                args[index] = list(column)
            is_sliced = None not in rows
        else:
            keys = [key for key, each in enumerate(args) if isinstance(each, torch.Tensor)]
            names = [name for name, each in self._kwargs.items() if isinstance(each, torch.Tensor)]
            row = self._slice_row([*(args[key] for key in keys), *(self._kwargs[name] for name in names)])
            is_sliced = row is not None
            if row is not None:
                for key, each in zip(keys, row, strict=False):
                    args[key] = each
                self._kwargs = {**self._kwargs, **dict(zip(names, row[len(keys) :], strict=True))}
        if not is_sliced:
            return NotImplemented
        if self._name.lstrip("_").startswith(
            "fused_"
        ):  # DTensor may redistribute an argument, and then change only the copy
            args = map_tensors(lambda each: each.to_local() if type(each) is DTensor else each, args)
        result = self._func(*args, **self._kwargs)
        if not self._is_in_place:
            return result
        for entry in self._written:
            self._followed.wrote_shard(entry)
        return result if lists else self._args[0]

    def _slice_row(self, row: Any) -> list[Any] | None:
        """Return the slices of tensors that are combined element by element; None if they cannot be sliced alike."""
        entries = [self._whole_copy(each) for each in row]
        sharded: list[Any] = [
            each if type(each) is DTensor else getattr(entry, "shard", None)
            for each, entry in zip(row, entries, strict=True)
        ]
        like: Any = max((each for each in sharded if each is not None), key=lambda each: each.ndim, default=None)
        if like is None:
            return None if any(self._followed.find(each) for each in row) else list(row)
        is_with_shard = any(type(each) is DTensor for each in row)
        if not is_with_shard and (self._name in EXPORTS or self._is_differentiable(row)):
            return None
        adopts = self._is_in_place and sharded[0] is None
        if adopts and (row[0].shape != like.shape or self._is_differentiable(row[:1])):
            return None
        slices = [
            each if adopts and index == 0 else self._slice(each, known, like=like, is_with_shard=is_with_shard)
            for index, (each, known) in enumerate(zip(row, sharded, strict=True))
        ]
        if any(each is None for each in slices):
            return None
        if adopts:
            entries[0] = None if self._followed.find(row[0]) else self._followed.adopt(row[0], like=like)
            if entries[0] is None:
                return None
            slices[0] = entries[0].shard
        if self._is_in_place and entries[0] is not None:
            self._written.append(entries[0])
        return slices

    def _slice(self, value: Any, sharded: Any, *, like: Any, is_with_shard: bool) -> Any:
        if sharded is not None:
            return (
                self._leaf(sharded) if sharded.shape == like.shape and sharded.placements == like.placements else None
            )
        is_broadcast = value.ndim <= like.ndim and all(
            size in (1, full) for size, full in zip(value.shape[::-1], like.shape[::-1], strict=False)
        )
        # A copy that is combined with a tensor of this rank alone is this rank's own from then on.
        if self._is_differentiable([value]) or not is_broadcast or not (value.ndim == 0 or is_with_shard):
            return None
        entry = self._followed.find(value)
        if entry is not None:
            self._followed.refresh(entry)
        return value if value.ndim == 0 else _slice_like(value, like)

    def _leaf(self, sharded: Any) -> Any:
        track: Any = WithShardedGradient.apply
        is_tracked = self._is_differentiable([sharded]) and not self._is_in_place and self._name != "__deepcopy__"
        return track(sharded) if is_tracked else sharded

    def _whole_copy(self, value: Any) -> FollowedTensor | None:
        entry = self._followed.find(value) if type(value) in PLAIN else None
        is_copy = entry is not None and entry.group is not None and entry.is_whole(value)
        return entry if is_copy and not self._is_differentiable([value]) else None

    def _is_differentiable(self, values: Any) -> bool:
        return torch.is_grad_enabled() and any(each.requires_grad for each in values)

    def _reduce(self) -> Any:
        """Reduce shards to plain tensors on all ranks; NotImplemented if it needs the full tensors."""
        if self._name.lstrip("_") == "foreach_norm":
            return self._norms()
        (value, *orders), names = self._args or (None,), self._kwargs.keys()
        is_norm = "norm" in self._name
        orders += self._kwargs.values()
        if type(value) is not DTensor or (orders and not (is_norm and names <= {"p", "ord"} and len(orders) == 1)):
            return NotImplemented
        if not _is_sharded_in_rows(value) or (self._is_differentiable([value]) and self._name not in {"sum", "mean"}):
            return NotImplemented
        if self._name in {"any", "all"}:
            count = self._plain((value != 0).sum())
            return count > 0 if self._name == "any" else count == value.numel()
        if self._name in {"sum", "mean"}:
            total = self._plain(self._leaf(value).sum())
            return total if self._name == "sum" else total / value.numel()
        if is_norm and not all(isinstance(each, (int, float)) and 0 < each < torch.inf for each in orders):
            return NotImplemented
        if not is_norm and value.shape[0] < value.device_mesh.size():  # a rank without elements has no maximum
            return NotImplemented
        return self._plain(self._func(value, *orders))

    def _norms(self) -> Any:
        """Compute torch._foreach_norm with one collective."""
        given: list[Any] = [*self._args, *self._kwargs.values()]
        tensors, orders = given[0], given[1:]
        if not all(type(each) is DTensor and _is_sharded_in_rows(each) for each in tensors):
            return NotImplemented
        if self._is_differentiable(tensors) or any(not 0 < float(each) < torch.inf for each in orders[:1]):
            return NotImplemented
        first = tensors[0]
        if any(each.device_mesh != first.device_mesh or each.placements != first.placements for each in tensors):
            return NotImplemented
        (norm,) = self._func([first], *orders)  # only for its placements, which depend on the order
        local = torch.stack(self._func([each.to_local() for each in tensors], *orders))
        stacked = DTensor.from_local(local, first.device_mesh, norm.placements, run_check=False)
        return list(full_tensor(stacked).unbind())

    def _draw(self) -> Any:
        """Draw random numbers for the full tensor and keep this rank's slice: equal generators draw equal numbers."""
        value, *rest = self._args
        if type(value) is not DTensor:
            return NotImplemented
        drawn = self._func(torch.empty(value.shape, dtype=value.dtype, device=value.device), *rest, **self._kwargs)
        drawn = _slice_like(drawn, value)
        if not self._is_in_place:
            return drawn
        value.detach().copy_(drawn)
        return value

    def _run_on_full(self) -> Any:
        """Run the function on full tensors, and write what it changed in place back to the shards."""
        args, kwargs = map_tensors(self._full, self._args), map_tensors(self._full, self._kwargs)
        result = self._func(*args, **kwargs)
        if self._is_in_place:
            for each in (self._args[0], self._kwargs.get("out")):
                map_tensors(self._write_back, each)
        return map_tensors(self._result, result)

    def _full(self, value: Any) -> Any:
        if type(value) is DTensor:
            if self._is_differentiable([value]):
                return self._plain(value)
            if id(value) not in self._gathered:
                if self._name in _READS:
                    self._followed.before_gather()
                self._gathered[id(value)] = full_tensor(value), value
            return self._gathered[id(value)][0]
        entry = self._followed.find(value) if type(value) in PLAIN else None
        if entry is not None:
            self._followed.refresh(entry)
            entry.is_pinned |= torch.is_grad_enabled() or self._name in KINDS[Kind.STORAGE]
        return value

    def _plain(self, value: Any) -> Any:
        gather: Any = Gather.apply
        return gather(value) if self._is_differentiable([value]) else full_tensor(value)

    def _write_back(self, value: Any) -> None:
        if type(value) is DTensor and id(value) in self._gathered:
            value.detach().copy_(shard(self._gathered[id(value)][0], like=value))
        entry = self._followed.find(value) if type(value) in PLAIN else None
        if entry is not None and entry.group is not None:
            self._followed.drop(entry)
        elif entry is not None and (full := entry.full) is not None:
            entry.shard.copy_(shard(full, like=entry.shard))

    def _result(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or not self._gathered:
            return value
        for full, sharded in self._gathered.values():
            if value is full:
                return sharded
            if value.untyped_storage()._cdata == full.untyped_storage()._cdata:
                self._followed.follow(full, sharded.detach(), is_view=True)
        return value


def _slice_like(value: torch.Tensor, like: Any) -> DTensor:
    """Return this rank's slice of a plain tensor that is combined with a shard, broadcast if it is smaller."""
    placements = []
    for each in like.placements:
        dim = each.dim - (like.ndim - value.ndim) if isinstance(each, Shard) else -1
        is_broadcast = dim < 0 or value.shape[dim] != like.shape[each.dim]
        placements.append(Replicate() if is_broadcast else Shard(dim))
    return distribute_tensor(value.detach().to(like.device), like.device_mesh, placements, src_data_rank=None)


def _is_sharded_in_rows(value: Any) -> bool:
    return all(each.is_replicate() or each == Shard(0) for each in value.placements)


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, torch.Tensor) for each in value)


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([map_tensors(function, each) for each in value])
    if type(value) is dict:
        return {key: map_tensors(function, each) for key, each in value.items()}
    return value
