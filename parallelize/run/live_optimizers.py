"""Search for the optimizers of this process that hold given parameters, whoever has constructed them."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

from parallelize.torch_patches.step import parameters_of

__all__ = ["live_optimizers"]


def live_optimizers(parameters: Iterable[torch.Tensor], *, also: Iterable[Any] = ()) -> list[Any]:
    """Return the optimizers that hold one of the parameters; objects that gc.freeze() has hidden are not found.

    Args:
        parameters: the parameters.
        also: objects to search in addition, such as optimizers that do not inherit from torch's.
    """
    ids = set(map(id, parameters))
    # Not isinstance, which asks proxy objects of the user for their __class__.
    alive = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    found = {id(each): each for each in (*also, *alive) if "param_groups" in vars(each)}  # else under construction
    return [each for each in found.values() if not ids.isdisjoint(map(id, parameters_of(each)))]
