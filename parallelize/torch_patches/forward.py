"""Routes of models: a block sets methods on a model, which send the model's calls to its engine.

    model(x)                                    the user's call, which runs the user's hooks once
    └── model.forward, set by the Route         calls the block, which calls the engine
        └── the engine's module                 DataParallel, a pipeline, fully_shard's root, ...
            └── Inner.forward                   casts, and calls the user's forward
                └── original forward            the user's code

If the user's code calls `self.forward` there, the original forward runs.
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

from parallelize.torch_patches.module_tensors import all_parameters
from parallelize.torch_patches.private import replace_attribute

if TYPE_CHECKING:
    from parallelize.plugins.base import RoutedModel

_GETSTATE = "__getstate__"
# With smaller buckets, torch.compile would make a graph of each layer, and optimize each alone.
_LEAST_BUCKET_BYTES = 2**20

# Global, because models belong to the process, not to a context or a thread.
_routes: weakref.WeakSet[Route] = weakref.WeakSet()


class _ThreadState(threading.local):
    """What a thread is doing with one route.

    Attributes:
        is_in_engine: whether the thread is in a routed call. If the user's code calls a routed
            method there, the original method runs, because the engine runs the model already.
    """

    is_in_engine = False


class Route:
    """Routes calls of one model's methods, from `install` to `uninstall`.

    Args:
        model: the user's model.
        methods: name -> the original method; {}: no method is routed, and the model only counts
            as being in a block.
        call: runs a routed call; gets the method's name, the args and the kwargs.
        bind: gets a method's name and a module, and returns the original method bound to the
            module: the model, a copy of it, or a replica of DataParallel.
        owner: the model in its block, for code that finds this route by `route_of`.
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
        # Name -> attribute that the user has set on the instance, before a route has hidden it.
        self._hidden: dict[str, Any] = {}
        # Name -> attribute that this route has set on the instance.
        self._installed: dict[str, Any] = {}

    def install(self) -> None:
        """Set the routed methods on the instance, where they hide those of its class."""
        functions = {name: self._routed(name) for name in self._methods}
        if functions:
            functions[_GETSTATE] = self._getstate()
        # Not by setattr, because a class may override __setattr__.
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

        It has the method's name: pickle stores a bound method as an object and a name, so that a
        pickle of `model.forward` contains nothing of this package.
        """

        def forward(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # DataParallel and copy.copy copy the attributes of the instance, with this function.
            is_copy = model is not self.model
            # Code may keep the bound method, and call it after the block.
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
        # A compiled model has no graph of this function, which would contain the block's code. The
        # user's forward inside is compiled, because the function is not disabled recursively.
        disable: Any = torch.compiler.disable
        routed: Callable[..., Any] = disable(forward, recursive=False)
        return routed

    def _getstate(self) -> Callable[[nn.Module], Any]:
        """Build a `__getstate__` that leaves the route out of copies and pickles of the model.

        Without it, a copy would keep the routed methods after the block.
        """

        def getstate(model: nn.Module) -> Any:
            if _GETSTATE in self._hidden:
                state = self._hidden[_GETSTATE]()
            else:
                model_class: Any = type(model)
                state = model_class.__getstate__(model)
            if not isinstance(state, dict):
                return state
            plain_state = dict(state)
            for name, routed in self._installed.items():
                if plain_state.get(name) is routed:
                    del plain_state[name]
            return {**plain_state, **self._hidden}

        getstate.__name__ = _GETSTATE
        return getstate


def route_of(model: nn.Module) -> Route | None:
    """Return the route of a model; None: the model is in no block.

    A copy of a model in a block is in no block.
    """
    # Not by `model.forward`: code in the block may have replaced it by a function that calls it.
    for route in tuple(_routes):
        if route.model is model:
            return route
    return None


def routed_models() -> list[nn.Module]:
    """Return all models that are in a block."""
    return [route.model for route in tuple(_routes)]


def overlapping_route(model: nn.Module) -> Route | None:
    """Return the route of a model that shares a module or parameter with `model`, or None."""
    parts = _ids_of_parts(model)
    for route in tuple(_routes):
        if not parts.isdisjoint(_ids_of_parts(route.model)):
            return route
    return None


def _ids_of_parts(model: nn.Module) -> set[int]:
    # Not by `model.parameters()`, which a class may override with another signature.
    return {id(part) for part in (*model.modules(), *all_parameters(model))}


@contextlib.contextmanager
def watching_registrations(on_registered: Callable[[nn.Module, str, Any], None]) -> Iterator[None]:
    """Call `on_registered(module, name, value)` before any module gets a submodule or parameter.

    torch calls it for all modules of the process. It is not called for torch.func.functional_call
    and fully_shard, which write to `module._parameters`.
    """
    with (
        register_module_module_registration_hook(on_registered),
        register_module_parameter_registration_hook(on_registered),
    ):
        yield


class SplitAtBuckets:
    """A context in which torch.compile splits the graph of a model at buckets of gradients.

    A graph gives its gradients to the reducer when all of it has run in backward. With one graph,
    no gradient could be sent while others are computed.

    torch splits graphs if a DistributedDataParallel is active, and asks it for the size of a
    bucket. In a block, an object with this one attribute stands for it.

    Args:
        bucket_bytes: size of a bucket of the reducer.
    """

    def __init__(self, bucket_bytes: float) -> None:
        cap = max(int(bucket_bytes), _LEAST_BUCKET_BYTES)
        self._stand_in: Any = SimpleNamespace(bucket_bytes_cap=cap)

    def __enter__(self) -> None:
        """Let torch.compile find the stand-in as the active DistributedDataParallel."""
        DistributedDataParallel._active_ddp_module = self._stand_in

    def __exit__(self, *_: object) -> None:
        """Remove the stand-in.

        None was there before: no DistributedDataParallel runs around a model of a block.
        """
        DistributedDataParallel._active_ddp_module = None


@contextlib.contextmanager
def packed_lengths_on_cpu() -> Iterator[None]:
    """Let pack_padded_sequence take lengths on a device, in the context.

    A block moves all inputs to the device, and the lengths among them. torch accepts lengths on the
    CPU only. Their copy to the CPU waits for the device, as `lengths.cpu()` of the user does.
    """
    # `torch.nn.utils.rnn` looks the function up in this module.
    rnn: Any = torch._VF
    original = rnn._pack_padded_sequence

    def pack(data: torch.Tensor, lengths: torch.Tensor, *options: Any) -> Any:
        return original(data, lengths.cpu(), *options)

    with replace_attribute(rnn, "_pack_padded_sequence", pack):
        yield
