"""Shards, the DTensors whose rows the ranks hold: how they are made, gathered and changed.

full tensor   the tensor that one process would have
rows          this rank's part of it, a plain tensor
shard         the DTensor of these rows
record        what this package remembers of a shard; it ends with the shard
version       counts the changes of rows; a gathered tensor of an older version is out of date
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from parallelize.run.sharded_tensors import Place

_RECORD = "record_of_parallelize"


@dataclass(slots=True)
class Version:
    """The version of the rows of a shard. Shards that share rows, as `p` and `p.data` do, share it.

    torch's own counter, `Tensor._version`, does not suffice. DTensor writes to rows below autograd,
    where torch counts nothing, optimizers write to the rows, and `p.data` has its own counter.

    Attributes:
        number: counts the writes to the rows, and the changes of `requires_grad`.
    """

    number: int = 0


@dataclass(slots=True, eq=False)
class Record:
    """What is remembered of a shard.

    Attributes:
        version: the version of its rows.
        standing: refers to the tensor that stands for the shard, so that `p.grad is p.grad`. It is
            weak, because the tensor refers to the shard: in a cycle, both would live until Python's
            collector finds them, which is at another time on each rank. None: there was none yet.
        place: where the first tensor that stands for the shard was made. A tensor that replaces one
            that was freed has the same place: when a tensor is freed may differ between ranks.
        data_alias: the tensor that `p.data` has returned, so that each `p.data` returns this one.
            `p.data = other` gives it rows of its own: what the user has kept of the old data stays
            as it is, while the shard's rows, which fully_shard knows, get new values.
    """

    version: Version = field(default_factory=Version)
    standing: weakref.ref[torch.Tensor] | None = None
    place: Place | None = None
    data_alias: Any = None


def record_of(shard: Any) -> Record:
    """Return the record of a shard, which is an attribute of it, so that both end together."""
    attributes = shard.__dict__
    record: Record | None = attributes.get(_RECORD)
    if record is None:
        record = attributes[_RECORD] = Record()
    return record


def mark_changed(shard: Any) -> None:
    """Note a change of a shard's rows, or of whether it is trained."""
    record_of(shard).version.number += 1


def version_of(shard: Any) -> int:
    """Return a number that each write to the shard's rows has made larger.

    fully_shard adds to gradients itself, by an operation of DTensor: torch counts these writes.
    """
    number: int = record_of(shard).version.number + shard._version
    return number


def changes_of(shards: Iterable[Any]) -> int:
    """Return the number of all changes of some shards: if it is equal later, none has changed."""
    return sum([record_of(shard).version.number for shard in shards])


def share_version(shard: Any, source: Any) -> None:
    """Let a shard have the version of another one, if it has the same rows."""
    # All empty tensors have one address. Where the last rank has no rows, it alone would take a
    # copy for the same rows, and then it alone would gather again.
    if storage_of(shard._local_tensor) == storage_of(source._local_tensor):
        record_of(shard).version = record_of(source).version


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that only tensors with one memory have in common, while they live."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def dtensor_of(rows: torch.Tensor, like: Any, mesh: Any = None) -> Any:
    """Return the DTensor of this rank's rows of a tensor like another one.

    Args:
        rows: this rank's rows.
        like: a DTensor of the same shape, cut in the same way.
        mesh: the mesh of the DTensor; None: that of `like`.
    """
    mesh = mesh or like.device_mesh
    on_device_of_mesh = DTensor.from_local(
        rows, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    # `from_local` moves rows to the device of the mesh. Offloaded rows are on the CPU.
    dtensor_type: Any = DTensor
    return dtensor_type(rows, on_device_of_mesh._spec, requires_grad=False)


def full_tensor(shard: Any) -> torch.Tensor:
    """All-gather a DTensor, and return the full tensor on the device of the mesh."""
    # Offloaded rows are on another device than the mesh.
    full: torch.Tensor = shard.detach().to(shard.device_mesh.device_type).full_tensor()
    return full


def full_tensor_with_gradient(shard: Any) -> torch.Tensor:
    """All-gather a DTensor, or sum a partial one, so that backward passes gradients on to it.

    The gradients of the ranks are averaged: each is that of the rank's part of the batch.
    """
    mesh = shard.device_mesh
    full: Any = shard.to(mesh.device_type).full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())
    result: torch.Tensor = full
    return result


def shard_like(full: torch.Tensor, like: Any, *, source: int | None = None) -> Any:
    """Return the shard of a full tensor.

    Args:
        full: the full tensor.
        like: a DTensor of the same shape: the result is cut as this one, and on its device.
        source: the rank whose values count, which sends them; None: all ranks have the same values.
    """
    mesh = like.device_mesh
    # The rows would have the order of memory of the full tensor, such as a transposed one, but
    # fused optimizers on a CPU ignore strides: they take parameters and state in one order.
    contiguous = full.detach().to(mesh.device_type).contiguous()
    shard: Any = distribute_tensor(contiguous, mesh, like.placements, src_data_rank=source)
    return shard.to(like.device)
