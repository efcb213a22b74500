"""Base classes of plug-ins (backends, launchers, precision engines), and what they exchange.

    Config.backend      Backend.engine(inner, ...)  ->  Engine    runs a model in parallel
    Config.amp_engine   Precision.open(request)     ->  Session   chooses the dtypes of a block
    Config.launcher     Launcher.launch(task, ...)                starts the processes of a call

Glossary:

    plug-in        a class of one of these three families, which an option names
    capability     what a plug-in can do: a class attribute, such as `max_nodes`
    engine         what runs one model in a block
    session        the mixed precision of a block
    inner          the module between an engine and the user's model
    routed call    a call of a model, or of a method, that runs through the engine
    replica        a copy of the model on another device of this process, which DataParallel makes

The `config` package checks each request against the capabilities, and the guides' support table is
generated from them. No code tests for a plug-in's name.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from parallelize.cluster.world import Node, World
from parallelize.plugins.options import Parse, parse_options

if TYPE_CHECKING:
    from parallelize.agreement.verification import Verification
    from parallelize.backends.logical import PartsOfBlock

# What authors of plug-ins import, and the API reference describes.
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
    "PrecisionRequest",
    "Reduction",
    "RoutedModel",
    "Session",
]

Level = Literal["O0", "O1", "O2", "O3"]
LEVELS: tuple[Level, ...] = ("O0", "O1", "O2", "O3")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""


@dataclass(frozen=True)
class Amp:
    """Mixed-precision options of a request.

    Args:
        level: optimization level as in Apex, "O0" to "O3"; None: the engine's default (native O1,
            apex O2).
        dtype: half-precision dtype; None: bf16 if the device supports it without emulation, else
            fp16.
        init_scale: initial loss scale, fp16 only.
        growth_factor: multiplies the loss scale after `growth_interval` steps in a row without inf
            or nan.
        backoff_factor: multiplies the loss scale after a step with inf or nan.
        growth_interval: number of steps in a row without inf or nan before the loss scale grows.
        communication_dtype: dtype in which gradients are sent between processes; None: the
            gradients' own dtype.
        outputs: dtype of the floating outputs of a model: "fp32", except those whose loss forward
            returns, too; or "as computed", while gradients are enabled.
    """

    level: Level | None = None
    dtype: torch.dtype | None = None
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    communication_dtype: torch.dtype | None = None
    outputs: str = "fp32"


class Session:
    """Mixed precision of one `parallel_model` block; this base class leaves dtypes unchanged.

    A routed call passes through the session twice, because autocast is thread-local and an engine
    may run several threads:

        the user's thread       session.route(engine.module, ...)       (or engine.local)
                                    the engine: DistributedDataParallel, DataParallel, ...
        the replica's thread            Inner.forward -> session.forward(the user's forward, ...)
    """

    communication_dtype: torch.dtype | None = None
    """Dtype in which gradients are sent between processes; None: their own dtype."""
    weights_dtype: torch.dtype | None = None
    """Dtype of the weights in forward, for a backend that casts weights itself; None: no cast."""
    fp32_modules: tuple[type[nn.Module], ...] = ()
    """Module classes whose weights stay in fp32 under a backend that casts weights itself."""

    @property
    def mark_owner(self) -> object | None:
        """Whose mark the block sets on the graph nodes of outputs; None: the session needs none."""
        return None

    def watch_outputs(self, nodes: Sequence[Any]) -> None:
        """Watch the graph nodes of a routed call's outputs, which the block has marked.

        It is called only if the session has a `mark_owner`.
        """

    def bind(self, models: Sequence[nn.Module]) -> None:
        """Register the parameters of the block's models, the user's objects.

        It is called after the engines are built, which may replace parameters.
        """

    def route(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a routed call through the engine, on the user's thread.

        Gradients may be enabled or disabled.

        Args:
            call: `Engine.module` or `Engine.local`.
            *args: the user's arguments, unchanged.
            **kwargs: the user's arguments, unchanged.
        """
        return call(*args, **kwargs)

    def forward(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward, or a routed method.

        DataParallel calls it once per replica, in the replica's own thread.

        Args:
            call: a method bound to the model or to one of its replicas.
            *args: the user's arguments, on the replica's device.
            **kwargs: the user's arguments, on the replica's device.
        """
        return call(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint, such as the loss scale, as plain numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` of a session of the same class has returned."""


class Inner(nn.Module):
    """Wrapper of the user's model that a backend runs in parallel.

    Its forward calls the user's forward, or the method that is called.

    Args:
        model: the user's model, which becomes a child of this module.
        original_methods: name -> `getattr(model, name)` before the block, for "forward" and every
            routed method.
        session: mixed precision of the block.
        buffer_source: whose floating buffers all ranks get in training: rank 0's, or their mean.

    Attributes:
        method: name of the method that the next call runs.
        parts: what the models of a block share under `logical=`; None without it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        original_methods: Mapping[str, Callable[..., Any]],
        session: Session,
        buffer_source: Literal["rank0", "mean"] = "rank0",
    ) -> None:
        super().__init__()
        self.model = model
        self.original_methods = dict(original_methods)
        self.session = session
        self.buffer_source = buffer_source
        self.method = "forward"
        self.parts: PartsOfBlock | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method named by `method`."""
        # `self.model` would go through nn.Module.__getattr__, which is slow.
        model: Any = self._modules["model"]
        if "_is_replica" in model.__dict__:
            method = self.bind_method(self.method, model)
        else:
            method = self.original_methods[self.method]
        return self.session.forward(method, *args, **kwargs)

    def bind_method(self, method: str, model: Any) -> Callable[..., Any]:
        """Return a method as it was before the block, bound to a model.

        Args:
            method: name of the method.
            model: the user's model, or a replica or copy of it.
        """
        original = self.original_methods[method]
        if "_is_replica" in model.__dict__ or model is not self._modules["model"]:
            # The block has set the routed methods on the instance of the user's model, from which
            # DataParallel and copy.copy have copied them.
            for name in self.original_methods:
                model.__dict__.pop(name, None)
        if inspect.ismethod(original):
            return types.MethodType(original.__func__, model)
        return original

    @property
    def is_replicable(self) -> bool:
        """Whether every method can be bound to a replica.

        A compiled forward, which `torch.compile(model)` sets on the instance, cannot.
        """
        for method in self.original_methods.values():
            if not inspect.ismethod(method) or method.__self__ is not self.model:
                return False
        return True


@dataclass(frozen=True)
class Reduction:
    """How gradients are averaged over the ranks.

    Args:
        bucket_bytes: size of the messages in bytes.
        dtype: dtype in which real gradients are sent; None: their own.
        is_ordered: whether they are added in one order, by pairs of ranks, for any number of ranks
            (`logical=`).
    """

    bucket_bytes: float = 25 * 2**20
    dtype: torch.dtype | None = None
    is_ordered: bool = False


class Engine(abc.ABC):
    """Runs one model in parallel. A backend builds an engine per model when a block is entered.

    Attributes:
        module: what a routed call runs while gradients are enabled.
        local: module that a routed call runs under `torch.no_grad()`. It may use every device of
            this process but calls no collective, so that one rank alone can evaluate.
        moves_inputs: whether `module` and `local` move their inputs to the right device themselves.
        reduction: how the block averages the model's gradients over the ranks, each of which holds
            the whole model; None: it does not.
        replicas: what each rank holds a copy of, if `reduction` is not None; None: the model.
        keeps_parameters: whether the user may add and replace modules and parameters in the block.
        is_chosen: whether the engine is final; else the block calls `choose` before the first
            forward with gradients.
        why: why a backend that chooses among several engines has chosen this one, for the startup
            summary.
    """

    module: Callable[..., Any]
    local: Callable[..., Any]
    moves_inputs: bool = False
    reduction: Reduction | None = None
    replicas: nn.Module | None = None
    keeps_parameters: bool = True
    is_chosen: bool = True
    why: str = ""

    def choose(self, inputs: Arguments) -> None:  # noqa: B027 - most engines have nothing to choose
        """Choose how to run the model, by the arguments of its first forward.

        The attributes of the engine may change.
        """

    @property
    def is_replica(self) -> bool:
        """Whether each rank holds a copy of the model, which has to stay equal."""
        return self.reduction is not None

    @property
    def holds_buffers(self) -> bool:
        """Whether each rank holds a copy of the model's buffers, which the block compares."""
        return self.is_replica

    def refresh(self) -> None:  # noqa: B027 - most engines have nothing to do
        """Follow modules and parameters that were added or replaced."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients stay local, if the engine averages them itself."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def close(self, *, failed: bool) -> None:
        """Undo every change to the model.

        Args:
            failed: whether the block has raised. Then no collective may be called, because other
                ranks may not do so.
        """


class LocalEngine(Engine):
    """Engine of a model that is not synchronized between processes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = self.local = module

    def close(self, *, failed: bool) -> None:
        """Do nothing: the model was not changed."""


class RoutedModel(Protocol):
    """What other rooms ask about a model in a block, which they find by `route_of(model).owner`."""

    @property
    def session(self) -> Session:
        """Mixed precision of the block, whose state belongs to a checkpoint of the model."""

    @property
    def engine(self) -> Engine:
        """What runs the model: under fsdp, all ranks have to make each forward together."""

    @property
    def verification(self) -> Verification | None:
        """Compares the model with the other ranks' before it is saved; None: there are none."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward leaves gradients local."""


class Backend(abc.ABC):
    """A way to run a model in parallel.

    Subclasses are frozen dataclasses, with the backend's options as fields.
    """

    name: ClassVar[str]
    process_per: Literal["device", "node"]
    """What one process drives: a single "device", or all devices of a "node"."""
    max_nodes: ClassVar[int | None] = None
    """Maximum number of nodes; None: no limit."""
    multi_node_fallback: ClassVar[str | None] = None
    """Name of the backend that is used instead, with a warning, on more than `max_nodes` nodes.

    None: the request is refused.
    """
    device_types: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    amp: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Precision engine -> levels that it supports under this backend.

    An engine that is not listed is refused.
    """
    places_model: ClassVar[bool] = False
    """Whether the backend moves the model to devices itself.

    Then the model may be larger than the memory of one device.
    """
    divides_batches: ClassVar[bool] = False
    """Whether it runs each batch in the parts that `logical=` asks for."""
    takes_tensor_parallel: ClassVar[bool] = False
    """Whether it runs models that are tensor parallel already, whose parameters are DTensors.

    It then keeps alike the ranks of `Runtime.data_ranks` only.
    """
    shards_gradients: ClassVar[bool] = False
    """Whether each rank holds only a shard of a gradient.

    Then ranks must agree to skip a step with inf or nan.
    """
    devices: tuple[str, ...] | None = None
    """Names of the devices that a process of "node" drives if `gpus` is not set; None: all."""
    devices_per_process: int | None = None
    """Number of devices that a process of "node" drives; None: all of the node."""
    limitations: ClassVar[Mapping[str, str]] = {}
    """Property that a model lacks under this backend -> the reason, as shown to users.

    The properties are those of tests/contracts.
    """
    option_parsers: ClassVar[Mapping[str, Parse]] = {}
    """Option -> its parser, of `parallelize.plugins.options`."""

    def __post_init__(self) -> None:
        parse_options(self, self.option_parsers)

    @property
    def note(self) -> str:
        """What `explain` adds to the name of the backend."""
        return ""

    def renumbered(self, positions: Mapping[torch.device, torch.device]) -> Backend:
        """Return this backend for a process in which devices have other indices.

        Args:
            positions: device -> the same device in that process.
        """
        del positions
        return self

    @abc.abstractmethod
    def engine(
        self,
        inner: Inner,
        *,
        world: World,
        devices: tuple[torch.device, ...],
        restore: bool = True,
    ) -> Engine:
        """Build the engine that runs a model in parallel.

        Args:
            inner: wrapper of the user's model; its parameters are on `devices[0]`, unless
                `places_model` is True.
            world: rank and world size of this process; the process group is initialized.
            devices: devices that this process drives; one unless `process_per` is "node".
            restore: whether `Engine.close` replaces sharded parameters by full ones.

        Raises:
            ConfigError: this backend cannot run the model, or not with these options.
        """


@dataclass(frozen=True, kw_only=True)
class PrecisionRequest:
    """What a block asks a precision engine for.

    Args:
        amp: the user's options; the engine resolves fields that are None, identically on all ranks.
        models: the user's model objects, already on `device`.
        optimizers: optimizers that the user has passed; may be empty.
        device: the first device that this process drives.
        world: rank and world size of this process; the process group is initialized.
        shards_gradients: whether each rank holds only a shard of a gradient, so that ranks must
            agree on inf and nan.
    """

    amp: Amp
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    device: torch.device
    world: World
    shards_gradients: bool = False


class Precision(abc.ABC):
    """A mixed-precision engine, which chooses the dtypes that a model computes in."""

    name: ClassVar[str]
    dtypes: ClassVar[Mapping[str, frozenset[torch.dtype]]]
    """Device type -> half-precision dtypes supported there.

    A device type that is not listed is refused.
    """
    default_level: ClassVar[Level]

    def describe(self, amp: Amp, *, device_type: str) -> str:
        """Return a one-line description of `amp`, for `explain` and the startup summary."""
        del device_type
        return f"{amp.level or self.default_level} ({self.name})"

    @abc.abstractmethod
    def open(self, request: PrecisionRequest) -> contextlib.AbstractContextManager[Session]:
        """Return the mixed-precision context of a block.

        It is entered before the engines of the block are built, and exited after they close.

        Raises:
            ConfigError: this engine cannot run the model, or not with these options.
            MissingDependencyError: the engine's package is not installed.
        """


class Launcher(abc.ABC):
    """A way to start the processes of a call."""

    name: ClassVar[str]
    option_parsers: ClassVar[Mapping[str, Parse]] = {}
    """Option -> its parser, of `parallelize.plugins.options`."""

    def __post_init__(self) -> None:
        parse_options(self, self.option_parsers)

    @abc.abstractmethod
    def launch(self, task: Any, *, node: Node | None, environ: Mapping[str, str]) -> Any:
        """Run a `call.task.Task` in every process of its layout.

        Args:
            task: the call, with its layout.
            node: this node, if the layout has several.
            environ: environment variables of this process; not modified.

        Returns:
            The `Outcome`s in rank order.
        """
