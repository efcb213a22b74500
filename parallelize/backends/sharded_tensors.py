"""Tensors in parts, one on each rank: spread, made whole, and in the dictionaries that hold them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["converted", "full_state_dicts", "full_tensor", "shard"]


def converted(value: Any, *, of: torch.Tensor, like: DTensor | None) -> Any:
    """One entry of an optimizer's state: spread if it goes with a parameter element by element, whole again after."""
    if like is None:
        return full_tensor(value) if isinstance(value, DTensor) else value
    goes_with = isinstance(value, torch.Tensor) and value.shape == of.shape and value.dim()
    return shard(value, like=like) if goes_with else value


def shard(value: torch.Tensor, *, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank holds, as `like` is divided; no collective."""
    local = value.detach().to(like.device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)


def full_tensor(part: torch.Tensor) -> torch.Tensor:
    """The tensor of which every rank holds a part; a collective."""
    value: Any = part.detach()
    mesh_type = value.device_mesh.device_type
    full: torch.Tensor = (value if value.device.type == mesh_type else value.to(mesh_type)).full_tensor()
    return full


@contextlib.contextmanager
def full_state_dicts(model: nn.Module, *, saves_whole: bool) -> Iterator[None]:
    """State dictionaries of whole tensors: taken as such if asked for, loaded as such always."""

    def save(_module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
        state.update({key: full_tensor(value) for key, value in state.items() if isinstance(value, DTensor)})

    def load(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                state[prefix + name] = shard(value, like=parameter)

    hooked: Any = model
    with contextlib.ExitStack() as stack:
        if saves_whole:
            stack.callback(hooked.register_state_dict_post_hook(save).remove)
        stack.callback(hooked.register_load_state_dict_pre_hook(load).remove)
        yield
