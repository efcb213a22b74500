"""Which leaves a backward will give gradients to, beside the parameters that are known anyway."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallelize.runtime.containers import leaves

__all__ = ["Reach", "mark", "reach"]

_KEY = "parallelize: inputs"
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Reach:
    """What a backward gets to.

    Args:
        known: whether a parameter of the block's models is among it.
        others: every other leaf.
    """

    known: bool
    others: tuple[torch.Tensor, ...]


def mark(outputs: Any, *, args: Any, kwargs: Any, owner: object) -> None:
    """Write on the outputs of a routed forward what went into it, so that `reach` can step over the model's graph.

        leaf x ── ops ──┐                      ┌── ops ── loss
                        args ─[ the model ]─ outputs
                          └───── mark ─────────┘

    Nodes of the graph hold the mark themselves: it goes when the graph goes, and holds nothing that the graph does not.

    Args:
        outputs: what the forward returned.
        args: its positional arguments.
        kwargs: its keyword arguments.
        owner: only a `reach` for the same owner trusts the mark.
    """
    given = [*leaves(args), *leaves(kwargs)]
    if any(not isinstance(value, (torch.Tensor, *_PLAIN)) for value in given):
        # An object that we cannot look into may hold a tensor with a history of its own.
        return
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    inputs = {get_gradient_edge(value).node for value in tensors if value.requires_grad}
    for value in leaves(outputs):
        node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
        if node is not None and node not in inputs:
            node.metadata[_KEY] = (owner, inputs)


def reach(roots: Iterable[torch.Tensor | GradientEdge], *, known: Container[int], owner: object) -> Reach:
    """Walk the graph under the roots of a backward, as far as it is not marked.

    Args:
        roots: as torch.autograd.backward takes them.
        known: ids of the parameters of the block's models.
        owner: whose marks to trust.
    """
    pending: list[Any] = [_node_of(root) for root in roots]
    seen: set[Any] = set()
    others = []
    touches = False
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        marked = node.metadata.get(_KEY)
        if marked is not None and marked[0] is owner:
            touches = True
            pending.extend(marked[1])
        elif node.next_functions:
            pending.extend(following for following, _ in node.next_functions)
        elif isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            if id(leaf) in known:
                touches = True
            else:
                others.append(leaf)
    return Reach(touches, tuple(others))


def _node_of(root: torch.Tensor | GradientEdge) -> Any:
    if isinstance(root, GradientEdge):
        return root.node
    return get_gradient_edge(root).node if root.requires_grad else None
