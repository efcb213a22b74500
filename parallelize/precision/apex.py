"""Mixed precision by NVIDIA Apex, for installations that still have `apex.amp`.

enter the block      amp.initialize: Apex replaces parameters of optimizers by masters (O2),
                     patches torch's functions (O1), and sets a `forward` on the models
loss.backward()      runs inside amp.scale_loss
clip_grad_norm_      clips the masters
leave the block      everything of this is undone; the trained values stay
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

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

# The last tag of Apex with `apex.amp`: the next one, 25.07, has none. The options build the kernels
# that `scale_loss` and the masters use, as Apex's README says.
_LAST_WITH_AMP = "25.05"
_BUILD = (
    f"git clone --branch {_LAST_WITH_AMP} https://github.com/NVIDIA/apex && "
    "pip install -v --no-cache-dir --no-build-isolation "
    "--config-settings '--build-option=--cpp_ext' --config-settings '--build-option=--cuda_ext' "
    "./apex"
)

# Attributes of an optimizer that have the result of the training.
_TRAINED = ("param_groups", "state", "defaults")


class _Trained(NamedTuple):
    """An optimizer that Apex changes.

    Args:
        optimizer: the optimizer.
        parameters: its parameters before the block, in their order.
    """

    optimizer: Any
    parameters: list[torch.Tensor]


class ApexPrecision(LeveledPrecision):
    """Apex's `amp.initialize`, `amp.scale_loss` and `amp.master_params`, in an unchanged loop.

    Apex's rules apply: each backward pass updates the loss scale, and inf skips the next step of
    every optimizer.

    Source: https://nvidia.github.io/apex/amp.html, https://nvidia.github.io/apex/advanced.html
    """

    name = "apex"
    dtypes: ClassVar[Mapping[str, frozenset[torch.dtype]]] = {"cuda": frozenset({torch.float16})}
    default_level = "O2"

    @override
    @contextlib.contextmanager
    def open(self, request: PrecisionRequest) -> Iterator[Session]:
        """Run a block in mixed precision by Apex.

        Apex ignores the scale options of the request: it doubles the scale after 2000 steps, and
        halves it on inf. No backend that shards gradients supports it.

        Raises:
            MissingDependencyError: Apex is not installed, or has no `amp`.
            ConfigError: no optimizer holds a parameter of the models.
        """
        library = _apex_amp()
        models = request.models
        trained = _optimizers_of(request)
        optimizers = [entry.optimizer for entry in trained]
        level = self.resolve(request.amp, device=request.device, world=request.world).level
        loss_scale: str | float = 1.0
        if level in {"O1", "O2"}:
            loss_scale = "dynamic"
        with contextlib.ExitStack() as stack:
            stack.callback(_deactivate, library)
            _restore_at_end(stack, models, trained)
            with contextlib.ExitStack() as rebinding:
                for model in models:
                    rebinding.enter_context(_rebindable_forward(model))
                library.initialize(
                    list(models),
                    optimizers,
                    opt_level=level,
                    loss_scale=loss_scale,
                    verbosity=0,
                )
            if level == "O3":
                # Under O2, Apex moves the states to the masters as they are.
                cast_states(models, optimizers)
            run_scaled = functools.partial(_run_scaled, library, optimizers)
            stack.enter_context(subscribed(Order.SCALE, run_scaled))
            stack.enter_context(clipping_instead(functools.partial(_masters_of, trained)))
            yield ApexSession(library)


def _optimizers_of(request: PrecisionRequest) -> list[_Trained]:
    """Return the optimizers of the models of a block.

    Raises:
        ConfigError: there are none.
    """
    parameters: list[torch.Tensor] = []
    for model in request.models:
        parameters.extend(all_parameters(model))
    optimizers = live_optimizers(parameters, also=request.optimizers)
    trained = [_Trained(optimizer, parameters_of(optimizer)) for optimizer in optimizers]
    if not trained:
        raise ConfigError(
            "amp_engine='apex' without optimizers",
            why="Apex changes the optimizers together with the models",
            fix="construct them before the block, or pass those that are not found: "
            "parallel_model(model, optimizers=optimizer); or use amp_engine='native'",
        )
    return trained


def _apex_amp() -> Any:
    """Import and return `apex.amp`; only for a block with Apex, because few users have it."""
    try:
        apex = importlib.import_module("apex")
    except ImportError as exc:
        raise _missing_apex(
            "apex cannot be imported", "amp_engine='apex' needs NVIDIA's Apex"
        ) from exc
    if not hasattr(apex, "amp"):
        raise _missing_apex(
            f"the installed apex has no amp: {apex}",
            "NVIDIA removed apex.amp in 2025, and PyPI's package of the name apex is unrelated",
        )
    return apex.amp


def _missing_apex(fault: str, why: str) -> MissingDependencyError:
    return MissingDependencyError(
        fault,
        why=why,
        fix="use amp_engine='native', which has the same levels; "
        f"or build {_LAST_WITH_AMP}, the last Apex that has it: {_BUILD}",
    )


class ApexSession(Session):
    """Session of a block: saves and loads Apex's state.

    The casts are in the forward methods that Apex patches.

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


