"""Mixed precision by NVIDIA Apex, for installations that still have `apex.amp`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from parallelize.errors import ConfigError, MissingDependencyError
from parallelize.plugins.base import PrecisionRequest, Session
from parallelize.precision.levels import LeveledPrecision
from parallelize.precision.weight_casting import cast_states, dtypes_kept
from parallelize.run.live_optimizers import live_optimizers
from parallelize.torch_patches.backward import Order, Pass, Run, subscribed
from parallelize.torch_patches.clipping import clipping_instead
from parallelize.torch_patches.module_tensors import all_parameters
from parallelize.torch_patches.step import parameters_of

__all__ = ["ApexPrecision", "ApexSession"]

_TRAINED = ("param_groups", "state", "defaults")  # attributes of an optimizer


class ApexPrecision(LeveledPrecision):
    """Apex's `amp.initialize`, `amp.scale_loss` and `amp.master_params` in an unchanged training loop.

    Apex's rules apply: each backward pass updates the loss scale, and inf skips the next step of every optimizer.

    Source: https://nvidia.github.io/apex/amp.html, https://nvidia.github.io/apex/advanced.html
    """

    name = "apex"
    dtypes: ClassVar[Mapping[str, frozenset[torch.dtype]]] = {"cuda": frozenset({torch.float16})}
    default_level = "O2"

    @override
    @contextlib.contextmanager
    def open(self, request: PrecisionRequest) -> Iterator[Session]:
        """Run a block in mixed precision by Apex.

        Apex ignores the scale options of the request: it doubles the scale after 2000 steps, and halves it on inf. No
        backend that shards gradients supports it.

        Raises:
            MissingDependencyError: Apex is not installed, or has no `amp`.
            ConfigError: no optimizer holds a parameter of the models.
        """
        library, models = _apex_amp(), request.models
        parameters = [each for model in models for each in all_parameters(model)]
        held = [(each, parameters_of(each)) for each in live_optimizers(parameters, also=request.optimizers)]
        if not held:
            raise ConfigError(
                "amp_engine='apex' without optimizers",
                why="Apex changes the optimizers together with the models",
                fix="construct them before the block, or pass those that are not found: "
                "parallel_model(model, optimizers=optimizer); or use amp_engine='native'",
            )
        level = self.resolve(request.amp, device=request.device, world=request.world).level
        found = [each for each, _ in held]
        with contextlib.ExitStack() as stack:
            stack.callback(_deactivate, library)
            _restore_at_end(stack, models, held)
            with contextlib.ExitStack() as rebinding:
                for model in models:
                    rebinding.enter_context(_rebindable_forward(model))
                loss_scale = "dynamic" if level in {"O1", "O2"} else 1.0
                library.initialize(list(models), found, opt_level=level, loss_scale=loss_scale, verbosity=0)
            if level == "O3":  # under O2, Apex moves the states to the masters as they are
                cast_states(models, found)
            stack.enter_context(subscribed(Order.SCALE, functools.partial(_run_scaled, library, found)))
            stack.enter_context(clipping_instead(functools.partial(_masters_of, held)))
            yield ApexSession(library)


def _apex_amp() -> Any:
    """Import and return `apex.amp`; lazily, because few users have it."""
    try:
        apex = importlib.import_module("apex")
    except ImportError as exc:
        raise _missing_apex("apex cannot be imported", "amp_engine='apex' needs NVIDIA's Apex") from exc
    if not hasattr(apex, "amp"):
        raise _missing_apex(
            f"the installed apex has no amp: {apex}",
            "NVIDIA removed apex.amp in 2025, and PyPI's package of the name apex is unrelated",
        )
    return apex.amp


def _missing_apex(what: str, why: str) -> MissingDependencyError:
    fix = "use amp_engine='native', which has the same levels; or build an Apex from before 2025 from its sources"
    return MissingDependencyError(what, why=why, fix=fix)


class ApexSession(Session):
    """Session of a block: saves and loads Apex's state; the casts are in the forward methods that Apex patches.

    Args:
        library: the module apex.amp.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of Apex's loss scalers."""
        return dict(self._library.state_dict())

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._library.load_state_dict(dict(state))


