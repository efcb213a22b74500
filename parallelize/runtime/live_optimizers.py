"""Search for the optimizers of this process that hold given parameters, whoever has constructed them."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

from parallelize.torch_patches.step import parameters_of

__all__ = ["live_optimizers"]


def live_optimizers(parameters: Iterable[torch.Tensor], *, also: Iterable[Any] = ()) -> list[Any]:
    """Return the optimizers that hold one of the parameters, in the same order on all ranks.

    Optimizers are ordered by what they hold and by their class, because the garbage collector's order may differ
    between ranks. Objects that gc.freeze() has hidden are not found.

    Args:
        parameters: the parameters, in the same order on all ranks.
        also: objects to search in addition, such as optimizers that do not inherit from torch's.
    """
    index = {id(each): number for number, each in enumerate(parameters)}
    # Not isinstance, which asks proxy objects of the user for their __class__.
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    keys: dict[int, tuple[Any, ...]] = {}
    for each in (*also, *found):
        held = sorted(index[id(one)] for one in _held_by(each) if id(one) in index)
        if held:
            keys[id(each)] = (held, type(each).__qualname__, _signature(each), each)
    return [key[-1] for key in sorted(keys.values(), key=lambda key: key[:-1])]


def _held_by(optimizer: Any) -> list[Any]:
    # An optimizer under construction, or one that delegates to another, has no groups of its own.
    return list(parameters_of(optimizer)) if "param_groups" in vars(optimizer) else []


def _signature(optimizer: Any) -> str:
    """Describe the options and the state of an optimizer, to order those that hold the same parameters."""
    options = [{name: value for name, value in each.items() if name != "params"} for each in optimizer.param_groups]
    states = [sorted(map(str, each)) for each in vars(optimizer).get("state", {}).values()]
    return f"{options} {states}"
