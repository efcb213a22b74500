"""Transfer of tensors between stages: intercepts every operation of forward and moves its arguments to the stage.

torch's functions and methods     StageTransfer, a function mode of the micro-batch's thread
autograd.Function.apply           patched, since function modes do not intercept it
checkpoint                        patched, since it recomputes in backward, where no function mode is active
calls of modules                  global hooks, since hooks on a module would be copied and pickled with the module
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointFunction

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.activation_checkpoint import checkpoint_reentrant, intercept_checkpoints
from parallelize.backends.balanced.microbatch_run import MicrobatchRun, active_run
from parallelize.backends.balanced.segment import Stage, guard_gradients
from parallelize.backends.balanced.stage_parameters import StageParameters
from parallelize.runtime.containers import leaves
from parallelize.torch_private import self_test

__all__ = ["StageTransfer", "intercept_operations"]

_Tensor: Any = torch.Tensor

# Operations that only read metadata, and need no transfer.
_METADATA = frozenset(
    {
        *(getattr(_Tensor, name).__get__ for name in ("is_leaf", "layout", "ndim", "requires_grad", "shape")),
        *(_Tensor.dim, _Tensor.element_size, _Tensor.is_complex, _Tensor.is_floating_point, _Tensor.ndimension),
        *(_Tensor.nelement, _Tensor.numel, _Tensor.size, torch.is_complex, torch.is_floating_point, torch.numel),
    }
)
_DEVICE = _Tensor.device.__get__
_DTYPE = _Tensor.dtype.__get__
_ADD_IN_PLACE = _Tensor.add_


class StageTransfer(TorchFunctionMode):
    """Moves each operation's arguments to the current segment, and marks its results as produced there."""

    def __init__(self, run: MicrobatchRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation in the current segment."""
        del types
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        run = self._run
        if func is _DEVICE:
            return run.device_of(*args)
        if func is _DTYPE:
            return run.dtype_of(*args)
        if func is F.batch_norm:
            output = run.moments.batch_norm(args, kwargs, localize=lambda value: _to_stage(run, value))
        elif func is _ADD_IN_PLACE and run.is_recomputing and not args[0].is_floating_point():
            return args[0]  # forward has already counted this call in num_batches_tracked
        elif func in (torch.autograd.grad, torch.autograd.backward, _Tensor.backward):  # amp= patches them
            _check_gradients(run, func, args, kwargs)
            return _call_on_stage(run, func, args, kwargs)
        else:
            return _call_on_stage(run, func, args, kwargs)
        _mark_outputs(run, output)
        return output


class _Interception:
    """Process-wide hooks and patches, which all pipelines share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.install_count = 0
        self.cleanup = contextlib.ExitStack()


_interception = _Interception()


@contextlib.contextmanager
def intercept_operations() -> Iterator[None]:
    """Intercept module calls, autograd functions and checkpoints of micro-batches, on all threads."""
    with _interception.lock:
        _interception.install_count += 1
        if _interception.install_count == 1:
            _interception.cleanup.callback(register_module_forward_pre_hook(_before_module).remove)
            _interception.cleanup.callback(register_module_forward_hook(_after_module).remove)
            _interception.cleanup.enter_context(_intercept_functions())
            _interception.cleanup.enter_context(intercept_checkpoints(StageTransfer))
    try:
        _require_interception()
        yield
    finally:
        with _interception.lock:
            _interception.install_count -= 1
            if _interception.install_count == 0:
                _interception.cleanup.close()


@self_test('backend="balanced"', instead="use backend='ddp' or 'fsdp'")
def _require_interception() -> bool:
    """Checkpoint regions are recomputed in their segment, where they draw forward's random numbers again."""
    checkpoint: Any = torch_checkpoint.checkpoint
    forms: list[Any] = [functools.partial(checkpoint, use_reentrant=is_reentrant) for is_reentrant in (False, True)]
    if inspect.signature(checkpoint).parameters["function"].default is None:  # it is a decorator, too
        forms.append(lambda region, x: checkpoint(use_reentrant=False)(region)(x))
    return all(map(_recomputes_in_segment, forms))


def _recomputes_in_segment(checkpoint: Callable[..., torch.Tensor]) -> bool:
    drawn: list[torch.Tensor] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(2))
        return (x * drawn[-1]).exp()

    device = torch.device("cpu")
    run = MicrobatchRun(0, stages=[Stage(device)], routes={}, stage_parameters=StageParameters([device]), seed=0)
    call = functools.partial(checkpoint, region, torch.ones(2, requires_grad=True))
    _, leaf = run.export_output(run.call_forward(call, transfer=StageTransfer(run)))
    if leaf is None:
        return False
    leaf.grad = torch.ones(2)
    run.segments[-1].backward()
    return len(drawn) == 2 and torch.equal(*drawn)


@contextlib.contextmanager
def _intercept_functions() -> Iterator[None]:
    function: Any = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = active_run()
        own = original.__get__(None, cls)
        if cls is CheckpointFunction:  # not only in micro-batches: planning needs autograd.grad, which torch's refuses
            return checkpoint_reentrant(*args)
        if run is None or cls.__module__ == CheckpointFunction.__module__:  # torch 2.11 saves a region's inputs so
            return own(*args, **kwargs)
        return _call_on_stage(run, own, args, kwargs)

    replacement = classmethod(apply)
    function.apply = replacement
    try:
        yield
    finally:
        if function.__dict__["apply"] is replacement:
            function.apply = original


def _before_module(module: nn.Module, _args: Any) -> None:
    run = active_run()
    if run is not None and not run.must_stay_in_segment:
        run.enter_module(module)


def _after_module(module: nn.Module, args: Any, output: Any) -> None:
    """Guard the tensors that the module's forward hooks may capture: a loss on one would free the segment's graph."""
    run = active_run()
    if run is not None and not run.is_recomputing and (module._forward_hooks or module._forward_pre_hooks):
        for leaf in leaves((args, output)):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
                guard_gradients(leaf)


def _call_on_stage(run: MicrobatchRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own = tuple([_to_stage(run, each) for each in args])
    output = func(*own, **{name: _to_stage(run, each) for name, each in kwargs.items()} if kwargs else {})
    # An in-place operation returns its argument, which the segment has not produced: it may be a buffer.
    if not (own and output is own[0]):
        _mark_outputs(run, output)
    return output


def _check_gradients(run: MicrobatchRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse differentiation inside forward, except with respect to tensors that the current segment produced."""
    inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ()) if func is torch.autograd.grad else ()
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not inputs or not all(isinstance(each, torch.Tensor) and run.is_produced_here(each) for each in inputs):
        raise refusals.inner_gradient()


def _to_stage(run: MicrobatchRun, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return run.localize(value)
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_to_stage(run, each) for each in value])
    if kind is dict:
        return {name: _to_stage(run, each) for name, each in value.items()}
    return value


def _mark_outputs(run: MicrobatchRun, output: Any) -> None:
    if isinstance(output, torch.Tensor):
        run.mark_produced(output)
    elif isinstance(output, (tuple, list)):
        for each in output:
            _mark_outputs(run, each)
