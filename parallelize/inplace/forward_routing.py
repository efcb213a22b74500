"""Routing of a model's `forward` to its engine, by methods that are set on the model instance.

model(x)                            the user's call; the user's forward hooks fire here, once
└── model.forward (the instance's)  Route.call
    └── engine.module               DistributedDataParallel, DataParallel, ...
        └── Inner.forward           the precision's context
            └── original forward    the user's code; a call of self.forward in it is not routed
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallelize.errors import SyncError
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import map_leaves
from parallelize.runtime.replace_attribute import replace_attribute

__all__ = [
    "ForwardHandler",
    "Route",
    "count_routes",
    "is_in_functional_call",
    "overlapping_route",
    "packed_lengths_on_cpu",
    "route_of",
    "routed_models",
    "routed_parameter_ids",
]

_GETSTATE = "__getstate__"
_COPY_METHODS = ("__deepcopy__", "__reduce_ex__")  # of a sharded model's engine

# Global, because models belong to the process, not to a context or a thread.
_installed_routes: weakref.WeakSet[Route] = weakref.WeakSet()


class _ThreadState(threading.local):
    """Thread-local flags: whether this thread runs the engine's forward, and whether an optimizer has stepped in it."""

    is_in_engine = False
    has_stepped = False


class ForwardHandler(Protocol):
    """Chooses the module that runs each routed forward."""

    def before_forward(self, inputs: Any) -> nn.Module:
        """Return the module for a forward with grad mode on and these arguments."""

    def after_forward(self, module: nn.Module, output: Any, *, inputs: Any) -> None:
        """Handle the output of a forward that `module` ran with grad mode on."""

    def local_module(self) -> nn.Module:
        """Return the module for a forward with grad mode off."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward accumulates gradients without averaging them."""


