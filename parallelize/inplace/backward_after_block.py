"""Backward passes that are not averaged or weighted: after the block, or by a function imported before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import nn

from parallelize.errors import ConfigError
from parallelize.inplace.gradient_origins import AFTER_BLOCK, GradientTracker
from parallelize.inplace.step_watch import leave_gradient
from parallelize.runtime.gradients import at_end_of_backward, gradient_version
from parallelize.runtime.weighted_backward import bypasses_weights

__all__ = ["BackwardAfterBlock"]


class BackwardAfterBlock:
    """Hooks on the outputs of a model, which watch the gradients that accumulate outside of its block's patches.

        prehook of a grad_fn    a backward pass begins; if the block has ended, or the pass bypasses the weighting of
                                losses, record the version of each gradient
        end of that pass        watch the gradients whose versions have changed, or refuse them; torch.autograd.grad
                                changes none

    Args:
        model: the model of the block.

    Attributes:
        tracker: records the gradients of the running block; None: no engine averages them, or the block has ended.
    """

    def __init__(self, model: nn.Module) -> None:
        # Weak: the garbage collector does not traverse autograd nodes, so a model that stores its output would leak.
        self._model = ref(model)
        self._is_block_over = False
        self.tracker: GradientTracker | None = None

    def register_hooks(self, nodes: Iterable[Any]) -> None:
        """Register hooks on the grad_fns of an output of the model."""
        for node in nodes:
            node.register_prehook(self._on_backward)

    def close(self) -> None:
        """Mark the block as ended."""
        self._is_block_over, self.tracker = self.tracker is not None, None

    def _on_backward(self, _: tuple[torch.Tensor, ...]) -> None:
        if self.tracker is not None and self.tracker.on_backward():
            return
        if self._is_block_over or bypasses_weights():
            before = {name: gradient_version(each.grad) for name, each in self._gradients()}
            # An engine may queue its callback after this one; a callback that this one queues runs after both.
            at_end_of_backward(lambda: at_end_of_backward(lambda: self._on_end(before)))

    def _on_end(self, before: dict[str, tuple[int, int]]) -> None:
        for name, each in self._gradients():
            if gradient_version(each.grad) == before.get(name):
                continue
            if not self._is_block_over:
                raise ConfigError(
                    f"a backward pass through {type(self._model()).__name__} did not start at loss.backward() or "
                    "torch.autograd.backward()",
                    why="its function was imported before the block, which weights losses, so the gradients are those "
                    "of an unweighted loss",
                    fix="call loss.backward(), or torch.autograd.backward(...) by this name",
                )
            leave_gradient(each, f"{name} of {type(self._model()).__name__}", AFTER_BLOCK)

    def _gradients(self) -> list[tuple[str, Any]]:
        model = self._model()
        named = () if model is None else model.named_parameters()
        return [(name, each) for name, each in named if each.grad is not None]
