"""Search for the optimizers that hold some parameters, whoever has constructed them."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

from parallelize.torch_patches.step import parameters_of


def live_optimizers(parameters: Iterable[torch.Tensor], *, also: Iterable[Any] = ()) -> list[Any]:
    """Return the optimizers that hold at least one of the parameters.

    A block is given models, and need not be given their optimizers. So this searches all objects
    that the garbage collector tracks, except those that gc.freeze() has hidden.

    Args:
        parameters: the parameters.
        also: objects to search in addition, such as optimizers that do not inherit from torch's.
    """
    wanted_ids = set(map(id, parameters))
    optimizers: dict[int, Any] = {}
    for optimizer in (*also, *filter(_is_optimizer, gc.get_objects())):
        # An optimizer under construction has no groups yet.
        if "param_groups" not in vars(optimizer):
            continue
        if not wanted_ids.isdisjoint(map(id, parameters_of(optimizer))):
            optimizers[id(optimizer)] = optimizer
    return list(optimizers.values())


def _is_optimizer(instance: Any) -> bool:
    # `isinstance` would ask proxy objects of the user for their __class__, which runs their code.
    return issubclass(type(instance), torch.optim.Optimizer)
