"""Which models a block takes: what it cannot make parallel is refused before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from parallelize.errors import ConfigError, did_you_mean
from parallelize.inplace.forward_routing import overlapping, route_of

__all__ = ["admit", "methods_of"]

_WRAPPERS = (DistributedDataParallel, DataParallel)


def admit(models: Sequence[Any]) -> None:
    """Make sure that every model can be in the block that is about to begin.

    Raises:
        ConfigError: nothing at all, no module, the same model twice, a model in a wrapper, one that is in another
            block or shares parts with one that is, parameters without a size or without a value.
    """
    if not models:
        raise ConfigError("parallel_model()", why="there is no model", fix="pass one, as in parallel_model(model)")
    for model in models:
        _admit_kind(model)
        _admit_tensors(model)
        _admit_once(model)
    owner: dict[int, str] = {}
    for position, model in enumerate(models):
        for name, part in (*model.named_parameters(), *((name or "the model", m) for name, m in model.named_modules())):
            if owner.setdefault(id(part), f"argument {position}") != f"argument {position}":
                raise _shared(f"{name} of {type(model).__name__} is in two arguments of parallel_model")


def methods_of(models: Sequence[nn.Module], methods: Sequence[str]) -> list[dict[str, Callable[..., Any]]]:
    """For each model "forward" and those of `methods` that it has, each as it is on the model now.

    Raises:
        ConfigError: a method that no model has.
    """
    for method in methods:
        if not any(callable(getattr(model, method, None)) for model in models):
            known = [name for model in models for name in dir(type(model)) if name not in dir(nn.Module)]
            raise ConfigError(
                f"methods={list(methods)!r}",
                why=f"no model of the block has a method {method!r}",
                fix=did_you_mean(method, known),
            )
    return [
        {name: getattr(model, name) for name in ("forward", *methods) if callable(getattr(model, name, None))}
        for model in models
    ]


def _admit_kind(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"parallel_model({type(model).__name__})",
            why="it runs torch.nn.Module objects",
            fix="pass the model; optimizers go to optimizers=, loaders to shard_loader",
        )
    if isinstance(model, _WRAPPERS):
        raise ConfigError(
            f"parallel_model({type(model).__name__}(...))",
            why="the model is parallel already, by a wrapper of its own",
            fix="pass the plain model, or bring the wrapper as wrap=lambda module, world: ...",
        )


def _admit_tensors(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} of {type(model).__name__} has no size yet",
                why="a lazily initialised module makes its parameters at its first forward, on each rank another way",
                fix="run one batch through the model before parallel_model: with torch.no_grad(): model(x)",
            )
        if hasattr(tensor, "full_tensor"):  # a DTensor, whose class takes half a second to import
            raise ConfigError(
                f"{name} of {type(model).__name__} is in parts, one on each rank",
                why="the model is divided already: by fully_shard, or by an fsdp block that did not restore it",
                fix="make the model anew and load a checkpoint, or leave the dividing to backend='fsdp'",
            )
        if tensor.device == torch.device("meta"):
            raise ConfigError(
                f"{name} of {type(model).__name__} is on the meta device",
                why="it has a size and no value that could be trained or sent to other ranks",
                fix="give the model values first: model.to_empty(device='cpu'), then initialise or load weights",
            )


def _admit_once(model: nn.Module) -> None:
    if route_of(model) is not None:
        raise ConfigError(
            f"parallel_model({type(model).__name__}) inside a parallel_model block of the same model",
            why="it runs in parallel already",
            fix="drop the inner block",
        )
    other = overlapping(model)
    if other is not None:
        raise _shared(f"{type(model).__name__} shares parts with {type(other.model).__name__}, which is in a block")


def _shared(what: str) -> ConfigError:
    return ConfigError(
        what,
        why="each model averages its own gradients: those of a shared part would be averaged twice",
        fix="put the models into one nn.Module, pass that, and name its methods in methods=[...]",
    )
