"""Gradients as several parts of the package see them: who holds them, what brings them, whether they changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["at_end_of_backward", "has_sparse_gradient", "identity", "is_in_backward", "parameters_of"]


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The parameters that an optimizer steps on, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def has_sparse_gradient(module: nn.Module) -> bool:
    """Whether backward gives the module's weight a sparse gradient."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def identity(gradient: torch.Tensor) -> tuple[int, int]:
    """Another one once the gradient is replaced or written to."""
    return id(gradient), gradient._version


def is_in_backward() -> bool:
    """Whether this thread computes inside a backward."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Let the engine call `callback` when the backward that is running has ended, as torch's own reducers do."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
