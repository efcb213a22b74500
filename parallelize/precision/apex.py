"""Mixed precision by NVIDIA Apex, for installations that still have `apex.amp`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from parallelize.cluster.world import World
from parallelize.errors import ConfigError, MissingDependencyError
from parallelize.plugins.base import Amp, Precision, Session
from parallelize.precision.apex_restore import ApexSnapshot
from parallelize.precision.levels import describe, resolve
from parallelize.runtime.live_optimizers import live_optimizers
from parallelize.torch_patches.backward import Order, Pass, Run, subscribed
from parallelize.torch_patches.private import replace_attribute

__all__ = ["PLUGIN", "ApexPrecision", "ApexSession"]

_CLIPPING_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")


class ApexPrecision(Precision):
    """Apex's `amp.initialize`, `amp.scale_loss` and `amp.master_params` in an unchanged training loop.

    Apex's rules apply: each backward pass updates the loss scale, and inf skips the next step of every optimizer.

    Source: https://nvidia.github.io/apex/amp.html, https://nvidia.github.io/apex/advanced.html
    """

    name = "apex"
    dtypes: ClassVar[Mapping[str, frozenset[torch.dtype]]] = {"cuda": frozenset({torch.float16})}
    default_level = "O2"

    @override
    def describe(self, amp: Amp, *, device_type: str) -> str:
        return describe(amp, self, device_type=device_type)

    @override
    def open(
        self,
        *,
        amp: Amp,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        device: torch.device,
        world: World,
        sharded: bool = False,
    ) -> contextlib.AbstractContextManager[Session]:
        """Return the context of mixed precision by Apex for a block.

        Args:
            amp: the request; Apex ignores its scale options, and doubles the scale after 2000 steps, halves it on inf.
            models: the user's own objects, already on `device`.
            optimizers: optimizers that step in the block, in addition to those that are found.
            device: the first device this process drives.
            world: ranks and sizes of this process.
            sharded: ignored, because no backend that shards gradients supports Apex.

        Raises:
            MissingDependencyError: Apex is not installed, or has no `amp`.
            ConfigError: no optimizer holds a parameter of the models.
        """
        del sharded
        library = _apex_amp()
        parameters = [one for each in models for one in each.parameters()]
        optimizers = live_optimizers(parameters, also=optimizers)
        if not optimizers:
            raise ConfigError(
                "amp_engine='apex' without optimizers",
                why="Apex changes the optimizers together with the models",
                fix="construct them before the block, or pass those that are not found: "
                "parallel_model(model, optimizers=optimizer); or use amp_engine='native'",
            )
        amp = resolve(amp, self, device=device, world=world)
        return _apex_block(library, amp=amp, models=list(models), optimizers=list(optimizers))


def _apex_amp() -> Any:
    """Import and return `apex.amp`; lazily, because few users have it."""
    try:
        apex = importlib.import_module("apex")
    except ImportError as exc:
        raise _missing_apex("apex cannot be imported", "amp_engine='apex' needs NVIDIA's Apex") from exc
    if not hasattr(apex, "amp"):
        path = getattr(apex, "__file__", None) or "?"
        raise _missing_apex(
            f"the installed apex has no amp: {path}",
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
        snapshot: positions of the parameters in the optimizers.
    """

    def __init__(self, library: Any, snapshot: ApexSnapshot) -> None:
        self._library = library
        self._snapshot = snapshot

    def state_dict(self) -> dict[str, Any]:
        """Return the state of Apex's loss scalers."""
        state: dict[str, Any] = self._library.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        if state:
            self._library.load_state_dict(dict(state))


@contextlib.contextmanager
def _apex_block(
    library: Any, *, amp: Amp, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]
) -> Iterator[ApexSession]:
    snapshot = ApexSnapshot(models, optimizers)
    with contextlib.ExitStack() as stack:
        stack.callback(_deactivate, library)
        stack.callback(snapshot.restore)
        with _rebindable_forwards(models):
            library.initialize(
                models,
                optimizers,
                opt_level=amp.level,
                loss_scale="dynamic" if amp.level in {"O1", "O2"} else 1.0,
                verbosity=0,
            )
        stack.enter_context(subscribed(Order.SCALE, functools.partial(_run_scaled, library, optimizers)))
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in _CLIPPING_FUNCTIONS:
                stack.enter_context(replace_attribute(owner, name, _master_clipping(getattr(owner, name), snapshot)))
        yield ApexSession(library, snapshot)


@contextlib.contextmanager
def _rebindable_forwards(models: Sequence[nn.Module]) -> Iterator[None]:
    """Make the forwards that Apex sets in the context methods: a copy of the model then runs its own weights."""
    caller = threading.local()
    originals = [each.forward for each in models]
    for model, original in zip(models, originals, strict=True):
        model.__dict__["forward"] = functools.partial(_call_original, caller, original)
    yield
    for model in models:
        model.__dict__["forward"] = types.MethodType(_forward_of(model.forward, caller), model)


def _call_original(caller: threading.local, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    function = getattr(original, "__func__", None)
    return original(*args, **kwargs) if function is None else function(caller.model, *args, **kwargs)


def _forward_of(patched: Callable[..., Any], caller: threading.local) -> Callable[..., Any]:
    """Build a function of a model and its inputs from a forward that Apex has patched."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer, caller.model = getattr(caller, "model", None), self
        try:
            return patched(*args, **kwargs)
        finally:
            caller.model = outer

    return forward


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


def _master_clipping(original: Callable[..., Any], snapshot: ApexSnapshot) -> Callable[..., Any]:
    """Build a clipping function of torch.nn.utils that clips the gradients of the master parameters."""

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        tensors: Iterable[torch.Tensor] = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return original(snapshot.masters_of(tensors), *args, **kwargs)

    return clip


def _deactivate(library: Any) -> None:
    """Remove Apex's patches of torch functions (O1); Apex has no public function for it."""
    state: Any = getattr(getattr(library, "_amp_state", None), "_amp_state", None)
    handle = getattr(state, "handle", None)
    if handle is not None:
        handle._deactivate()


PLUGIN = ApexPrecision
