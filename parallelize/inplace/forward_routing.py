"""The way from a model's own `forward` through the engine that runs it in parallel.

model(x)                            the user's call; her forward hooks fire here, once
└── model.forward (the instance's)  Route.run
    └── engine.module               DistributedDataParallel, DataParallel, ...
        └── Inner.forward           the precision's context
            └── forward at entry    the user's code; a call of self.forward in it runs plainly
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from parallelize.errors import ConfigError
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import map_leaves

__all__ = ["Director", "Route", "blocks_open", "in_blocks", "overlapping", "route_of"]

_GETSTATE = "__getstate__"

# Models belong to the process, not to a context or a thread: so does the knowledge of which are in a block.
_open: weakref.WeakSet[Route] = weakref.WeakSet()


class _Thread(threading.local):
    """Whether this thread is inside the engine."""

    inside = False


class Director(Protocol):
    """Says at every forward what runs it."""

    def enter(self) -> nn.Module:
        """What runs a forward that records gradients."""

    def leave(self, module: nn.Module, output: Any) -> None:
        """That `module` has run it, and what it has returned."""

    def local(self) -> nn.Module:
        """What runs a forward that records none."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backward sends no gradients."""


class Route:
    """One model's way through its engine, from `lay` to `lift`.

    Args:
        inner: holds the model and its methods as they were found.
        director: says what runs each forward.
        device: where inputs are brought; None: the engine itself does that.
        refuses_copies: why the model can neither be copied nor pickled; None: it can.

    Attributes:
        model: the user's model.
    """

    def __init__(
        self, inner: Inner, *, director: Director, device: torch.device | None, refuses_copies: str | None = None
    ) -> None:
        self.inner = inner
        self.model = inner.model
        self.director = director
        self.refuses_copies = refuses_copies
        self._device = device
        self._thread = _Thread()
        self._hidden: dict[str, Any] = {}
        self._laid: dict[str, Any] = {}

    def lay(self) -> None:
        """Put the routed methods on the instance, where they win over those of its class."""
        model = self.model
        for method in self.inner.found:
            self._laid[method] = types.MethodType(_routed(self, method), model)
        self._laid[_GETSTATE] = types.MethodType(_plain_state(self), model)
        self._hidden = {name: model.__dict__[name] for name in self._laid if name in model.__dict__}
        # Past nn.Module.__setattr__: a class may have its own opinion about attributes.
        model.__dict__.update(self._laid)
        _open.add(self)

    def lift(self) -> None:
        """Take the routed methods off again; one that the user has replaced in the meantime stays."""
        namespace = self.model.__dict__
        for name, routed in self._laid.items():
            if namespace.get(name) is not routed:
                continue
            if name in self._hidden:
                namespace[name] = self._hidden[name]
            else:
                del namespace[name]
        self._laid = {}
        _open.discard(self)

    def run(self, model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a routed method: through the engine; plainly in a copy, after the block, and inside another call."""
        if model is not self.model or not self._laid or self._thread.inside:
            return self.inner.bound(method, model)(*args, **kwargs)
        is_recording = torch.is_grad_enabled()
        module = self.director.enter() if is_recording else self.director.local()
        if self._device is not None:
            args, kwargs = map_leaves(self._to_device, (args, kwargs))
        if self.inner.method != method:
            self.inner.__dict__["method"] = method
        self._thread.inside = True
        try:
            output = self.inner.session.route(module, *args, **kwargs)
        finally:
            self._thread.inside = False
        if is_recording:
            self.director.leave(module, output)
        return output

    def _to_device(self, leaf: Any) -> Any:
        movable = isinstance(leaf, (torch.Tensor, PackedSequence))
        return leaf.to(self._device, non_blocking=True) if movable else leaf

    def plain_attributes(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of the model's dictionary as it would be without the route."""
        kept = {name: value for name, value in state.items() if value is not self._laid.get(name)}
        return {**kept, **self._hidden}


def route_of(model: nn.Module) -> Route | None:
    """The route that lies on a model, or None: it is not in a block, or it is a copy of one that is."""
    routed = getattr(model.__dict__.get("forward"), "__func__", None)
    route = getattr(routed, "route", None)
    return route if isinstance(route, Route) and route.model is model else None


def blocks_open() -> int:
    """How many models are in a block."""
    return len(_open)


def in_blocks() -> set[int]:
    """The ids of the parameters of all models that are in a block."""
    return {id(parameter) for route in tuple(_open) for parameter in route.model.parameters()}


def overlapping(model: nn.Module) -> Route | None:
    """A route that lies on a model which shares a module or a parameter with this one, or None."""
    parts = {id(part) for part in (*model.modules(), *model.parameters())}
    for route in tuple(_open):
        if any(id(part) in parts for part in (*route.model.modules(), *route.model.parameters())):
            return route
    return None


def _routed(route: Route, method: str) -> Callable[..., Any]:
    """The function that stands for a method during the block.

    It bears the method's name: a bound method is pickled as (getattr, (model, name)), which loads without this package.
    """

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return route.run(self, method, args, kwargs)

    found = route.inner.found[method]
    functools.update_wrapper(forward, getattr(found, "__func__", found))
    forward.__name__ = method
    forward.__dict__["route"] = route
    if "torch._dynamo" in sys.modules:
        # A compiled model breaks its graph here; what the user wrote is compiled inside the engine.
        disable: Any = torch.compiler.disable
        forward = disable(forward, recursive=False)
    return forward


def _plain_state(route: Route) -> Callable[[nn.Module], Any]:
    """What copy and pickle ask an instance for; theirs is a plain model."""

    def getstate(self: nn.Module) -> Any:
        if route.refuses_copies is not None:
            raise ConfigError(
                f"a copy or a pickle of {type(self).__name__} inside its parallel_model block",
                why=route.refuses_copies,
                fix="use parallelize.save inside the block, or copy the model after it",
            )
        hidden = route._hidden.get(_GETSTATE)
        kind: Any = type(self)
        state = hidden() if hidden is not None else kind.__getstate__(self)
        return route.plain_attributes(state) if isinstance(state, dict) else state

    getstate.__name__ = _GETSTATE
    return getstate
