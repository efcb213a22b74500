"""Search of the autograd graph for the leaves that a backward gives gradients to."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import torch

from parallelize.runtime.autograd_graph import mark_outputs, node_of, nodes_behind
from parallelize.runtime.containers import leaves
from parallelize.torch_patches.backward import Root

__all__ = ["ReachableLeaves", "find_reachable_leaves", "mark_forward"]

_KEY = "parallelize: inputs"
_TYPES_WITHOUT_TENSORS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


class ReachableLeaves(NamedTuple):
    """The leaves that a backward reaches: whether a parameter of the block's models is among them, and all others."""

    has_known: bool
    others: tuple[torch.Tensor, ...]


def mark_forward(outputs: Any, *, inputs: Any, owner: object, on_backward: Callable[[Any], None]) -> None:
    """Mark the outputs of a routed forward, so that searches skip the model's graph.

    Args:
        outputs: the value that the forward returned.
        inputs: the arguments of the forward.
        owner: only searches with the same owner use the mark.
        on_backward: called by a backward pass that reaches an output, with the gradients there.
    """
    if not all(isinstance(value, (torch.Tensor, *_TYPES_WITHOUT_TENSORS)) for value in leaves(inputs)):
        return  # any other object may hold a tensor with a graph that the mark would hide
    for node in mark_outputs(outputs, inputs=inputs, key=_KEY, owner=owner):
        if owner in node.metadata.get(_KEY, ()):
            node.register_prehook(on_backward)


def find_reachable_leaves(roots: Iterable[Root], *, known: Container[int], owner: object) -> ReachableLeaves:
    """Return the leaves in the graph of `roots`, except leaves behind a mark.

    Args:
        roots: the `tensors` argument of torch.autograd.backward.
        known: ids of the parameters of the block's models.
        owner: only marks with this owner are used; None: no marks.
    """
    has_known, others = False, []
    for node in nodes_behind(map(node_of, roots), key=_KEY, owner=owner):
        leaf = None if node.next_functions else getattr(node, "variable", None)
        if id(leaf) in known or owner in node.metadata.get(_KEY, ()):
            has_known = True
        elif isinstance(leaf, torch.Tensor):
            others.append(leaf)
    return ReachableLeaves(has_known, tuple(others))
