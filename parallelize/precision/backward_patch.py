"""Replacements for torch.autograd.backward and torch.autograd.grad inside a block."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from parallelize.precision.autocast import HeldAutocast
from parallelize.precision.gradient_scaling import GradientScaling
from parallelize.runtime import torch_compile
from parallelize.runtime.autograd_graph import as_roots
from parallelize.runtime.gradients import is_in_backward

__all__ = ["PatchedBackward", "PatchedGrad", "active_scaling"]

_OPTIONS = ("retain_graph", "create_graph", "grad_variables", "inputs")  # of torch.autograd.backward


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


class PatchedBackward(_Patch):
    """Replacement for torch.autograd.backward that first exits autocast and scales the loss.

    `Tensor.backward` looks up torch.autograd.backward at each call, so this patch covers both. Reentrant checkpoints,
    and torch for subclasses of Tensor, call it inside a running backward pass. These nested calls are passed on
    unchanged, because their gradients are scaled already.
    """

    @property
    def scaling(self) -> GradientScaling | None:
        """The loss scaling of this block, or else of an enclosing block; None: no loss scaling."""
        return self._own_scaling or (self._original.scaling if isinstance(self._original, PatchedBackward) else None)

    def __call__(self, tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
        """Run a backward pass, with the arguments of torch.autograd.backward."""
        options.update(zip(_OPTIONS, args, strict=False))
        if self._thread.is_running or is_in_backward():
            self._original(tensors, grad_tensors, **options)
            return
        self._autocast.exit()
        self._thread.is_running = True
        try:
            with torch_compile.compilation_disabled(), self._recomputation:
                if self._own_scaling is None:
                    self._original(tensors, grad_tensors, **options)
                    return
                self._run_scaled(self._own_scaling, tensors, grad_tensors, options)
        finally:
            self._thread.is_running = False

    def _run_scaled(self, scaling: GradientScaling, tensors: Any, gradients: Any, options: Mapping[str, Any]) -> None:
        # `grad_variables` is the deprecated name of `grad_tensors`; torch raises if both are passed.
        deprecated = options.get("grad_variables")
        name = "grad_variables" if gradients is None and deprecated is not None else "grad_tensors"
        initial = deprecated if name == "grad_variables" else gradients
        roots = as_roots(tensors)
        for each in _input_tensors(options.get("inputs")):
            if not each.is_leaf:
                scaling.track_non_leaf(each)

        scaling.backward(
            roots, initial, lambda start: self._original(roots, **{"grad_tensors": gradients, **options, name: start})
        )


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


def active_scaling() -> GradientScaling | None:
    """Return the loss scaling of the innermost block that scales losses, or None; found in the patched backward."""
    backward = torch.autograd.backward
    return backward.scaling if isinstance(backward, PatchedBackward) else None
