"""Helpers for gradients and backward passes: parameters of optimizers, gradient versions, callbacks, grad_fns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from parallelize.runtime.containers import leaves

__all__ = [
    "at_end_of_backward",
    "backward_id",
    "grad_fns_of",
    "gradient_version",
    "has_sparse_gradient",
    "is_in_backward",
    "parameters_of",
    "reaches_any",
]


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield the parameters of an optimizer, param group by param group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def has_sparse_gradient(module: nn.Module) -> bool:
    """Whether the gradient of the module's weight is sparse."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def gradient_version(gradient: torch.Tensor) -> tuple[int, int]:
    """Return (id, version), which changes when `.grad` is replaced or modified in place."""
    return id(gradient), gradient._version


def backward_id() -> int:
    """Return the ID of the backward pass that this thread is running; -1 outside of a backward pass."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return backward_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Queue a callback for the end of the running backward pass, as DDP's reducer does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def grad_fns_of(output: Any) -> list[Any]:
    """Return the distinct grad_fns of a model's output, where backward starts; torch's pytrees are searched, too."""
    nodes = (getattr(leaf, "grad_fn", None) for leaf in tree_leaves(list(leaves(output))))
    return list(dict.fromkeys(node for node in nodes if node is not None))


def reaches_any(tensors: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a backward pass from one of the tensors reaches one of the parameters."""
    ids = {id(each) for each in parameters}
    pending: list[Any] = [each if each.grad_fn is None else each.grad_fn for each in tensors]
    visited = set()
    while pending:
        node = pending.pop()
        if id(getattr(node, "variable", node)) in ids:  # AccumulateGrad.variable
            return True
        for following, _ in getattr(node, "next_functions", ()):
            if following is not None and following not in visited:
                visited.add(following)
                pending.append(following)
    return False
