"""Checks of sharded parameters: refuses replaced parameters, and steps whose gradients are not reduced or freed."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils.weak import WeakIdKeyDictionary

from parallelize.errors import ConfigError, SyncError
from parallelize.runtime.autograd_graph import gradient_version
from parallelize.torch_patches import step
from parallelize.torch_patches.private import self_test
from parallelize.torch_patches.step import parameters_of

__all__ = ["Registration", "ShardedParameterGuard"]

Registration = tuple[nn.Module, str, nn.Parameter]
"""Module that registers a parameter, its name there, and the user's Parameter object (the original)."""


class ShardedParameterGuard:
    """Checks the parameters of a sharded model before each forward and optimizer step.

    Args:
        model: the user's model.
        root: the root of fully_shard.
        registrations: all registrations of the model's parameters.
        shards: id of an original -> this rank's shard of it, a DTensor parameter.
    """

    def __init__(
        self, model: nn.Module, *, root: nn.Module, registrations: Sequence[Registration], shards: Mapping[int, Any]
    ) -> None:
        _require_parameter_forms()
        self._model = model
        self._registrations = registrations
        self._shards = shards
        self._names = {id(shards[id(each)]): name for name, each in _names_of(model, registrations).items()}
        states = [module._get_fsdp_state() for module in root.modules() if isinstance(module, FSDPModule)]
        self._groups: list[list[Any]] = [
            list(each._fsdp_param_group.fsdp_params) for each in states if each._fsdp_param_group is not None
        ]
        self._fsdp_params: dict[int, Any] = {id(each.sharded_param): each for group in self._groups for each in group}
        self._frozen_at_first: list[Any] | None = None
        self._requires_grad: dict[int, bool] = {}
        self._stepped_versions: dict[int, tuple[int, int]] = {}

    @property
    def fsdp_params(self) -> list[Any]:
        """fully_shard's records of the model's parameters."""
        return list(self._fsdp_params.values())

    def before_forward(self) -> None:
        """Check, before the all-gather of a forward, that the model still registers its shards.

        Raises:
            SyncError: a parameter was replaced.
            ConfigError: one is trained, in mixed precision, of a group that was frozen at the first forward.
        """
        self.apply_requires_grad()
        self._refuse_late_training()
        for module, name, original in self._registrations:
            sharded = self._shards[id(original)]
            current = module._parameters.get(name)
            fsdp_param = self._fsdp_params.get(id(sharded))
            if current is not None and current is not sharded and not _is_unsharded_form(fsdp_param, current):
                raise SyncError(
                    f"{self._names[id(sharded)]} of {type(self._model).__name__} was replaced inside the block",
                    why="fsdp would compute with the parameters that it sharded at the entry of the block",
                    fix="drop assign=True of load_state_dict, copy into the parameter, or change the model before the "
                    "block; call a method named in methods= for a functional call",
                )

    def apply_requires_grad(self) -> None:
        """Set requires_grad of shards as the user has set it on full parameters, which a forward leaves registered."""
        for module, name, original in self._registrations:
            sharded, current = self._shards[id(original)], module._parameters.get(name)
            if current is None or current is sharded:
                continue
            if self._requires_grad.get(id(sharded)) is sharded.requires_grad is not current.requires_grad:
                sharded.requires_grad_(current.requires_grad)
        self._requires_grad = {key: each.sharded_param.requires_grad for key, each in self._fsdp_params.items()}

    def _refuse_late_training(self) -> None:
        """Refuse training of a group for which fully_shard chose no dtype of gradients at the first forward."""
        if self._frozen_at_first is None:
            frozen = [group for group in self._groups if not any(each.sharded_param.requires_grad for each in group)]
            self._frozen_at_first = list(itertools.chain.from_iterable(frozen))
            return
        for each in self._frozen_at_first:
            if each.sharded_param.requires_grad and each.param_dtype is not None:
                raise ConfigError(
                    f"{self._names[id(each.sharded_param)]} of {type(self._model).__name__} is trained from now on",
                    why=f"fsdp, with parameters in {each.param_dtype}, chooses the type of gradients at the first "
                    "forward of the block, when this parameter and those sharded with it were frozen",
                    fix="enter parallel_model again after the change, or use amp=True or backend='ddp'",
                )

    def before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Check the gradients of an optimizer's shards before its step.

        Raises:
            SyncError: the optimizer holds shards whose gradients are not reduced.
        """
        for each in parameters_of(optimizer):
            fsdp_param = self._fsdp_params.get(id(each))
            if fsdp_param is not None and _has_unreduced_gradient(fsdp_param, gradient=each.grad):
                raise self._unreduced_error(self._names[id(each)])

    def after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Record which gradients an optimizer has used in its step."""
        for each in parameters_of(optimizer):
            if id(each) in self._fsdp_params and each.grad is not None:
                self._stepped_versions[id(each)] = gradient_version(each.grad)

    def close(self) -> None:
        """Refuse steps whose gradients were freed with the shards."""
        shards = {original: self._shards[id(original)] for _, _, original in self._registrations}
        unused = {each: self._names[id(shard)] for each, shard in shards.items() if self._has_unused_gradient(shard)}
        if unused:
            _without_gradients.update(unused)
            _install_hook()

    def _has_unused_gradient(self, sharded: nn.Parameter) -> bool:
        """Whether a shard has a nonzero gradient that no optimizer has used."""
        gradient: Any = sharded.grad
        fsdp_param = self._fsdp_params.get(id(sharded))
        if fsdp_param is not None and _has_unreduced_gradient(fsdp_param, gradient=gradient):
            return True
        is_new = gradient is not None and self._stepped_versions.get(id(sharded)) != gradient_version(gradient)
        return is_new and bool(gradient.to_local().count_nonzero())

    def _unreduced_error(self, name: str) -> SyncError:
        return SyncError(
            f"the gradient of {name} of {type(self._model).__name__} is not averaged over the ranks",
            why="it was computed under no_sync, or by torch.autograd.grad: the step would ignore it",
            fix="run forward and backward of the last micro-batch outside of no_sync, and call backward",
        )