def _restore_at_end(stack: contextlib.ExitStack, models: Sequence[nn.Module], held: list[tuple[Any, Any]]) -> None:
    """Undo Apex's changes of models and optimizers when the stack closes, but keep the trained values."""
    for optimizer, parameters in held:
        kept = {name: value for name, value in vars(optimizer).items() if name not in _TRAINED}
        stack.callback(_restore_entries, vars(optimizer), kept, but=_TRAINED)
        stack.callback(_restore_parameters, optimizer, parameters)
    stack.enter_context(dtypes_kept(models, [each for each, _ in held]))
    for model in models:
        for part in model.modules():
            stack.callback(_restore_entries, part._state_dict_hooks, dict(part._state_dict_hooks))
        attributes = vars(model)
        stack.callback(attributes.update, {name: value for name, value in attributes.items() if name == "forward"})
        stack.callback(attributes.pop, "forward", None)
        stack.callback(_drop_half_gradients, model)


def _restore_entries(entries: dict[Any, Any], before: dict[Any, Any], but: Collection[str] = ()) -> None:
    for name in entries.keys() - before.keys() - set(but):
        del entries[name]
    entries.update(before)


@torch.no_grad()
def _restore_parameters(optimizer: Any, parameters: list[torch.Tensor]) -> None:
    """Put the parameters of the models in the place of their masters, with the masters' values and state."""
    originals, state = iter(parameters), optimizer.state
    for group in optimizer.param_groups:
        for index, (master, parameter) in enumerate(zip(list(group["params"]), originals, strict=False)):
            if master is not parameter:
                parameter.copy_(master)
                group["params"][index] = parameter
                state.update({parameter: state.pop(master)} if master in state else {})


def _drop_half_gradients(model: nn.Module) -> None:
    """Drop gradients that Apex has left scaled."""
    for each in all_parameters(model):
        each.grad = None if each.dtype is torch.float16 else each.grad


@contextlib.contextmanager
def _rebindable_forward(model: nn.Module) -> Iterator[None]:
    """Make the forward that Apex sets in the context a method: a copy of the model then runs its own weights."""
    caller, original = threading.local(), model.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        function = getattr(original, "__func__", None)
        return original(*args, **kwargs) if function is None else function(caller.model, *args, **kwargs)

    model.__dict__["forward"] = call
    yield
    patched = model.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer, caller.model = getattr(caller, "model", None), self
        try:
            return patched(*args, **kwargs)
        finally:
            caller.model = outer

    model.__dict__["forward"] = types.MethodType(forward, model)


def _run_scaled(library: Any, optimizers: list[torch.optim.Optimizer], each: Pass, run: Run) -> None:
    """Run a backward pass inside `scale_loss`."""
    if len(each.roots) != 1:
        raise ConfigError(
            f"backward from {len(each.roots)} tensors at once under amp_engine='apex'",
            why="Apex scales one loss per backward",
            fix="add the losses, call backward once for each, or use amp_engine='native'",
        )
    with library.scale_loss(each.roots[0], optimizers) as scaled_loss:
        run(replace(each, roots=(scaled_loss,)))


def _masters_of(held: list[tuple[Any, Any]], tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the masters of parameters, and other tensors as they are."""
    # Apex has put the masters at the positions of the parameters.
    pairs = (zip(before, parameters_of(optimizer), strict=False) for optimizer, before in held)
    masters = {id(parameter): master for parameter, master in chain.from_iterable(pairs)}
    return [masters.get(id(tensor), tensor) for tensor in tensors]


def _deactivate(library: Any) -> None:
    """Remove Apex's patches of torch functions (O1); Apex has no public function for it."""
    handle = getattr(library._amp_state, "handle", None)
    if handle is not None:
        handle._deactivate()
