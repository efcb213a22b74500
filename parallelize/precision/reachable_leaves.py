"""Search of the autograd graph for the leaves that a backward gives gradients to."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallelize.runtime.containers import leaves
from parallelize.runtime.gradients import grad_fns_of

__all__ = ["ReachableLeaves", "find_reachable_leaves", "mark_outputs"]

_METADATA_KEY = "parallelize: inputs"
_TYPES_WITHOUT_TENSORS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


class ReachableLeaves(NamedTuple):
    """The leaves that a backward reaches: whether a parameter of the block's models is among them, and all others."""

    has_known: bool
    others: tuple[torch.Tensor, ...]


def mark_outputs(outputs: Any, *, args: Any, kwargs: Any, owner: object, on_backward: Callable[[Any], None]) -> None:
    """Store the inputs of a routed forward in the graph nodes of its outputs, so that searches skip the model's graph.

        leaf x ── ops ──┐                      ┌── ops ── loss
                        args ─[ the model ]─ outputs
                          └───── mark ─────────┘

    A mark in the metadata of a node lives as long as the graph, and references only nodes of the graph.

    Args:
        outputs: the value that the forward returned.
        args: positional arguments of the forward.
        kwargs: keyword arguments of the forward.
        owner: key of the mark: only searches with the same owner use the mark.
        on_backward: called by a backward pass that reaches an output, with the gradients there.
    """
    values = [*leaves(args), *leaves(kwargs)]
    if any(not isinstance(value, (torch.Tensor, *_TYPES_WITHOUT_TENSORS)) for value in values):
        # Any other object may hold a tensor with a graph that the mark would hide.
        return
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    inputs = {get_gradient_edge(value).node for value in tensors if value.requires_grad}
    for node in grad_fns_of(outputs):
        if node not in inputs:
            node.metadata[_METADATA_KEY] = (owner, inputs)
            node.register_prehook(on_backward)


def find_reachable_leaves(
    roots: Iterable[torch.Tensor | GradientEdge], *, known: Container[int], owner: object
) -> ReachableLeaves:
    """Return the leaves in the graph of `roots`, except leaves behind a mark.

    Args:
        roots: the `tensors` argument of torch.autograd.backward.
        known: ids of the parameters of the block's models.
        owner: only marks with this owner are used; None: no marks.
    """
    pending: list[Any] = [_node_of(root) for root in roots]
    seen: set[Any] = set()
    others = []
    has_known = False
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        marked = node.metadata.get(_METADATA_KEY)
        if marked is not None and marked[0] is owner:
            has_known = True
            pending.extend(marked[1])
        elif node.next_functions:
            pending.extend(next_node for next_node, _ in node.next_functions)
        elif isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            if id(leaf) in known:
                has_known = True
            else:
                others.append(leaf)
    return ReachableLeaves(has_known, tuple(others))


def _node_of(root: torch.Tensor | GradientEdge) -> Any:
    if isinstance(root, GradientEdge):
        return root.node
    return get_gradient_edge(root).node if root.requires_grad else None
