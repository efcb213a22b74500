"""Replacements for torch.autograd.backward and torch.autograd.grad inside a block."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from parallelize.precision.autocast import HeldAutocast
from parallelize.precision.gradient_scaling import GradientScaling
from parallelize.runtime import torch_compile
from parallelize.torch_patches.backward import Order, Pass, Run, as_roots, is_in_backward, subscribed

__all__ = ["PatchedGrad", "ScaledBackward", "active_scaling"]


class _BackwardState(threading.local):
    """Thread-local flag: whether a backward pass that the user called is running on this thread."""

    is_running = False


class _Patch:
    """Replacement for a function of torch.autograd.

    Args:
        original: the function that this one replaces.
        autocast: the block's autocast.
        scaling: the block's own loss scaling; None: the block has none.
        recomputation: the context in which activation checkpoints rerun their forward.
    """

    __call__: Callable[..., Any]

    def __init__(
        self,
        original: Callable[..., Any],
        *,
        autocast: HeldAutocast,
        scaling: GradientScaling | None,
        recomputation: contextlib.AbstractContextManager[object],
    ) -> None:
        self._original = original
        self._autocast = autocast
        self._own_scaling = scaling
        self._recomputation = recomputation
        self._thread = _BackwardState()
        functools.update_wrapper(self, original)


class ScaledBackward:
    """Subscriber of torch_patches.backward that first exits autocast, and scales the loss.

    Args:
        autocast: the block's autocast.
        scaling: the block's own loss scaling; None: the block has none.
        recomputation: the context in which activation checkpoints rerun their forward.
    """

    def __init__(
        self,
        *,
        autocast: HeldAutocast,
        scaling: GradientScaling | None,
        recomputation: contextlib.AbstractContextManager[object],
    ) -> None:
        self._autocast, self._scaling, self._recomputation = autocast, scaling, recomputation

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Scale the losses of backward passes in the context."""
        with subscribed(Order.SCALE, self._run):
            if self._scaling is None:
                yield
                return
            _active.append(self._scaling)
            try:
                yield
            finally:
                _active.remove(self._scaling)

    def _run(self, each: Pass, run: Run) -> None:
        self._autocast.exit()
        with torch_compile.compilation_disabled(), self._recomputation:
            if self._scaling is None:
                run(each)
                return
            for tensor in _input_tensors(each.options["inputs"]):
                if not tensor.is_leaf:
                    self._scaling.track_non_leaf(tensor)
            self._scaling.backward(each.roots, each.gradients, lambda start: run(replace(each, gradients=start)))


def _input_tensors(inputs: Any) -> list[torch.Tensor]:
    """Return the tensors in backward's `inputs` argument, which get gradients even if they are not leaves."""
    if inputs is None or isinstance(inputs, (torch.Tensor, GradientEdge)):
        values = [inputs]
    else:
        values = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    return [each for each in values if isinstance(each, torch.Tensor)]


class PatchedGrad(_Patch):
    """Replacement for torch.autograd.grad that disables autocast during the call, as in backward, and scales inside.

    Torch calls it again for subclasses of Tensor and under function modes, and users call it in backward: gradients of
    these nested calls are scaled already.
    """

    def __call__(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,  # noqa: FBT001  # torch's own signature
        create_graph: bool = False,  # noqa: FBT001, FBT002  # torch's own signature
        *args: Any,
        **options: Any,
    ) -> Any:
        """Compute gradients, with the arguments of torch.autograd.grad."""
        if not isinstance(inputs, (torch.Tensor, GradientEdge, Mapping)):
            inputs = tuple(inputs)
        roots = as_roots(outputs)

        def run(initial: Any, *, is_graph_kept: bool = False) -> Any:
            is_retained = True if is_graph_kept else retain_graph
            return self._original(roots, inputs, initial, is_retained, create_graph, *args, **options)

        if self._thread.is_running or is_in_backward():
            with self._autocast.disabled():
                return run(grad_outputs)
        with self._autocast.disabled(), self._recomputation:
            if self._own_scaling is None:
                return run(grad_outputs)
            self._thread.is_running = True
            try:
                with torch_compile.compilation_disabled():
                    return self._own_scaling.grad(roots, grad_outputs, run)
            finally:
                self._thread.is_running = False


# The loss scalings of the open blocks, the innermost one last. Global, as torch.autograd.backward is.
_active: list[GradientScaling] = []


def active_scaling() -> GradientScaling | None:
    """Return the loss scaling of the innermost block that scales losses, or None."""
    return _active[-1] if _active else None
