"""Backward passes after the block has ended: the gradients that they accumulate are not averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import nn

from parallelize.inplace.gradient_origins import AFTER_BLOCK
from parallelize.inplace.step_watch import leave_gradient
from parallelize.runtime.gradients import at_end_of_backward, grad_fns_of, gradient_version

__all__ = ["BackwardAfterBlock"]


class BackwardAfterBlock:
    """Hooks on the outputs of a model, which watch the gradients that accumulate after the model's block.

        prehook of a grad_fn    a backward pass begins; if the block has ended, record the version of each gradient
        end of that pass        watch the gradients whose versions have changed; torch.autograd.grad changes none

    Args:
        model: the model of the block.
        in_block: called when a backward pass in the block reaches an output.
    """

    def __init__(self, model: nn.Module, *, in_block: Callable[[], None]) -> None:
        # Weak: the garbage collector does not traverse autograd nodes, so a model that stores its output would leak.
        self._model = ref(model)
        self._is_block_over = False
        self._in_block = WeakMethod(in_block)

    def register_hooks(self, output: Any) -> None:
        """Register hooks on the grad_fns of an output of the model."""
        for node in grad_fns_of(output):
            node.register_prehook(self._on_backward)

    def close(self) -> None:
        """Mark the block as ended."""
        self._is_block_over = True

    def _on_backward(self, _: tuple[torch.Tensor, ...]) -> None:
        if not self._is_block_over:
            in_block = self._in_block()
            if in_block is not None:
                in_block()
        else:
            before = {name: gradient_version(each.grad) for name, each in self._gradients()}
            at_end_of_backward(lambda: self._leave_changed(before))

    def _leave_changed(self, before: dict[str, tuple[int, int]]) -> None:
        for name, each in self._gradients():
            if gradient_version(each.grad) != before.get(name):
                leave_gradient(each, f"{name} of {type(self._model()).__name__}", AFTER_BLOCK)

    def _gradients(self) -> list[tuple[str, Any]]:
        model = self._model()
        named = () if model is None else model.named_parameters()
        return [(name, each) for name, each in named if each.grad is not None]
