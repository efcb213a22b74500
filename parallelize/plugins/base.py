"""What the author of a backend, a launcher or a precision engine reads: the contract of each kind of plug-in.

A plug-in declares as data what it can do; `layout` checks every request against that data in one loop, and README's
support table is printed from it. No code anywhere asks for a plug-in's name.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from parallelize.cluster.world import Node, World
from parallelize.plugins.traffic import Traffic

__all__ = [
    "LEVELS",
    "Amp",
    "Backend",
    "Engine",
    "Inner",
    "Launcher",
    "Level",
    "LocalEngine",
    "Precision",
    "Session",
]

Level = Literal["O0", "O1", "O2", "O3"]
LEVELS: tuple[Level, ...] = ("O0", "O1", "O2", "O3")


@dataclass(frozen=True)
class Amp:
    """What mixed precision the user asked for.

    Args:
        level: Apex's name for how much runs in half precision; None: the engine's own default (native O1, apex O2).
        dtype: the half-precision type; None: bf16 where the device does it well, else fp16.
        init_scale: first loss scale, fp16 only.
        growth_factor: the scale is multiplied by this after `growth_interval` steps without inf or nan.
        backoff_factor: the scale is multiplied by this after a step with inf or nan.
        growth_interval: steps without inf or nan before the scale grows.
        communication_dtype: type in which gradients travel between processes; None: that of the gradients.
    """

    level: Level | None = None
    dtype: torch.dtype | None = None
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    communication_dtype: torch.dtype | None = None


class Session:
    """Mixed precision while one `parallel_model` block lasts; this one computes in the types that it finds.

    A routed call passes through it twice, because autocast belongs to a thread and an engine may have several:

        the user's thread       session.route(engine.module, ...)       (or engine.local)
                                    the engine: DistributedDataParallel, DataParallel, ...
        the replica's thread            Inner.forward -> session.forward(the user's forward, ...)
    """

    communication_dtype: torch.dtype | None = None
    """Type in which gradients should travel between processes; None: that of the gradients."""
    weights_dtype: torch.dtype | None = None
    """Type in which a backend that hands modules their weights does so; None: their own."""
    fp32_modules: tuple[type[nn.Module], ...] = ()
    """Classes of modules that get them in their own type all the same."""

    def bind(self, models: Sequence[nn.Module]) -> None:
        """Learn the parameters of the block's models: once the engines are built, and again if the parameters change.

        Args:
            models: the user's own objects, not the engines' wrappers.
        """

    def route(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a routed forward or method as the user called it, on the user's thread, with gradients or without.

        Args:
            call: the engine's module.
            *args: the user's, as they are.
            **kwargs: the user's, as they are.
        """
        return call(*args, **kwargs)

    def forward(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward, or a routed method, inside whatever the precision needs around it.

        It runs inside the module that a backend replicates: under DataParallel once per replica, each in a thread of
        its own, so that state of a thread (autocast) must be entered here.

        Args:
            call: a method bound to the model, or to the replica of it that computes.
            *args: the user's, on the replica's device.
            **kwargs: the user's, on the replica's device.
        """
        return call(*args, **kwargs)

    def forward_with_weights(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The same for a backend that hands modules their weights in `weights_dtype` itself."""
        return self.forward(call, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same trajectory, as plain numbers; {} if nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state_dict` of a session of the same kind."""


class Inner(nn.Module):
    """The module that a backend makes parallel: it calls the user's own forward.

    Args:
        model: the user's model, a child of this module.
        found: for "forward" and every routed method, what `getattr(model, name)` was before the block.
        session: the block's precision.

    Attributes:
        method: which of them the next call means.
    """

    def __init__(self, model: nn.Module, *, found: Mapping[str, Callable[..., Any]], session: Session) -> None:
        super().__init__()
        self.model = model
        self.found = dict(found)
        self.session = session
        self.method = "forward"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method named by `method`."""
        # Not self.model: nn.Module looks its children up in the slow way.
        return self.session.forward(self.bound(self.method, self._modules["model"]), *args, **kwargs)

    def with_weights(self, *args: Any, **kwargs: Any) -> Any:
        """The same, for a backend that hands modules their weights in the session's `weights_dtype` itself."""
        call = self.bound(self.method, self._modules["model"])
        return self.session.forward_with_weights(call, *args, **kwargs)

    def bound(self, method: str, model: Any) -> Callable[..., Any]:
        """The method as it was before the block, bound to `model`: the user's, a replica or a copy of it."""
        found = self.found[method]
        if "_is_replica" in model.__dict__ or model is not self._modules["model"]:
            # DataParallel and copy.copy copy the instance's dictionary, and with it the block's routed methods.
            for name in self.found:
                model.__dict__.pop(name, None)
        return types.MethodType(found.__func__, model) if inspect.ismethod(found) else found

    @property
    def is_replicable(self) -> bool:
        """Whether every method can be bound to a replica: not so for a compiled forward on the instance."""
        return all(inspect.ismethod(found) and found.__self__ is self.model for found in self.found.values())


class Engine(abc.ABC):
    """One model, running in parallel: what a backend makes at the entry of a `parallel_model` block.

    Attributes:
        module: what a routed call runs while gradients are recorded.
        local: what it runs while they are not: it may use every device of this process, and talks to no other one,
            so that one rank alone can evaluate.
        spreads_inputs: whether the modules themselves bring inputs to their devices.
        averages: whether ranks agree only as long as every gradient has gone through `module`, which averages it; the
            block then refuses to step on any other gradient.
        is_rebuildable: whether another engine may take over when parameters were unfrozen or replaced in the block.
        refuses_copies: why the model can neither be copied nor pickled in the block; None: copies are plain models.
    """

    module: nn.Module
    local: nn.Module
    spreads_inputs: bool = False
    averages: bool = False
    is_rebuildable: bool = True
    refuses_copies: str | None = None

    def is_reduced(self, *, in_backward: bool) -> bool:
        """Whether the averaging that the last forward through `module` has announced is complete.

        Asked only of an engine that `averages`.

        Args:
            in_backward: a backward, maybe one inside another, is about to return; else no backward runs.
        """
        del in_backward
        return True

    def traffic(self) -> Traffic | None:
        """What a step sends between processes; None: nothing, or nobody knows."""
        return None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backward accumulates gradients without sending them; nothing to do by default."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def close(self, *, failed: bool) -> None:
        """Give everything back; with `failed` the block ended by an exception and no collective may run."""


class LocalEngine(Engine):
    """A model that no other process trains."""

    def __init__(self, module: nn.Module) -> None:
        self.module = self.local = module

    def close(self, *, failed: bool) -> None:
        """Nothing was taken."""


class Backend(abc.ABC):
    """How a model is parallel. A frozen dataclass: its fields are the options of `backend=DDPBackend(...)`."""

    name: ClassVar[str]
    process_per: ClassVar[Literal["device", "node"]]
    """Whether each device gets a process of its own, or one process drives all devices of its node."""
    max_nodes: ClassVar[int | None] = None
    """The most nodes it can span; None: any number."""
    single_node_of: ClassVar[str | None] = None
    """Name of the backend that takes over, with a warning, when more than `max_nodes` are asked for; None: refused."""
    device_types: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    amp: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Precision engine -> levels it can run under this backend; an engine that is not named here is refused."""
    places_model: ClassVar[bool] = False
    """Whether it brings the model to its devices itself: one that no device holds is then never whole on one."""
    shards_gradients: ClassVar[bool] = False
    """Whether each rank holds only its part of a gradient: then all must agree before a step with inf is skipped."""
    cannot_keep: ClassVar[Mapping[str, str]] = {}
    """What the model in the block is not: property (a name of `contracts`' tests) -> the reason, as users read it."""

    @abc.abstractmethod
    def engine(
        self,
        inner: Inner,
        *,
        world: World,
        devices: tuple[torch.device, ...],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        restore: bool = True,
    ) -> Engine:
        """Make `inner` parallel.

        Args:
            inner: calls the user's forward; its parameters are on `devices[0]` already, unless it `places_model`.
            world: this process among the others; their process group is initialised.
            devices: the devices this process drives; one unless `process_per` is "node".
            optimizers: those the user named; a backend that replaces parameters points them to the new ones.
            restore: whether `Engine.close` makes a model whole again whose weights were spread over the ranks.

        Raises:
            ConfigError: a model or options that this backend cannot run.
        """


class Precision(abc.ABC):
    """In which types a model computes."""

    name: ClassVar[str]
    dtypes: ClassVar[Mapping[str, frozenset[torch.dtype]]]
    """Device type -> half-precision types it runs there; a device type that is not named here is refused."""
    default_level: ClassVar[Level]

    def describe(self, amp: Amp, *, device_type: str) -> str:
        """What a request means on a kind of device, as one line for a person."""
        del device_type
        return f"{amp.level or self.default_level} ({self.name})"

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
        """Mixed precision for a block: opened before the engines are built, closed after they are.

        Everything taken (patches, hooks, types of weights) is given back when the context ends, also by exception.

        Args:
            amp: the request; what it leaves open is decided here, alike on every rank.
            models: the user's own objects, already on `device`.
            optimizers: those the user named; empty unless the engine needs them.
            device: the first device this process drives.
            world: this process among the others; their process group is initialised.
            sharded: whether each rank holds only its part of a gradient, so that ranks must agree on inf and nan.

        Raises:
            ConfigError: a request or a model that this engine cannot run.
            MissingDependencyError: the engine's package is not there.
        """
        del amp, models, optimizers, device, world, sharded
        return contextlib.nullcontext(Session())


class Launcher(abc.ABC):
    """How processes start."""

    name: ClassVar[str]
    queues: ClassVar[bool] = False
    """Whether a call is handed to a queue (Slurm), so that `submit` makes sense."""

    @abc.abstractmethod
    def launch(self, task: Any, *, node: Node | None, environ: Mapping[str, str]) -> Any:
        """Run a `task.Task` in every process of its layout; its `task.Outcome`s in rank order."""
