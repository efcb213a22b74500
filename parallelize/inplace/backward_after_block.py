"""Backwards that come after the block of their forward, when nobody averages gradients any more."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from parallelize.backends.origins import origins
from parallelize.errors import SyncError
from parallelize.runtime.gradients import at_end_of_backward, identity

__all__ = ["Latecomers"]


class Latecomers:
    """Refuses, once a block is over, backward of what its model has returned inside, if it brings gradients.

        hook of an output       a backward begins; during the block this is all
        end of that backward    whether a parameter's gradient is another one now: torch.autograd.grad brings none

    Args:
        model: the block's.
    """

    def __init__(self, model: nn.Module) -> None:
        # An output that the model itself keeps would keep the model, through nodes that no collector looks into.
        self._model = weakref.ref(model)
        self._is_over = False

    def expect(self, output: Any) -> None:
        """That the model has returned `output`."""
        for node in origins(output):
            node.register_prehook(self._on_backward)

    def close(self) -> None:
        """The block is over."""
        self._is_over = True

    def _on_backward(self, _: tuple[torch.Tensor, ...]) -> None:
        if self._is_over:
            before = self._gradients()
            at_end_of_backward(lambda: self._on_end(before))

    def _on_end(self, before: dict[str, tuple[int, int]]) -> None:
        model = self._model()
        for name, now in self._gradients().items():
            if now != before.get(name):
                raise SyncError(
                    f"backward after the parallel_model block of {type(model).__name__}, of a forward inside of it",
                    why=f"gradients are averaged over the ranks in the block only: that of {name} is this rank's own",
                    fix="put the whole loop inside the block: with parallel_model(model): for x, y in loader: ...",
                )

    def _gradients(self) -> dict[str, tuple[int, int]]:
        model = self._model()
        named = () if model is None else model.named_parameters()
        return {name: identity(each.grad) for name, each in named if each.grad is not None}
