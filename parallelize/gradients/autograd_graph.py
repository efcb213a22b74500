"""Autograd graphs: what a backward pass reaches, and marks of models in the nodes of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from parallelize.run.containers import leaves
from parallelize.torch_patches.backward import Root

__all__ = [
    "MODELS_KEY",
    "grad_fns_of",
    "has_sparse_gradient",
    "mark_outputs",
    "node_of",
    "nodes_behind",
    "scaled_start",
]

MODELS_KEY = "parallelize: models"  # key of `mark_outputs`, with blocks as owners


def has_sparse_gradient(module: nn.Module) -> bool:
    """Whether the gradient of the module's weight is sparse."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def node_of(root: Root) -> Any:
    """Return the node at which a backward pass from `root` starts, AccumulateGrad for a leaf; None: there is none."""
    if isinstance(root, GradientEdge):
        return root.node
    node = root.grad_fn
    return get_gradient_edge(root).node if node is None and root.requires_grad else node


def grad_fns_of(output: Any) -> list[Any]:
    """Return the distinct grad_fns of a model's output, where backward starts.

    torch's pytrees are searched, too, and the attributes of plain objects.
    """
    nodes: dict[Any, None] = {}
    for leaf in [output] if type(output) is torch.Tensor else leaves(output):
        found = [leaf]
        if not isinstance(leaf, torch.Tensor):
            found = tree_leaves(leaf)
            if len(found) == 1 and found[0] is leaf and hasattr(leaf, "__dict__"):
                found = tree_leaves(list(vars(leaf).values()))
        for each in found:
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                nodes[each.grad_fn] = None
    return list(nodes)


def nodes_behind(
    nodes: Iterable[Any], *, key: str = "", owner: object = None, is_end: Callable[[Any], bool] | None = None
) -> Iterator[Any]:
    """Yield the nodes that a backward pass from `nodes` reaches, each once, in a fixed order, with these nodes.

    Args:
        nodes: nodes of the graph; None is ignored.
        key: with `owner`, the marks behind which the search goes on at the inputs of a model; "": it uses no marks.
        owner: as for `mark_outputs`.
        is_end: returns whether the search ends at a node, which is yielded; None: only where the graph ends.
    """
    pending, seen = list(nodes), {None}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        marks = node.metadata.get(key)
        if is_end is not None and is_end(node):
            continue
        if marks is not None and owner in marks:
            pending += marks[owner]
        else:
            for each, _ in node.next_functions:
                pending.append(each)


def scaled_start(roots: Sequence[Root], given: Any, factor: Callable[[torch.Tensor], Any]) -> list[torch.Tensor | None]:
    """Return the gradients from which a backward pass starts, times a factor.

    Args:
        roots: where it starts.
        given: the gradients there, as the user has given them; None: 1.
        factor: returns the factor for a gradient, on its device.

    Returns:
        One gradient per root; None for a root for which torch raises an error, as it does if their
        numbers differ.
    """
    gradients = (given,) if isinstance(given, torch.Tensor) else tuple(given or [None] * len(roots))
    if len(gradients) == len(roots):
        pairs = zip(roots, gradients, strict=True)
        gradients = tuple(_ones(root) if each is None else each for root, each in pairs)
    return [None if each is None else (each * factor(each)).to(each.dtype) for each in gradients]


def _ones(root: Root) -> torch.Tensor | None:
    """Return the gradient 1 from which torch starts by default; None where torch raises an error."""
    if isinstance(root, GradientEdge):
        meta = root.node._input_metadata[root.output_nr]
        size = torch.Size(meta.shape)
        return torch.ones(size, dtype=meta.dtype, device=meta.device) if size.numel() == 1 else None
    if not root.requires_grad or root.numel() != 1 or not root.is_floating_point():
        return None
    return torch.ones_like(root, memory_format=torch.preserve_format, requires_grad=False)


def mark_outputs(outputs: Any, *, inputs: Any, key: str, owner: object) -> list[Any]:
    """Store the inputs of a model's forward in the graph nodes of its outputs, so that searches skip its own graph.

        leaf x ── ops ──┐                        ┌── ops ── loss
                        inputs ─[ the model ]─ outputs
                          └─────── mark ─────────┘

    A mark in the metadata of a node lives as long as the graph, and references only nodes of the graph.

    Args:
        outputs: the value that the forward returned.
        inputs: the values that it received.
        key: key of the metadata; its value is a dictionary: owner -> nodes of the inputs.
        owner: what the mark stands for, such as the model.

    Returns:
        The nodes of the outputs; those that are also inputs have no mark.
    """
    before, nodes = set(), grad_fns_of(outputs)
    for each in leaves(inputs):  # a loop: called in every step
        if isinstance(each, torch.Tensor) and each.requires_grad:
            before.add(node_of(each))
    for node in nodes:
        if node not in before:
            node.metadata.setdefault(key, {})[owner] = before
    return nodes
