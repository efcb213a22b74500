"""Entries of backward passes: a backward that reaches some micro-batches elsewhere than at their outputs is refused.

    loss ──> joined output ──> micro-batch 0, 1, 2, 3      the full batch: the search ends at the joined output
      └────> a tensor that forward has kept ──> micro-batch 3

Nodes are marked at the inputs of the first units and of each stage. Second derivatives reach the nodes of
all micro-batches in this way, too, and are right. torch.autograd.grad is not checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallelize.errors import ConfigError
from parallelize.runtime.containers import leaves
from parallelize.runtime.weighted_backward import Roots, Weight

__all__ = ["GraphEntries", "Microbatch", "mark_inside", "mark_joined"]

_INSIDE = "parallelize: inside a micro-batch"
_JOINED = "parallelize: joined micro-batches"

Microbatch = tuple[object, int, int]
"""Object that stands for the batch, index of the micro-batch, number of micro-batches."""


def mark_inside(tensors: Any, microbatch: Microbatch) -> None:
    """Mark the nodes of tensors that one micro-batch uses; those that several use are outside of all of them."""
    for node in _nodes(tensors):
        known = node.metadata.get(_INSIDE, microbatch)
        is_shared = known is None or (known[0] is microbatch[0] and known[1] != microbatch[1])
        node.metadata[_INSIDE] = None if is_shared else microbatch


def mark_joined(tensors: Any) -> None:
    """Mark the nodes of joined outputs, or of those of a batch that is not split: searches end there."""
    for node in _nodes(tensors):
        node.metadata[_JOINED] = True


def _nodes(tensors: Any) -> Iterator[Any]:
    return (each.grad_fn for each in leaves(tensors) if isinstance(each, torch.Tensor) and each.grad_fn is not None)


class GraphEntries:
    """Check of each backward pass in a context, called by `weigh_losses`; the weights of losses stay as they are."""

    is_uniform = True

    def __init__(self, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._context = context

    def weigh(self, roots: Roots, batch_weight: float, backward: Callable[[Weight | None], None]) -> None:
        """Check a backward pass, and run it.

        Raises:
            ConfigError: it reaches some but not all micro-batches of a batch elsewhere than at the joined outputs.
        """
        del batch_weight
        reached = set(_entries(roots))
        if any(sum(batch is other for other, *_ in reached) < count for batch, _, count in reached):
            raise ConfigError(
                "a backward pass reaches some micro-batches elsewhere than at the model's output",
                why="forward has kept a tensor of one micro-batch, in a global or a list, which it did not for an "
                "earlier batch like this one; its gradient would miss the other micro-batches",
                fix="return the tensor from forward; or use BalancedBackend(microbatches=1), which does not split "
                "batches, or backend='ddp'",
            )
        with self._context():
            backward(None)


def _entries(roots: Iterable[torch.Tensor | GradientEdge]) -> Iterator[Microbatch]:
    """Yield the micro-batches that are reached from the roots without passing a joined output."""
    edges = [each if isinstance(each, GradientEdge) else get_gradient_edge(each) for each in roots if _is_root(each)]
    pending: list[Any] = [edge.node for edge in edges]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        marks = node.metadata
        if _JOINED in marks:
            continue
        if marks.get(_INSIDE) is not None:
            yield marks[_INSIDE]
        else:
            pending.extend(each for each, _ in node.next_functions)


def _is_root(root: torch.Tensor | GradientEdge) -> bool:
    return isinstance(root, GradientEdge) or root.requires_grad