def _names_of(model: nn.Module, registrations: Sequence[Registration]) -> dict[str, nn.Parameter]:
    paths = {module: path for path, module in model.named_modules()}
    return {f"{paths[module]}.{name}".lstrip("."): original for module, name, original in registrations}


def _is_unsharded_form(fsdp_param: Any, parameter: nn.Parameter) -> bool:
    """Whether `parameter` is one that fully_shard itself registers in place of the shard, in a forward or after it."""
    forms = (getattr(fsdp_param, "_unsharded_param", None), getattr(fsdp_param, "_sharded_post_forward_param", None))
    return any(parameter is each for each in forms)


@self_test("backend='fsdp'", instead="use backend='ddp'")
def _require_parameter_forms() -> bool:
    """fully_shard keeps its own forms of a parameter where `_is_unsharded_form` looks for them."""
    functions = [each for each in vars(FSDPParam).values() if inspect.isfunction(each)]
    names = {name for each in functions for name in inspect.unwrap(each).__code__.co_names}
    return names.issuperset(("_unsharded_param", "_sharded_post_forward_param"))


def _has_unreduced_gradient(fsdp_param: Any, *, gradient: torch.Tensor | None) -> bool:
    """Whether the parameter has an unsharded gradient that was not reduce-scattered into its shard's gradient."""
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    return (
        fsdp_param.unsharded_accumulated_grad is not None
        or (unsharded is not None and unsharded.grad is not None and not hasattr(unsharded.grad, "full_tensor"))
        or (gradient is not None and not hasattr(gradient, "full_tensor"))
    )


# Originals whose unused gradients were freed with the shards -> their names, for the error.
_without_gradients: WeakIdKeyDictionary = WeakIdKeyDictionary()


@functools.cache
def _install_hook() -> None:
    """Register `_refuse_without_gradients` once: a hook that removed itself would change a dict that torch iterates."""
    step.before_step(_refuse_without_gradients)


def _refuse_without_gradients(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Refuse steps on originals without gradients, until they have new ones."""
    for each in [each for each in parameters_of(optimizer) if _without_gradients and each in _without_gradients]:
        if each.grad is None and each.requires_grad:
            name = _without_gradients[each]
            raise SyncError(
                f"{type(optimizer).__name__} steps after the block in which {name} got its gradient",
                why="under fsdp gradients are sharded, and freed with the block: the step would have no effect",
                fix="put the step inside the block: the whole loop belongs there",
            )
        del _without_gradients[each]
