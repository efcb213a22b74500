"""Where tensors cross from one segment to another: every operation of a forward passes here.

torch's functions and methods     Crossing, a function mode of the micro-batch's thread
autograd.Function.apply           replaced, since no mode sees it
checkpoint                        replaced: in backward it computes again, where no mode is
calls of modules                  global hooks, since those on the module would go along with its copies and pickles
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.activation_checkpoint import divisible_checkpoints, reentrant
from parallelize.backends.balanced.captured_tensors import closed
from parallelize.backends.balanced.microbatch_run import Tape, active
from parallelize.runtime.containers import leaves

__all__ = ["Crossing", "watching"]

_Tensor: Any = torch.Tensor

# Questions that do not need the tensor to be here.
_QUESTIONS = frozenset(
    {
        *(getattr(_Tensor, name).__get__ for name in ("is_leaf", "layout", "ndim", "requires_grad", "shape")),
        *(_Tensor.dim, _Tensor.element_size, _Tensor.is_complex, _Tensor.is_floating_point, _Tensor.ndimension),
        *(_Tensor.nelement, _Tensor.numel, _Tensor.size, torch.is_complex, torch.is_floating_point, torch.numel),
    }
)
_DEVICE = _Tensor.device.__get__
_DTYPE = _Tensor.dtype.__get__
_ADD_IN_PLACE = _Tensor.add_
_BACKWARD = frozenset({torch.autograd.backward, _Tensor.backward})


class Crossing(TorchFunctionMode):
    """Brings every operation's arguments to the segment that runs, and marks its results.

    Args:
        tape: the micro-batch's.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        del types
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            return func(*args, **kwargs)
        tape = self._tape
        if func is _DEVICE:
            return tape.device_of(*args)
        if func is _DTYPE:
            return tape.dtype_of(*args)
        if func is F.batch_norm:
            output = tape.moments.batch_norm(args, kwargs, localize=lambda value: _localized(tape, value))
        elif func is _ADD_IN_PLACE and tape.is_again and not args[0].is_floating_point():
            return args[0]  # batch norm's counter has counted this call before
        elif func is torch.autograd.grad or func in _BACKWARD:
            _check_gradients(tape, func, args, kwargs)
            return _called(tape, func, args, kwargs)
        else:
            return _called(tape, func, args, kwargs)
        _claim(tape, output)
        return output


class _Watch:
    """What runs need of the process as a whole, there as long as anybody watches: twice would be seen twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers = 0
        self._given_back = contextlib.ExitStack()

    def begin(self) -> None:
        with self._lock:
            self._watchers += 1
            if self._watchers == 1:
                self._given_back.callback(register_module_forward_pre_hook(_arrive).remove)
                self._given_back.callback(register_module_forward_hook(_show).remove)
                self._given_back.enter_context(_visible_functions())
                self._given_back.enter_context(divisible_checkpoints(Crossing))

    def end(self) -> None:
        with self._lock:
            self._watchers -= 1
            if self._watchers == 0:
                self._given_back.close()


_watch = _Watch()


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """While this lasts, runs on any thread see modules and autograd functions."""
    _watch.begin()
    try:
        yield
    finally:
        _watch.end()


@contextlib.contextmanager
def _visible_functions() -> Iterator[None]:
    function: Any = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tape = active()
        own = original.__get__(None, cls)
        if cls is CheckpointFunction:  # outside of micro-batches too: planning asks for the gradients of some tensors
            return reentrant(*args)
        return own(*args, **kwargs) if tape is None else _called(tape, own, args, kwargs)

    replacement = classmethod(apply)
    function.apply = replacement
    try:
        yield
    finally:
        if function.__dict__["apply"] is replacement:
            function.apply = original


def _arrive(module: nn.Module, _args: Any) -> None:
    tape = active()
    if tape is not None and not tape.is_bound:
        tape.arrive(module)


def _show(module: nn.Module, args: Any, output: Any) -> None:
    """Close what the module's own hooks are about to see: a loss on it is refused before it frees anything."""
    tape = active()
    if tape is not None and not tape.is_again and (module._forward_hooks or module._forward_pre_hooks):
        for leaf in leaves((args, output)):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
                closed(leaf)


def _called(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own = tuple([_localized(tape, each) for each in args])
    output = func(*own, **{name: _localized(tape, each) for name, each in kwargs.items()} if kwargs else {})
    # An operation in place returns its argument, which may be a buffer: it is not this segment's.
    if not (own and output is own[0]):
        _claim(tape, output)
    return output


def _check_gradients(tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let pass what is differentiated within one segment: by tensors that it has made itself."""
    inputs = () if func in _BACKWARD else kwargs.get("inputs", args[1] if len(args) > 1 else ())
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not inputs or not all(isinstance(each, torch.Tensor) and tape.is_made_here(each) for each in inputs):
        raise refusals.inner_gradient()


def _localized(tape: Tape, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tape.local(value)
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_localized(tape, each) for each in value])
    if kind is dict:
        return {name: _localized(tape, each) for name, each in value.items()}
    return value


def _claim(tape: Tape, output: Any) -> None:
    if isinstance(output, torch.Tensor):
        tape.claim(output)
    elif isinstance(output, (tuple, list)):
        for each in output:
            _claim(tape, each)
