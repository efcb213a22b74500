"""The states of all objects in a call, by the names that the user gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelize.checkpoint.model_state import ModelHandler, has_shards
from parallelize.checkpoint.optimizer_state import OptimizerHandler
from parallelize.checkpoint.parameter_names import ParameterNames
from parallelize.checkpoint.safe_types import is_dtensor, to_safe_types
from parallelize.checkpoint.state_handler import Named, ObjectHandler, StateHandler
from parallelize.run.containers import leaves
from parallelize.torch_patches.step import parameters_of


def handler_for(
    obj: Any, name: str = "", parameter_names: ParameterNames | None = None
) -> StateHandler:
    """Return the handler for an object or a plain value.

    Args:
        obj: the object; torch's own wrappers for data parallelism are taken off.
        name: its name, for errors.
        parameter_names: as for `OptimizerHandler`; None: of no model.
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
        return OptimizerHandler(obj, name, parameter_names or ParameterNames({}))
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
    parameter_names = ParameterNames(objects)
    states = {}
    for name, obj in objects.items():
        handler = handler_for(obj, name, parameter_names)
        if gather is None and isinstance(handler, OptimizerHandler):
            state = handler.state_by_names()
        else:
            state = handler.current_state()
        states[name] = to_safe_types(state, name, gather)
    return states
