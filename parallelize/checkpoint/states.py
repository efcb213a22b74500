"""The states of all objects in a call, by the names that the user gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from parallelize.checkpoint.model_state import ModelHandler, has_shards
from parallelize.checkpoint.optimizer_state import OptimizerHandler
from parallelize.checkpoint.safe_types import is_dtensor, to_safe_types
from parallelize.checkpoint.state_handler import Named, ObjectHandler, StateHandler
from parallelize.run.containers import leaves
from parallelize.torch_patches.module_tensors import all_named_parameters
from parallelize.torch_patches.step import parameters_of

_NO_NAMES: Mapping[int, str] = {}


def handler_for(
    obj: Any, name: str = "", name_by_parameter: Mapping[int, str] = _NO_NAMES
) -> StateHandler:
    """Return the handler for an object or a plain value.

    Args:
        obj: the object; torch's own wrappers for data parallelism are taken off.
        name: its name, for errors.
        name_by_parameter: as for `OptimizerHandler`.
    """
    while isinstance(obj, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        obj = obj.module
    # The class is asked: loaders of shard_loader forward attributes that they lack to the user's
    # loader.
    has_get = hasattr(type(obj), "state_dict")
    has_set = hasattr(type(obj), "load_state_dict")
    if not has_get or not has_set:
        return StateHandler(obj, name)
    if isinstance(obj, nn.Module):
        return ModelHandler(obj, name)
    if isinstance(obj, torch.optim.Optimizer):
        return OptimizerHandler(obj, name, name_by_parameter)
    return ObjectHandler(obj, name)


def is_sharded(obj: Any) -> bool:
    """Return whether an object has shards, so that all ranks must take part in saving it."""
    if isinstance(obj, nn.Module):
        return has_shards(obj)
    if isinstance(obj, torch.optim.Optimizer):
        return any(map(is_dtensor, parameters_of(obj)))
    return any(map(is_dtensor, leaves(obj, once=True)))


def states_of(objects: Named, *, gather: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Return the state of each object, or the value itself, as safe types.

    Args:
        objects: by their names.
        gather: returns the full tensor of a DTensor, for a file. None: DTensors are kept, and
            optimizers have their entries by the names of parameters, for a folder.
    """
    name_by_parameter = _NO_NAMES
    if gather is None:
        name_by_parameter = _names_of_parameters(objects)
    states = {}
    for name, obj in objects.items():
        state = handler_for(obj, name, name_by_parameter).current_state()
        states[name] = to_safe_types(state, name, gather)
    return states


def _names_of_parameters(objects: Named) -> dict[int, str]:
    """Return the name of each parameter, by its id; of several, that in the first model."""
    name_by_parameter: dict[int, str] = {}
    for model in objects.values():
        if isinstance(model, nn.Module):
            for name, parameter in all_named_parameters(model):
                name_by_parameter.setdefault(id(parameter), name)
    return name_by_parameter