class Route:
    """Routes the calls of one model to its engine, from `install` to `uninstall`.

    Args:
        inner: holds the model and its original methods.
        handler: chooses the module that runs each forward.
        device: device to move inputs to; None: leave inputs where they are.

    Attributes:
        model: the user's model.
    """

    def __init__(self, inner: Inner, *, handler: ForwardHandler, device: torch.device | None) -> None:
        self.inner = inner
        self.model = inner.model
        self.handler = handler
        self._device = device
        self._thread_state = _ThreadState()
        self._shadowed: dict[str, Any] = {}
        self._installed: dict[str, Any] = {}

    def install(self) -> None:
        """Set the routed methods on the model instance, where they take precedence over the class's methods."""
        model = self.model
        for method in self.inner.original_methods:
            self._installed[method] = types.MethodType(_routed(self, method), model)
        self._installed[_GETSTATE] = types.MethodType(_getstate_without_route(self), model)
        self._shadowed = {name: model.__dict__[name] for name in self._installed if name in model.__dict__}
        # Not by setattr: a class may override __setattr__.
        model.__dict__.update(self._installed)
        self._step_handle = register_optimizer_step_pre_hook(self._on_step)
        _installed_routes.add(self)

    def uninstall(self) -> None:
        """Restore the instance's attributes, except methods that the user has replaced in the meantime."""
        namespace = self.model.__dict__
        for name, routed in self._installed.items():
            if namespace.get(name) is not routed:
                continue
            if name in self._shadowed:
                namespace[name] = self._shadowed[name]
            else:
                del namespace[name]
        if self._installed:
            self._step_handle.remove()
        self._installed = {}
        _installed_routes.discard(self)

    def call(self, model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a routed method through the engine; on a copy, after the block or in a nested call, the original."""
        if model is not self.model or not self._installed or self._thread_state.is_in_engine:
            return self.inner.bind_method(method, model)(*args, **kwargs)
        is_recording = torch.is_grad_enabled()
        module = self.handler.before_forward((args, kwargs)) if is_recording else self.handler.local_module()
        if self._device is not None:
            args, kwargs = map_leaves(self._to_device, (args, kwargs))
        if self.inner.method != method:
            self.inner.__dict__["method"] = method
        self._thread_state.is_in_engine, self._thread_state.has_stepped = True, False
        try:
            output = self.inner.session.route(module, *args, **kwargs)
        except SyncError as error:
            if self._thread_state.has_stepped:
                raise self._step_inside_error(method) from error
            raise
        finally:
            self._thread_state.is_in_engine = False
        if is_recording:
            self.handler.after_forward(module, output, inputs=(args, kwargs))
        return output

    def _on_step(self, *_: object) -> None:
        if self._thread_state.is_in_engine:
            self._thread_state.has_stepped = True

    def _step_inside_error(self, method: str) -> SyncError:
        model = type(self.model).__name__
        child = next(
            (name for name, part in self.model.named_children() if any(True for _ in part.parameters())), "net"
        )
        return SyncError(
            f"{model}.{method} runs backward and an optimizer's step inside itself",
            why=f"the gradients of {model} are averaged by a backward after {method} has returned",
            fix=f"return the loss from {method}, and call backward and step after it; or pass the part that {method} "
            f"calls: parallel_model(model.{child})",
        )

    def _to_device(self, leaf: Any) -> Any:
        is_movable = isinstance(leaf, (torch.Tensor, PackedSequence))
        return leaf.to(self._device, non_blocking=True) if is_movable else leaf

    def attributes_without_route(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `state`, the model's `__dict__`, with the attributes from before `install`."""
        kept = {
            name: value
            for name, value in state.items()
            if value is not self._installed.get(name) and name not in _COPY_METHODS
        }
        return {**kept, **self._shadowed}


@contextlib.contextmanager
def packed_lengths_on_cpu() -> Iterator[None]:
    """Let pack_padded_sequence take lengths that were moved to a device with the other inputs.

    It needs them on the CPU. Copying them back waits for the device, as `lengths.cpu()` in the model would.
    """
    rnn: Any = torch._VF  # `torch.nn.utils.rnn` looks the function up here
    original = rnn._pack_padded_sequence

    def pack(data: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:  # noqa: FBT001 - torch's signature
        return original(data, lengths.cpu(), batch_first)

    with replace_attribute(rnn, "_pack_padded_sequence", pack):
        yield


def route_of(model: nn.Module) -> Route | None:
    """Return the route of a model; None if the model is in no block, or is a copy of one that is."""
    routed = getattr(model.__dict__.get("forward"), "__func__", None)
    route = getattr(routed, "route", None)
    return route if isinstance(route, Route) and route.model is model else None


def is_in_functional_call(model: nn.Module) -> bool:
    """Whether torch.func.functional_call, with tensors for parameters of `model`, is calling the caller of this."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is torch.func.functional_call.__code__:
            called, given = frame.f_locals["module"], frame.f_locals["parameter_and_buffer_dicts"]
            return bool(given) and any(part is model for part in called.modules())
        frame = frame.f_back
    return False


def count_routes() -> int:
    """Count the models that are in a block."""
    return len(_installed_routes)


def routed_models() -> list[nn.Module]:
    """Return all models that are in a block."""
    return [route.model for route in tuple(_installed_routes)]


def routed_parameter_ids() -> set[int]:
    """Return the ids of the parameters of all models that are in a block."""
    return {id(parameter) for model in routed_models() for parameter in model.parameters()}


def overlapping_route(model: nn.Module) -> Route | None:
    """Return the route of a model in a block that shares a module or parameter with `model`; None if none does."""
    parts = {id(part) for part in (*model.modules(), *model.parameters())}
    for route in tuple(_installed_routes):
        if any(id(part) in parts for part in (*route.model.modules(), *route.model.parameters())):
            return route
    return None


def _routed(route: Route, method: str) -> Callable[..., Any]:
    """Build the function that replaces a method during the block.

    The function has the method's name: bound methods are pickled by name, so the pickle loads without this package.
    """

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return route.call(self, method, args, kwargs)

    found = route.inner.original_methods[method]
    functools.update_wrapper(forward, getattr(found, "__func__", found))
    forward.__name__ = method
    forward.__dict__["route"] = route
    # torch.compile of the model breaks the graph here, and compiles the user's forward inside the engine.
    disable: Any = torch.compiler.disable
    routed: Callable[..., Any] = disable(forward, recursive=False)
    return routed


def _getstate_without_route(route: Route) -> Callable[[nn.Module], Any]:
    """Build a `__getstate__` that leaves the route out of copies and pickles of the model."""

    def getstate(self: nn.Module) -> Any:
        shadowed = route._shadowed.get(_GETSTATE)
        kind: Any = type(self)
        state = shadowed() if shadowed is not None else kind.__getstate__(self)
        return route.attributes_without_route(state) if isinstance(state, dict) else state

    getstate.__name__ = _GETSTATE
    return getstate
