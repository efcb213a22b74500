"""Conversions between full tensors and DTensor shards, also in state dicts and optimizer state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

__all__ = [
    "Gather",
    "WithShardedGradient",
    "convert_state_entry",
    "full_state_dicts",
    "full_tensor",
    "full_tensors",
    "shard",
]


def convert_state_entry(value: Any, *, parameter: torch.Tensor, like: DTensor | None) -> Any:
    """Shard an element-wise entry of `parameter`'s optimizer state `like` a DTensor; None: gather the full entry."""
    if like is None:
        return full_tensor(value) if isinstance(value, DTensor) else value
    is_elementwise = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim()
    return shard(value, like=like) if is_elementwise else value


def shard(value: torch.Tensor, *, like: DTensor) -> DTensor:
    """Return this rank's shard of a tensor that every rank holds, with the placements of `like`; no collective."""
    sharded: Any = distribute_tensor(value.detach(), like.device_mesh, like.placements, src_data_rank=None)
    moved: DTensor = sharded.to(like.device)  # offloaded shards are not on the mesh's device
    return moved


def full_tensor(sharded: torch.Tensor) -> torch.Tensor:
    """All-gather a DTensor, and return the full tensor."""
    value: Any = sharded.detach()
    mesh_type = value.device_mesh.device_type
    full: torch.Tensor = (value if value.device.type == mesh_type else value.to(mesh_type)).full_tensor()
    return full


def full_tensors(sharded: Sequence[DTensor]) -> list[torch.Tensor]:
    """All-gather DTensors, those of one dtype and mesh by one collective, and return the full tensors in order."""
    found: dict[int, torch.Tensor] = {}
    buckets: dict[Any, list[DTensor]] = {}
    for each in sharded:
        buckets.setdefault((each.dtype, each.device_mesh, each.placements), []).append(each)
    for (_, mesh, placements), bucket in buckets.items():
        shards = [placement for placement in placements if placement.is_shard()]
        if shards != [Shard(0)]:
            found.update({id(each): full_tensor(each) for each in bucket})
            continue
        num_shards = mesh.size(placements.index(Shard(0)))
        padded = [_padded(each, num_rows=-(-each.shape[0] // num_shards)) for each in bucket]
        gathered = full_tensor(DTensor.from_local(torch.cat(padded), mesh, placements, run_check=False))
        columns = torch.split(gathered.view(num_shards, -1), [each.numel() for each in padded], dim=1)
        for each, column in zip(bucket, columns, strict=True):
            found[id(each)] = column.reshape(-1, *each.shape[1:])[: each.shape[0]]
    return [found[id(each)] for each in sharded]


def _padded(sharded: DTensor, *, num_rows: int) -> torch.Tensor:
    """Return this rank's rows of a DTensor, padded to the number of rows of the first rank, as one dimension."""
    value: Any = sharded.detach()
    local = value.to_local().to(sharded.device_mesh.device_type)
    padding = local.new_zeros((num_rows - local.shape[0], *local.shape[1:]))
    return torch.cat([local, padding]).flatten()


@contextlib.contextmanager
def full_state_dicts(model: nn.Module, *, saves_full: bool) -> Iterator[None]:
    """Let the model load state dicts of full tensors inside the context; with `saves_full`, return such ones too."""

    def save(_module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
        state.update({key: full_tensor(value) for key, value in state.items() if isinstance(value, DTensor)})

    def load(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                state[prefix + name] = shard(value, like=parameter)

    hooked: Any = model
    with contextlib.ExitStack() as stack:
        if saves_full:
            stack.callback(hooked.register_state_dict_post_hook(save).remove)
        stack.callback(hooked.register_load_state_dict_pre_hook(load).remove)
        yield


class Gather(torch.autograd.Function):
    """Gathers a shard, or a partial sum; backward averages the ranks' gradients, as for any parameter."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> torch.Tensor:
        """Return the full tensor."""
        ctx.mesh, ctx.placements = value.device_mesh, value.placements
        full = full_tensor(value)
        return full.clone() if full is value else full

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return this rank's shard of the averaged gradient."""
        mesh = ctx.mesh
        partial = DTensor.from_local(gradient / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
        placements = [Replicate() if each.is_partial() else each for each in ctx.placements]
        return partial.redistribute(mesh, placements)


class WithShardedGradient(torch.autograd.Function):
    """Returns a shard; backward gives it a gradient with its own placements, for which DTensor may choose others."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        """Return the shard."""
        ctx.mesh, ctx.placements = value.device_mesh, value.placements
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Return the gradient with the shard's placements."""
        return gradient.redistribute(ctx.mesh, ctx.placements)
