"""The models that a block accepts. All are checked before the block changes any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from parallelize.errors import ConfigError, did_you_mean
from parallelize.torch_patches.forward import overlapping_route
from parallelize.torch_patches.module_tensors import (
    all_named_buffers,
    all_named_parameters,
    all_parameters,
    is_dtensor,
)


class LeafTensor(nn.Module):
    """A model around a leaf tensor that is trained beside the models, such as SAC's log_alpha.

    It has no forward: it gets rank 0's value, and its gradient is averaged.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        # Not `self.tensor = tensor`: that registers nothing but an nn.Parameter, and the user's
        # tensor must stay the object that the optimizer has.
        self._parameters["tensor"] = tensor  # type: ignore[assignment]  # see above


def as_model(argument: Any) -> Any:
    """Return an argument of parallel_model as a model: a leaf tensor in a LeafTensor.

    Any other argument is returned as it is, for `check_models` to accept or to refuse.
    """
    if isinstance(argument, torch.Tensor) and argument.is_leaf and argument.requires_grad:
        return LeafTensor(argument)
    return argument


def check_models(models: Sequence[Any], methods: Sequence[str], *, accepts_meta: bool) -> None:
    """Check that parallel_model supports every model, and that some model has each method.

    Args:
        models: the arguments of parallel_model, after `as_model`.
        methods: the names that the user has passed as `methods=`.
        accepts_meta: whether tensors may be on the meta device, because the backend initializes
            them.

    Raises:
        ConfigError: there is no model; or no model has a method of `methods`; or a model is not
            supported: it is no nn.Module, is wrapped for parallel training, has no parameters, has
            lazy, sharded or meta tensors, shares parts with a model of an open block, or is passed
            twice or inside another model.
    """
    if not models:
        raise ConfigError(
            "parallel_model()",
            why="no model was passed",
            fix="pass the model: parallel_model(model)",
        )
    for model in models:
        _check_type(model)
        _check_tensors(model, accepts_meta=accepts_meta)
        _check_not_in_block(model)
    for method in methods:
        _check_method(method, models)
    for model in models:
        _check_not_inside(model, models)


def methods_of(model: nn.Module, methods: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return the methods of a model that a block routes: name -> bound method.

    They are "forward", and each of `methods` that the model has. A method that it lacks is one of
    another model of the block.
    """
    bound_methods = {}
    for name in ("forward", *methods):
        method = getattr(model, name, None)
        if callable(method):
            bound_methods[name] = method
    return bound_methods


def _check_type(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"parallel_model({type(model).__name__})",
            why="it takes torch.nn.Module objects, and tensors with requires_grad=True that no "
            "operation has computed",
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
            why="there is nothing to train or to keep alike; modules in a plain list, tuple or "
            "dict are not registered",
            fix="keep submodules in nn.ModuleList or nn.ModuleDict; leave modules without "
            "parameters out of the block",
        )
    _check_not_sharded(model)
    for name, tensor in (*all_named_parameters(model), *all_named_buffers(model)):
        _check_tensor(tensor, f"{name} of {type(model).__name__}", accepts_meta=accepts_meta)


def _check_tensor(tensor: torch.Tensor, name: str, *, accepts_meta: bool) -> None:
    if is_lazy(tensor):
        raise ConfigError(
            f"{name} has no size yet",
            why="a lazy module initializes its parameters at its first forward, differently on "
            "each rank",
            fix="run one batch through the model before parallel_model: "
            "with torch.no_grad(): model(x)",
        )
    # A tensor that an fsdp block has left has this method. So has a DTensor, of a model that is
    # tensor parallel already, which a block takes as it is.
    if hasattr(tensor, "full_tensor") and not is_dtensor(tensor):
        _refuse_sharded(name)
    if tensor.is_meta and not accepts_meta:
        raise ConfigError(
            f"{name} is on the meta device",
            why="a meta tensor has a shape, but no values to train or to broadcast",
            fix="give the model values first: model.to_empty(device='cpu'), then initialize or "
            "load weights",
        )


def _check_not_sharded(model: nn.Module) -> None:
    """Refuse a model to which fully_shard was applied.

    torch has changed the classes of its modules. Its parameters are DTensors, as those of a model
    that is tensor parallel.
    """
    for name, module in model.named_modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            _refuse_sharded(name or type(model).__name__)


def _refuse_sharded(name: str) -> NoReturn:
    raise ConfigError(
        f"{name} is sharded over the ranks",
        why="fully_shard was applied to the model, or an fsdp block did not restore it",
        fix="construct the model again and load a checkpoint, or let backend='fsdp' shard it",
    )


def _check_not_in_block(model: nn.Module) -> None:
    """Refuse a model that shares modules or parameters with a model in an open block."""
    route = overlapping_route(model)
    if route is not None:
        raise ConfigError(
            f"parallel_model({type(model).__name__}) inside a parallel_model block of "
            f"{type(route.model).__name__}",
            why="that block has the model, or parts of it, whose gradients would be averaged twice",
            fix="drop the inner block, or use one block for both: "
            "with parallel_model(first, second)",
        )


def _check_method(method: str, models: Sequence[nn.Module]) -> None:
    names = []
    for model in models:
        if callable(getattr(model, method, None)):
            return
        names += [name for name in dir(type(model)) if name not in dir(nn.Module)]
    raise ConfigError(
        f"methods={method!r}",
        why=f"no model of the block has a method {method!r}",
        fix=did_you_mean(method, names),
    )


def _check_not_inside(model: nn.Module, models: Sequence[nn.Module]) -> None:
    """Refuse a model that is passed twice, or that is a submodule of another model."""
    for outer in models:
        for name, part in outer.named_modules():
            if part is model and name:
                _refuse_overlap(model, models, f"{name} of {type(outer).__name__}")
    # By identity: a class may compare its models by their values.
    occurrences = [other_model for other_model in models if other_model is model]
    if len(occurrences) > 1:
        _refuse_overlap(model, models, f"also another argument of {type(model).__name__}")


def _refuse_overlap(model: nn.Module, models: Sequence[nn.Module], place: str) -> NoReturn:
    """Raise the error for a model that the block would have twice.

    Args:
        model: the model.
        models: all models of the block.
        place: where else the model is, to stand after "the Encoder is", such as "encoder of
            Autoencoder".
    """
    names = ", ".join(type(argument).__name__ for argument in models)
    raise ConfigError(
        f"parallel_model({names})",
        why=f"the {type(model).__name__} is {place}",
        fix="pass the outer model only, and name its methods that do not call forward in "
        "methods=[...]",
    )
