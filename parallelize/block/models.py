"""The models of a block: checked before any is changed, with leaf tensors as a model of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from parallelize.errors import ConfigError, did_you_mean
from parallelize.torch_patches.forward import overlapping_route
from parallelize.torch_patches.module_tensors import all_named_buffers, all_named_parameters, all_parameters

__all__ = ["LeafTensor", "check_models", "methods_of"]


class LeafTensor(nn.Module):
    """A model of one parameter: a tensor that is trained beside the models, such as SAC's log_alpha."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._parameters["tensor"] = tensor  # type: ignore[assignment]  # a leaf that need not be an nn.Parameter


def check_models(models: Sequence[Any], methods: Sequence[str], *, accepts_meta: bool) -> None:
    """Check that parallel_model supports every model, and that each of `methods` is a method of a model.

    Raises:
        ConfigError: no model, a method that no model has, another object than an nn.Module, a model that is or contains
            another one, a wrapped model, one without parameters, modules or parameters that are also in another block,
            lazy parameters, meta or sharded tensors.
    """
    if not models:
        raise ConfigError("parallel_model()", why="no model was passed", fix="pass the model: parallel_model(model)")
    for model in models:
        _check_type(model)
        _check_tensors(model, accepts_meta=accepts_meta)
        _check_not_in_block(model)
    for method in methods:
        _check_method(method, models)
    for model in models:
        name, outer = next(
            ((name, other) for other in models for name, part in other.named_modules() if part is model and name),
            ("", model),
        )
        if outer is not model or models.count(model) > 1:
            raise ConfigError(
                f"parallel_model({', '.join(type(each).__name__ for each in models)})",
                why=f"the {type(model).__name__} is {name or 'also another argument'} of {type(outer).__name__}",
                fix="pass the outer model only, and name its methods that do not call forward in methods=[...]",
            )


def methods_of(model: nn.Module, methods: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return a model's current "forward" and those of `methods` that it has: name -> bound method."""
    return {name: getattr(model, name) for name in ("forward", *methods) if callable(getattr(model, name, None))}


def _check_type(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"parallel_model({type(model).__name__})",
            why="it takes torch.nn.Module objects, and tensors with requires_grad=True that no operation has computed",
            fix="pass the model; optimizers go to optimizers=, loaders to shard_loader",
        )
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise ConfigError(
            f"parallel_model({type(model).__name__}(...))",
            why="the model is already wrapped for parallel training",
            fix="pass the plain model, or construct the wrapper in wrap=lambda module, world: ...",
        )


def _check_tensors(model: nn.Module, *, accepts_meta: bool) -> None:
    if next(all_parameters(model), None) is None:
        raise ConfigError(
            f"parallel_model({type(model).__name__}), which has no parameters",
            why="there is nothing to train or to keep alike; modules in a plain list, tuple or dict are not registered",
            fix="keep submodules in nn.ModuleList or nn.ModuleDict; leave modules without parameters out of the block",
        )
    for name, tensor in (*all_named_parameters(model), *all_named_buffers(model)):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} of {type(model).__name__} has no size yet",
                why="a lazy module initializes its parameters at its first forward, differently on each rank",
                fix="run one batch through the model before parallel_model: with torch.no_grad(): model(x)",
            )
        if hasattr(tensor, "full_tensor"):  # a DTensor, whose class takes half a second to import
            raise ConfigError(
                f"{name} of {type(model).__name__} is sharded over the ranks",
                why="fully_shard was applied to the model, or an fsdp block did not restore it",
                fix="construct the model again and load a checkpoint, or let backend='fsdp' shard it",
            )
        if tensor.is_meta and not accepts_meta:
            raise ConfigError(
                f"{name} of {type(model).__name__} is on the meta device",
                why="a meta tensor has a shape, but no values to train or to broadcast",
                fix="give the model values first: model.to_empty(device='cpu'), then initialize or load weights",
            )


def _check_not_in_block(model: nn.Module) -> None:
    other = overlapping_route(model)
    if other is not None:
        raise ConfigError(
            f"parallel_model({type(model).__name__}) inside a parallel_model block of {type(other.model).__name__}",
            why="that block has the model, or parts of it, whose gradients would be averaged twice",
            fix="drop the inner block, or use one block for both: with parallel_model(first, second)",
        )


def _check_method(method: str, models: Sequence[nn.Module]) -> None:
    if not any(callable(getattr(model, method, None)) for model in models):
        known = [name for model in models for name in dir(type(model)) if name not in dir(nn.Module)]
        raise ConfigError(
            f"methods={method!r}",
            why=f"no model of the block has a method {method!r}",
            fix=did_you_mean(method, known),
        )
