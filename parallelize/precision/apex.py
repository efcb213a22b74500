"""Mixed precision by NVIDIA Apex, where an Apex that still has `amp` is installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from parallelize.cluster.world import World
from parallelize.errors import ConfigError, MissingDependencyError
from parallelize.plugins.base import Amp, Precision, Session
from parallelize.precision.apex_restore import Masters
from parallelize.precision.levels import describe, resolve
from parallelize.precision.replace_attribute import replaced

__all__ = ["PLUGIN", "ApexPrecision", "ApexSession"]

_CLIPPINGS = ("clip_grad_norm_", "clip_grad_value_")


class ApexPrecision(Precision):
    """Apex's `amp.initialize`, `amp.scale_loss` and `amp.master_params` under an unchanged loop.

    Its rules are Apex's: the scale moves at each backward, and an inf leaves out the next step of every optimizer.

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
        """Mixed precision for a block, by Apex.

        Args:
            amp: the request; its rules of growth are Apex's own (doubled after 2000 steps, halved after inf).
            models: the user's own objects, already on `device`.
            optimizers: all that step in the block.
            device: the first device this process drives.
            world: this process among the others.
            sharded: no backend that shards gradients has Apex.

        Raises:
            MissingDependencyError: there is no Apex, or one without `amp`.
            ConfigError: no optimizer was named.
        """
        del sharded
        library = _apex_amp()
        if not optimizers:
            raise ConfigError(
                "amp_engine='apex' without optimizers",
                why="Apex changes the optimizers together with the models",
                fix="name them: parallel_model(model, optimizers=optimizer); or use amp_engine='native'",
            )
        amp = resolve(amp, self, device=device, world=world)
        return _at_work(library, amp=amp, models=list(models), optimizers=list(optimizers))


def _apex_amp() -> Any:
    """Apex's `amp`; imported here, so that nobody else pays for it."""
    try:
        apex = importlib.import_module("apex")
    except ImportError as exc:
        raise _missing("apex cannot be imported", "amp_engine='apex' needs NVIDIA's Apex") from exc
    if not hasattr(apex, "amp"):
        place = getattr(apex, "__file__", None) or "?"
        raise _missing(
            f"this apex has no amp: {place}",
            "NVIDIA removed apex.amp in 2025, and the package that pip finds under the name apex is an unrelated one",
        )
    return apex.amp


def _missing(what: str, why: str) -> MissingDependencyError:
    fix = "use amp_engine='native', which has the same levels; or build an Apex from before 2025 from its sources"
    return MissingDependencyError(what, why=why, fix=fix)


class ApexSession(Session):
    """Apex's own casts are in the models' forward already; what is left is its state.

    Args:
        library: the module apex.amp.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def state_dict(self) -> dict[str, Any]:
        """Apex's loss scalers."""
        state: dict[str, Any] = self._library.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict` of Apex's."""
        if state:
            self._library.load_state_dict(dict(state))


@contextlib.contextmanager
def _at_work(
    library: Any, *, amp: Amp, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]
) -> Iterator[ApexSession]:
    masters = Masters(models, optimizers)
    with contextlib.ExitStack() as stack:
        stack.callback(_deactivate, library)
        stack.callback(masters.give_back)
        library.initialize(
            models,
            optimizers,
            opt_level=amp.level,
            loss_scale="dynamic" if amp.level in {"O1", "O2"} else 1.0,
            verbosity=0,
        )
        stack.enter_context(
            replaced(torch.autograd, "backward", _backward(torch.autograd.backward, library, optimizers))
        )
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in _CLIPPINGS:
                stack.enter_context(replaced(owner, name, _clipping(getattr(owner, name), masters)))
        yield ApexSession(library)


def _backward(
    original: Callable[..., None], library: Any, optimizers: list[torch.optim.Optimizer]
) -> Callable[..., None]:
    """torch.autograd.backward inside `scale_loss`; a reentrant checkpoint's own backward is inside it already."""

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            original(tensors, *args, **kwargs)
            return
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if len(roots) != 1:
            raise ConfigError(
                f"backward from {len(roots)} tensors at once under amp_engine='apex'",
                why="Apex scales one loss per backward",
                fix="add the losses, call backward once for each, or use amp_engine='native'",
            )
        with library.scale_loss(roots[0], optimizers) as scaled:
            original(scaled, *args, **kwargs)

    return backward


def _clipping(original: Callable[..., Any], masters: Masters) -> Callable[..., Any]:
    """A function of torch.nn.utils that clips the gradients the optimizers will use, as `amp.master_params` has it."""

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given: Iterable[torch.Tensor] = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return original([masters.of(each) for each in given], *args, **kwargs)

    return clip


def _deactivate(library: Any) -> None:
    """Take Apex's patches off torch's functions (O1). Apex has no public way; its handle keeps what was there."""
    state: Any = getattr(getattr(library, "_amp_state", None), "_amp_state", None)
    handle = getattr(state, "handle", None)
    if handle is not None:
        handle._deactivate()


PLUGIN = ApexPrecision
