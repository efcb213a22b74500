"""torch.autograd.backward as it is while a block lasts."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from parallelize.precision import torch_compile
from parallelize.precision.autocast import Window
from parallelize.precision.gradient_scaling import Scaling

__all__ = ["Backward", "Grad", "current_scaling"]


class _Running(threading.local):
    """Whether a call from the outside runs on this thread."""

    now = False


class Backward:
    """Leaves autocast and scales, then calls what was there before.

    `Tensor.backward` looks this function up each time it is called, so that one patch serves both. It is called again
    from the inside: by a reentrant checkpoint, and by torch itself for subclasses of Tensor. Only the outermost call is
    the user's; the others find gradients that are scaled already.

    Args:
        original: what was there before.
        window: the block's autocast.
        scaling: the block's loss scaling, if it has one of its own.
        around: what must be in force for the forwards that backward runs again.
    """

    def __init__(
        self,
        original: Callable[..., None],
        *,
        window: Window,
        scaling: Scaling | None,
        around: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._original = original
        self._window = window
        self._own = scaling
        self._around = around
        self._running = _Running()
        functools.update_wrapper(self, original)

    @property
    def scaling(self) -> Scaling | None:
        """What scales a loss here: this block's scaling, or that of a block around it."""
        return self._own or (self._original.scaling if isinstance(self._original, Backward) else None)

    def __call__(  # noqa: PLR0917  # torch's own signature
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,  # noqa: FBT001  # torch's own signature
        create_graph: bool = False,  # noqa: FBT001, FBT002  # torch's own signature
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """torch.autograd.backward."""
        rest = {
            "retain_graph": retain_graph,
            "create_graph": create_graph,
            "grad_variables": grad_variables,
            "inputs": inputs,
        }
        if self._running.now or torch._C._current_graph_task_id() != -1:
            self._original(tensors, grad_tensors, **rest)
            return
        self._window.leave()
        self._running.now = True
        try:
            with torch_compile.paused(), self._around():
                if self._own is None:
                    self._original(tensors, grad_tensors, **rest)
                    return
                roots = (tensors,) if isinstance(tensors, (torch.Tensor, GradientEdge)) else tuple(tensors)
                self._scaled(self._own, roots, grad_tensors, rest)
        finally:
            self._running.now = False

    def _scaled(self, scaling: Scaling, roots: tuple[Any, ...], gradients: Any, rest: Mapping[str, Any]) -> None:
        # The deprecated name means the same; both at once is an error that torch has its own words for.
        name = "grad_variables" if gradients is None and rest["grad_variables"] is not None else "grad_tensors"
        given = rest["grad_variables"] if name == "grad_variables" else gradients
        started = (given,) if isinstance(given, torch.Tensor) else tuple(given or [None] * len(roots))
        for each in _inputs(rest["inputs"]):
            if not each.is_leaf:
                scaling.retain(each)

        def run(start: Sequence[torch.Tensor | None]) -> None:
            self._original(roots, **{"grad_tensors": gradients, **rest, name: tuple(start)})

        scaling.backward(roots, started, run)


def _inputs(inputs: Any) -> list[torch.Tensor]:
    """The tensors among backward's `inputs`: they get gradients even if they are no leaves."""
    if inputs is None or isinstance(inputs, (torch.Tensor, GradientEdge)):
        several = [inputs]
    else:
        several = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    return [each for each in several if isinstance(each, torch.Tensor)]


class Grad:
    """torch.autograd.grad outside of autocast, where gradients belong; it is on again for the loss that follows.

    Args:
        original: what was there before.
        window: the block's autocast.
    """

    def __init__(self, original: Callable[..., Any], *, window: Window) -> None:
        self._original = original
        self._window = window
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """torch.autograd.grad."""
        with self._window.set_aside():
            return self._original(*args, **kwargs)


def current_scaling() -> Scaling | None:
    """The loss scaling of the block around this code, if there is one: the patch itself is where it is written."""
    backward = torch.autograd.backward
    return backward.scaling if isinstance(backward, Backward) else None
