"""Where the parameters of a model in parts are: what somebody has put in their places would be lost without a word."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from parallelize.errors import ConfigError, SyncError
from parallelize.runtime.gradients import identity, parameters_of

__all__ = ["Place", "Whereabouts", "refuse_flattening"]

Place = tuple[nn.Module, str, nn.Parameter]
"""Where a parameter is registered, and the user's own object."""


class Whereabouts:
    """Refuses what fully_shard passes over: it would go on with its own parts, or step on gradients it has not sent.

    Args:
        model: the user's.
        root: the root of fully_shard.
        places: every place of the model that holds a parameter.
        parts: id of the user's parameter -> this rank's part of it.
    """

    def __init__(
        self, model: nn.Module, *, root: nn.Module, places: Sequence[Place], parts: Mapping[int, nn.Parameter]
    ) -> None:
        self._model = model
        self._places = places
        self._parts = parts
        self._names = {id(parts[id(each)]): name for name, each in _named(model, places).items()}
        self._wholes = {id(whole) for _, _, whole in places}
        groups: list[Any] = [
            module._get_fsdp_state()._fsdp_param_group for module in root.modules() if isinstance(module, FSDPModule)
        ]
        self._managed: dict[int, Any] = {
            id(each.sharded_param): each for group in groups if group is not None for each in group.fsdp_params
        }
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._spent: dict[int, tuple[int, int]] = {}

    def before_forward(self) -> None:
        """A forward is about to gather the parts.

        Raises:
            SyncError: a parameter is no longer the one that is in parts.
        """
        for module, name, whole in self._places:
            part = self._parts[id(whole)]
            now = module._parameters.get(name)
            if now is not part and now is not None and not _is_form_of(self._managed.get(id(part)), now):
                raise SyncError(
                    f"{self._names[id(part)]} of {type(self._model).__name__} is another parameter",
                    why="fsdp has laid out the parameters at the entry of the block, and would go on with those",
                    fix="drop assign=True of load_state_dict, copy into the parameter, or change the model before the "
                    "block; call a method named in methods= for a functional call",
                )

    def before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """An optimizer is about to step.

        Raises:
            SyncError: it holds what the model had before, or parts whose gradients were not sent.
            ConfigError: it cannot step on parts.
        """
        held = list(parameters_of(optimizer))
        if any(id(each) in self._wholes for each in held):
            raise SyncError(
                f"{type(optimizer).__name__} holds parameters that {type(self._model).__name__} had before",
                why="fsdp has replaced them since it was made: its steps would train nothing",
                fix="pass it, as in parallel_model(model, optimizers=optimizer), or make it inside the block",
            )
        for each in held:
            managed = self._managed.get(id(each))
            if managed is not None:
                refuse_flattening(optimizer)
                self._met.add(optimizer)
                if _has_unsent(managed, gradient=each.grad):
                    raise self._unsent(self._names[id(each)])

    def after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """An optimizer has stepped: on these gradients."""
        for each in parameters_of(optimizer):
            if id(each) in self._managed and each.grad is not None:
                self._spent[id(each)] = identity(each.grad)

    def part_with(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Make steps an error from now on of optimizers that still hold parts, and of gradients that were in parts.

        Args:
            optimizers: they hold whole parameters again.
        """
        for optimizer in self._met:
            if not any(optimizer is each for each in optimizers):
                optimizer.register_step_pre_hook(_refuse_former)
        wholes = {whole: self._parts[id(whole)] for _, _, whole in self._places}
        lost = {whole: self._names[id(part)] for whole, part in wholes.items() if self._loses(part)}
        if lost:
            _refuse_to_pass_over(lost)

    def _loses(self, part: nn.Parameter) -> bool:
        """Whether a part has a gradient on which no optimizer has stepped."""
        gradient: Any = part.grad
        managed = self._managed.get(id(part))
        if managed is not None and _has_unsent(managed, gradient=gradient):
            return True
        is_new = gradient is not None and self._spent.get(id(part)) != identity(gradient)
        return is_new and bool(gradient.to_local().count_nonzero())

    def _unsent(self, name: str) -> SyncError:
        return SyncError(
            f"the gradient of {name} of {type(self._model).__name__} is not averaged over the ranks",
            why="its backward ran under no_sync, or it comes from torch.autograd.grad: the step would pass over it",
            fix="run forward and backward of the last micro-batch outside of no_sync, and call backward",
        )


def refuse_flattening(optimizer: torch.optim.Optimizer) -> None:
    """LBFGS searches along one vector of all parameters, of which each rank would have made another one."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{type(optimizer).__name__} under backend='fsdp'",
            why="it joins all parameters in one vector, and each rank holds parts of them",
            fix="use backend='ddp', or an optimizer that goes element by element, such as AdamW",
        )


def _named(model: nn.Module, places: Sequence[Place]) -> dict[str, nn.Parameter]:
    paths = {module: path for path, module in model.named_modules()}
    return {f"{paths[module]}.{name}".lstrip("."): whole for module, name, whole in places}


def _is_form_of(managed: Any, parameter: nn.Parameter) -> bool:
    """Whether it is what fully_shard itself puts in the place of a part, for as long as it is gathered."""
    forms = (getattr(managed, "_unsharded_param", None), getattr(managed, "_sharded_post_forward_param", None))
    return any(parameter is each for each in forms)


def _has_unsent(managed: Any, *, gradient: torch.Tensor | None) -> bool:
    """Whether a gradient waits beside the part's own, or has been put there whole."""
    gathered = getattr(managed, "_unsharded_param", None)
    return (
        managed.unsharded_accumulated_grad is not None
        or (gathered is not None and gathered.grad is not None)
        or (gradient is not None and not hasattr(gradient, "full_tensor"))
    )


def _refuse_to_pass_over(lost: Mapping[nn.Parameter, str]) -> None:
    """Make it an error that an optimizer steps on parameters without their gradients, until they have others.

    Args:
        lost: names of parameters whose gradients have ended with the block.
    """
    names = WeakIdKeyDictionary(lost)

    def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for each in [each for each in parameters_of(optimizer) if each in names]:
            if each.grad is None and each.requires_grad:
                raise SyncError(
                    f"{type(optimizer).__name__} steps after the block in which the gradient of {names[each]} was made",
                    why="under fsdp gradients are in parts, which end with the block: the step would train nothing",
                    fix="put the step inside the block: the whole loop belongs there",
                )
            del names[each]
        if not names:
            handle.remove()

    handle = register_optimizer_step_pre_hook(before_step)


def _refuse_former(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    raise SyncError(
        f"{type(optimizer).__name__} holds parts of a model whose fsdp block has ended",
        why="it was made inside that block, and its steps would train nothing",
        fix="make it before the block and name it, parallel_model(model, optimizers=optimizer), or make a new one",
    )
