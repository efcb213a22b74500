"""Routes of models: methods that are set on a model's instance for the time of a block.

    model(x)                                    the user's call; hooks of the user's fire once
    └── model.forward (the instance's)          Route: the block chooses the engine
        └── the engine's module                 DataParallel, a pipeline, fully_shard's root, ...
            └── Inner.forward                   the precision's context
                └── original forward            the user's code

A call of `self.forward` in the user's code is not routed again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from parallelize.torch_patches.private import replace_attribute

if TYPE_CHECKING:
    from parallelize.plugins.base import RoutedModel

_GETSTATE = "__getstate__"
# Smaller buckets would have torch.compile make a graph of each layer.
_LEAST_BUCKET_BYTES = 2**20

# Global, because models belong to the process, not to a context or a thread.
_routes: weakref.WeakSet[Route] = weakref.WeakSet()


class _ThreadState(threading.local):
    """What a thread does with one route.

    Attributes:
        is_in_engine: whether it runs the engine's forward. The user's code may call routed methods
            there: those calls are of the plain model.
    """

    is_in_engine = False


class Route:
    """Routes calls of one model's methods, from `install` to `uninstall`.

    Args:
        model: the user's model.
        methods: name -> the original method; {}: the model is in a block, and not routed.
        call: runs a routed call, with the method's name and the arguments.
        bind: returns the original method of a name, bound to the model, a copy or a replica.
        owner: what the block knows of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        methods: Mapping[str, Callable[..., Any]],
        *,
        call: Callable[[str, Any, Any], Any],
        bind: Callable[[str, nn.Module], Callable[..., Any]],
        owner: RoutedModel,
    ) -> None:
        self.model = model
        self.owner = owner
        self._methods = methods
        self._call = call
        self._bind = bind
        self._thread = _ThreadState()
        # Attributes of the instance, by name: the user's, and ours which hide them.
        self._hidden: dict[str, Any] = {}
        self._installed: dict[str, Any] = {}

    def install(self) -> None:
        """Set the routed methods on the instance, where they take precedence over the class's."""
        functions = {name: self._routed(name) for name in self._methods}
        if functions:
            functions[_GETSTATE] = self._getstate()
        # Not by setattr: a class may override __setattr__.
        attributes = self.model.__dict__
        for name, function in functions.items():
            if name in attributes:
                self._hidden[name] = attributes[name]
            self._installed[name] = types.MethodType(function, self.model)
        attributes.update(self._installed)
        _routes.add(self)

    def uninstall(self) -> None:
        """Restore the instance's attributes; methods that the user has replaced meanwhile stay."""
        attributes = self.model.__dict__
        for name, routed in self._installed.items():
            if attributes.get(name) is not routed:
                continue
            del attributes[name]
            if name in self._hidden:
                attributes[name] = self._hidden[name]
        self._installed = {}
        _routes.discard(self)

    def _routed(self, method: str) -> Callable[..., Any]:
        """Build the function that replaces a method.

        It has the method's name: bound methods are pickled by name, so that the pickle loads
        without this package.
        """

        def forward(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            is_copy = model is not self.model
            is_after_block = not self._installed
            if is_copy or is_after_block or self._thread.is_in_engine:
                return self._bind(method, model)(*args, **kwargs)
            self._thread.is_in_engine = True
            try:
                return self._call(method, args, kwargs)
            finally:
                self._thread.is_in_engine = False

        original = self._methods[method]
        functools.update_wrapper(forward, getattr(original, "__func__", original))
        forward.__name__ = method
        # torch.compile of the model breaks the graph here, and compiles the user's forward inside.
        disable: Any = torch.compiler.disable
        routed: Callable[..., Any] = disable(forward, recursive=False)
        return routed

    def _getstate(self) -> Callable[[nn.Module], Any]:
        """Build a `__getstate__` that leaves the route out of copies and pickles of the model."""

        def getstate(model: nn.Module) -> Any:
            if _GETSTATE in self._hidden:
                state = self._hidden[_GETSTATE]()
            else:
                model_class: Any = type(model)
                state = model_class.__getstate__(model)
            if not isinstance(state, dict):
                return state
            kept = dict(state)
            for name, routed in self._installed.items():
                if kept.get(name) is routed:
                    del kept[name]
            return {**kept, **self._hidden}

        getstate.__name__ = _GETSTATE
        return getstate


def route_of(model: nn.Module) -> Route | None:
    """Return the route of a model; None if it is in no block, or is a copy of one that is."""
    # Not by `model.forward`: code in the block may have set another one, which calls the route's.
    for route in tuple(_routes):
        if route.model is model:
            return route
    return None


def routed_models() -> list[nn.Module]:
    """Return all models that are in a block."""
    return [route.model for route in tuple(_routes)]


def overlapping_route(model: nn.Module) -> Route | None:
    """Return the route of a model in a block that shares a module or parameter with `model`."""
    parts = _ids_of_parts(model)
    for route in tuple(_routes):
        if not parts.isdisjoint(_ids_of_parts(route.model)):
            return route
    return None


def _ids_of_parts(model: nn.Module) -> set[int]:
    return {id(part) for part in (*model.modules(), *model.parameters())}


@contextlib.contextmanager
def watching_registrations(on_registered: Callable[[nn.Module, str, Any], None]) -> Iterator[None]:
    """Call `on_registered(module, name, value)` for each submodule or parameter that a module gets.

    torch.func.functional_call and fully_shard write parameters in another way, which is not seen.
    """
    with (
        register_module_module_registration_hook(on_registered),
        register_module_parameter_registration_hook(on_registered),
    ):
        yield


class SplitAtBuckets:
    """A context in which torch.compile splits the graphs of models at buckets of gradients.

    The gradients of a bucket are sent before the next graph computes its own. torch asks the
    DistributedDataParallel that runs for the size; here, a stand-in answers.
    """

    def __init__(self, bucket_bytes: float) -> None:
        cap = max(int(bucket_bytes), _LEAST_BUCKET_BYTES)
        self._stand_in: Any = SimpleNamespace(bucket_bytes_cap=cap)

    def __enter__(self) -> None:
        """Set the stand-in."""
        DistributedDataParallel._active_ddp_module = self._stand_in

    def __exit__(self, *_: object) -> None:
        """Remove the stand-in: DistributedDataParallel does not run around a block's model."""
        DistributedDataParallel._active_ddp_module = None


@contextlib.contextmanager
def packed_lengths_on_cpu() -> Iterator[None]:
    """Let pack_padded_sequence take lengths that were moved to a device with the other inputs.

    It needs them on the CPU. Copying them back waits for the device, as `lengths.cpu()` would.
    """
    rnn: Any = torch._VF  # `torch.nn.utils.rnn` looks the function up here
    original = rnn._pack_padded_sequence

    def pack(data: torch.Tensor, lengths: torch.Tensor, *options: Any) -> Any:
        return original(data, lengths.cpu(), *options)

    with replace_attribute(rnn, "_pack_padded_sequence", pack):
        yield
