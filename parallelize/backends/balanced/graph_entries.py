"""Entries of backward passes: a backward that reaches some micro-batches elsewhere than at their outputs is refused.

    loss ──> joined output ──> micro-batch 0, 1, 2, 3      the full batch: the search ends at the joined output
      └────> a tensor that forward has kept ──> micro-batch 3

Nodes are marked at the inputs of the first units and of each stage. Second derivatives reach the nodes of
all micro-batches in this way, too, and are right. torch.autograd.grad is not checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from parallelize.errors import ConfigError
from parallelize.runtime.autograd_graph import grad_fns_of, node_of, nodes_behind
from parallelize.runtime.weighted_backward import Roots, Weight

__all__ = ["GraphEntries", "Microbatch", "mark_inside", "mark_joined"]

_INSIDE = "parallelize: inside a micro-batch"
_JOINED = "parallelize: joined micro-batches"

Microbatch = tuple[object, int, int]
"""Object that stands for the batch, index of the micro-batch, number of micro-batches."""


def mark_inside(tensors: Any, microbatch: Microbatch) -> None:
    """Mark the nodes of tensors that one micro-batch uses; those that several use are outside of all of them."""
    for node in grad_fns_of(tensors):
        known = node.metadata.get(_INSIDE, microbatch)
        is_shared = known is None or (known[0] is microbatch[0] and known[1] != microbatch[1])
        node.metadata[_INSIDE] = None if is_shared else microbatch


def mark_joined(tensors: Any) -> None:
    """Mark the nodes of joined outputs, or of those of a batch that is not split: searches end there."""
    for node in grad_fns_of(tensors):
        node.metadata[_JOINED] = True


def _entered(node: Any) -> Microbatch | None:
    """Return the micro-batch inside of which a node is; None: none, or it is behind a joined output."""
    return None if _JOINED in node.metadata else node.metadata.get(_INSIDE)


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
        nodes = nodes_behind(
            map(node_of, roots), is_end=lambda node: _JOINED in node.metadata or _entered(node) is not None
        )
        reached = {batch for node in nodes if (batch := _entered(node)) is not None}
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
