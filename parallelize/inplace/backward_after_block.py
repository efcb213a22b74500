"""Refuses backward passes after the block has ended: the gradients that they accumulate would not be averaged."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from parallelize.errors import SyncError
from parallelize.runtime.gradients import at_end_of_backward, grad_fns_of, gradient_version

__all__ = ["BackwardAfterBlock"]


class BackwardAfterBlock:
    """Hooks on the outputs of a model, which raise an error if gradients accumulate after the model's block.

        prehook of a grad_fn    a backward pass begins; if the block has ended, record the version of each gradient
        end of that pass        raise SyncError if a version has changed; torch.autograd.grad changes none

    Args:
        model: the model of the block.
    """

    def __init__(self, model: nn.Module) -> None:
        # Weak: the garbage collector does not traverse autograd nodes, so a model that stores its output would leak.
        self._model = weakref.ref(model)
        self._is_block_over = False

    def register_hooks(self, output: Any) -> None:
        """Register hooks on the grad_fns of an output of the model."""
        for node in grad_fns_of(output):
            node.register_prehook(self._on_backward)

    def close(self) -> None:
        """Mark the block as ended; from then on, backward passes must not accumulate gradients."""
        self._is_block_over = True

    def _on_backward(self, _: tuple[torch.Tensor, ...]) -> None:
        if self._is_block_over:
            before = self._gradient_versions()
            at_end_of_backward(lambda: self._refuse_changed_gradients(before))

    def _refuse_changed_gradients(self, before: dict[str, tuple[int, int]]) -> None:
        model = self._model()
        for name, now in self._gradient_versions().items():
            if now != before.get(name):
                raise SyncError(
                    f"backward after the parallel_model block of {type(model).__name__}, for a forward inside it",
                    why=f"gradients are averaged only inside the block: {name}.grad covers this rank's batch alone",
                    fix="put the whole loop inside the block: with parallel_model(model): for x, y in loader: ...",
                )

    def _gradient_versions(self) -> dict[str, tuple[int, int]]:
        model = self._model()
        named = () if model is None else model.named_parameters()
        return {name: gradient_version(each.grad) for name, each in named if each.grad is not None}