def _restore_at_end(
    stack: contextlib.ExitStack, models: Sequence[nn.Module], trained: Sequence[_Trained]
) -> None:
    """Undo Apex's changes when the stack closes, but keep the trained values.

    Args:
        stack: runs what is added last first.
        models: models of the block, as they are before Apex's changes.
        trained: optimizers of the block, as they are before Apex's changes.
    """
    for optimizer, parameters in trained:
        attributes = vars(optimizer)
        before = {name: attributes[name] for name in attributes if name not in _TRAINED}
        stack.callback(_restore_entries, attributes, before, keep=_TRAINED)
        stack.callback(_restore_parameters, optimizer, parameters)
    optimizers = [entry.optimizer for entry in trained]
    stack.enter_context(dtypes_kept(models, optimizers))
    for model in models:
        for module in model.modules():
            hooks = module._state_dict_hooks
            stack.callback(_restore_entries, hooks, dict(hooks))
        attributes = vars(model)
        if "forward" in attributes:
            # The user has set a forward on the instance.
            stack.callback(attributes.__setitem__, "forward", attributes["forward"])
        stack.callback(attributes.pop, "forward", None)
        stack.callback(_drop_half_gradients, model)


def _restore_entries(
    entries: dict[Any, Any], before: dict[Any, Any], keep: Collection[str] = ()
) -> None:
    """Make entries equal to what they were.

    Args:
        entries: a dictionary, which is changed.
        before: a copy from before the change.
        keep: names of entries that stay as they are.
    """
    for name in entries.keys() - before.keys() - set(keep):
        del entries[name]
    entries.update(before)


@torch.no_grad()
def _restore_parameters(optimizer: Any, parameters: list[torch.Tensor]) -> None:
    """Put the parameters of the models where the masters are, with their values and state.

    Args:
        optimizer: an optimizer, whose groups and state are changed.
        parameters: its parameters before the block; Apex has put a master in the place of each.
    """
    state = optimizer.state
    remaining = iter(parameters)
    for group in optimizer.param_groups:
        # Parameters that were added in the block come after these: they have no masters.
        for index, (master, parameter) in enumerate(
            zip(list(group["params"]), remaining, strict=False)
        ):
            if master is parameter:
                continue
            parameter.copy_(master)
            group["params"][index] = parameter
            if master in state:
                state[parameter] = state.pop(master)


def _drop_half_gradients(model: nn.Module) -> None:
    """Drop gradients that Apex has left scaled."""
    for parameter in all_parameters(model):
        if parameter.dtype is torch.float16:
            parameter.grad = None


class _Caller(threading.local):
    """Whose forward this thread runs.

    Attributes:
        model: the model that was called, which may be a copy of the user's; None: no call runs.
    """

    model: nn.Module | None = None


@contextlib.contextmanager
def _rebindable_forward(model: nn.Module) -> Iterator[None]:
    """Make the forward that Apex sets in the context a method.

    Apex sets a function on the instance, which is bound to the model. A copy of the model would
    then run the weights of the original.

        forward(copy, x)       remembers the copy
        └── patched(x)         Apex's: casts inputs and outputs
            └── call(x)        runs the user's forward of the copy
    """
    caller = _Caller()
    original = model.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        function = getattr(original, "__func__", None)
        if function is None:
            # What the user has set on the instance is no method, and knows its own model.
            return original(*args, **kwargs)
        return function(caller.model, *args, **kwargs)

    model.__dict__["forward"] = call
    yield
    patched = model.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer_model = caller.model
        caller.model = self
        try:
            return patched(*args, **kwargs)
        finally:
            caller.model = outer_model

    model.__dict__["forward"] = types.MethodType(forward, model)


def _run_scaled(
    library: Any, optimizers: list[torch.optim.Optimizer], backward_pass: Pass, run: Run
) -> None:
    """Run a backward pass inside `scale_loss`.

    Raises:
        ConfigError: the pass starts from several tensors.
    """
    roots = backward_pass.roots
    if len(roots) != 1:
        raise ConfigError(
            f"backward from {len(roots)} tensors at once under amp_engine='apex'",
            why="Apex scales one loss per backward",
            fix="add the losses, call backward once for each, or use amp_engine='native'",
        )
    with library.scale_loss(roots[0], optimizers) as scaled_loss:
        run(replace(backward_pass, roots=(scaled_loss,)))


def _masters_of(trained: Sequence[_Trained], tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the masters of parameters, and other tensors as they are."""
    master_by_id: dict[int, torch.Tensor] = {}
    for optimizer, parameters in trained:
        # Apex has put the masters at the positions of the parameters.
        for parameter, master in zip(parameters, parameters_of(optimizer), strict=False):
            master_by_id[id(parameter)] = master
    return [master_by_id.get(id(tensor), tensor) for tensor in tensors]


def _deactivate(library: Any) -> None:
    """Remove Apex's patches of torch functions (O1); Apex has no public function for it."""
    handle = getattr(library._amp_state, "handle", None)
    if handle is not None:
        handle._deactivate()
