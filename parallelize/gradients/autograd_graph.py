"""Autograd graphs: what a backward pass reaches, and marks of models in the nodes of their outputs.

    node      an operation of the graph, as `tensor.grad_fn` is; AccumulateGrad for a leaf
    root      a tensor from which a backward pass starts, such as the loss
    leaf      a tensor without inputs that gets a gradient, such as a parameter
    mark      an entry in the metadata of the node of a model's output, for the forward that has
              computed the output: owner -> nodes of the forward's inputs
    owner     an object that searches graphs for the marks of its models: the `Averaging` of a
              block, the loss scaling of fp16

A search that skips the models of an owner goes on at the inputs of their forwards:

    leaf x -- ops --.                          .-- ops -- loss
                    inputs -- [ model ] -- outputs
                      '-------- mark --------'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves

from parallelize.run.containers import leaves, tensors_of_distribution
from parallelize.torch_patches.backward import Root

_MARK = "parallelize: inputs of the forward, by owners"
_NO_MARKS: Mapping[object, Any] = {}


def has_sparse_gradient(module: nn.Module) -> bool:
    """Whether the gradient of the module's weight is sparse, as of an embedding."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def node_of(root: Root) -> Any:
    """Return the node at which a backward pass from `root` starts.

    The node of a leaf is its AccumulateGrad. None: the root has no gradient.
    """
    if isinstance(root, GradientEdge):
        return root.node
    node = root.grad_fn
    if node is None and root.requires_grad:
        return get_gradient_edge(root).node
    return node


def mark_outputs(outputs: Any, *, inputs: Any, owners: Sequence[object]) -> list[Any]:
    """Mark the nodes of a forward's outputs, for all owners that will search for the forward.

    A mark lives in the metadata of its node, as long as the graph, and references only nodes of the
    graph: it keeps no tensor alive.

    Args:
        outputs: the value that the forward returned.
        inputs: the values that the forward received.
        owners: the owners whose models include the model of the forward.

    Returns:
        The nodes of the outputs. The node of an input that the forward returned unchanged is among
        them, and gets no mark: the model has not computed its value.
    """
    nodes = _nodes_of_outputs(outputs)
    if not owners:
        return nodes
    input_nodes = set()
    for value in leaves(inputs):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            input_nodes.add(node_of(value))
    for node in nodes:
        if node not in input_nodes:
            mark = node.metadata.setdefault(_MARK, {})
            for owner in owners:
                mark[owner] = input_nodes
    return nodes


def marks_of(node: Any) -> Mapping[object, Any]:
    """Return the mark of a node: owner -> nodes of the inputs; empty for all other nodes."""
    marks: Mapping[object, Any] = node.metadata.get(_MARK, _NO_MARKS)
    return marks


def is_output(node: Any) -> bool:
    """Whether the node has a mark, of any owner: a model has returned its value."""
    return _MARK in node.metadata


def _nodes_of_outputs(outputs: Any) -> list[Any]:
    """Return the distinct nodes of a model's outputs, in an order that is equal on all ranks."""
    # Most models return one tensor, and this runs in every forward: no walk through containers.
    if type(outputs) is torch.Tensor:
        return [] if outputs.grad_fn is None else [outputs.grad_fn]
    nodes: dict[Any, None] = {}
    for leaf in leaves(outputs):
        for value in _values_in(leaf):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                nodes[value.grad_fn] = None
    return list(nodes)


def _values_in(leaf: Any) -> list[Any]:
    """Return the values in an object that `leaves` does not open.

    These are the tensors of distributions, the pytrees of torch, and the attributes of plain
    objects, such as an output class of the user's. Any other object is its own value.
    """
    if isinstance(leaf, torch.Tensor):
        return [leaf]
    if isinstance(leaf, Distribution):
        return tensors_of_distribution(leaf)
    values: list[Any] = tree_leaves(leaf)
    is_plain_object = len(values) == 1 and values[0] is leaf
    if is_plain_object and hasattr(leaf, "__dict__"):
        values = tree_leaves(list(vars(leaf).values()))
    return values


def nodes_behind(
    nodes: Iterable[Any],
    *,
    owner: object = None,
    is_end: Callable[[Any], bool] | None = None,
) -> Iterator[Any]:
    """Yield `nodes` and all nodes that a backward pass from them reaches, without repetition.

    The order depends only on the graph, so that ranks with equal graphs get equal sequences.

    Args:
        nodes: the nodes at which the search starts; None among them is ignored.
        owner: the search skips the models of this owner. It yields the nodes of a model's outputs,
            no node inside of the model, and goes on at the inputs. None: the search skips no model.
        is_end: returns whether the search does not go on behind a node. The search yields this
            node, too. None: the search ends only where the graph ends.
    """
    pending = list(nodes)
    # `nodes` and the sources of a node contain None where no gradient flows. None counts as
    # visited, so that the search skips it.
    visited = {None}
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        yield node
        if is_end is not None and is_end(node):
            continue
        marks = _NO_MARKS if owner is None else marks_of(node)
        if owner in marks:
            pending += marks[owner]
        else:
            for source, _ in node.next_functions:
                pending.append(source)


def scaled_start(
    roots: Sequence[Root],
    gradients: Any,
    factor: Callable[[torch.Tensor], Any],
) -> list[torch.Tensor | None]:
    """Return the gradients from which a backward pass starts, multiplied by a factor.

    The user may pass a gradient for each root, one tensor for a single root, or none.

    Args:
        roots: the roots of the pass.
        gradients: the user's argument of backward. None, for all roots or one: the gradient is 1.
        factor: returns the factor for a gradient, on the device of the gradient.

    Returns:
        One gradient per root. Invalid arguments stay invalid, so that torch raises its own error:
        None for a root that has no default gradient, a list of another length than `roots`.
    """
    if gradients is None or isinstance(gradients, torch.Tensor):
        gradients = [gradients]
    gradients = list(gradients) or [None]
    if gradients == [None]:
        gradients *= len(roots)
    is_complete = len(gradients) == len(roots)
    scaled: list[torch.Tensor | None] = []
    for index, gradient in enumerate(gradients):
        start = gradient
        if start is None and is_complete:
            start = _ones(roots[index])
        if start is not None:
            start = (start * factor(start)).to(start.dtype)
        scaled.append(start)
    return scaled


def _ones(root: Root) -> torch.Tensor | None:
    """Return the gradient 1, from which a pass starts at a root if the user passes no gradient.

    None: the root is no real scalar with a gradient, and torch refuses to start there without a
    gradient of the user's.
    """
    if isinstance(root, GradientEdge):
        # An edge has no tensor. Its node knows the shape and dtype of the gradient that it takes.
        metadata = root.node._input_metadata[root.output_nr]
        size = torch.Size(metadata.shape)
        if size.numel() != 1 or not metadata.dtype.is_floating_point:
            return None
        return torch.ones(size, dtype=metadata.dtype, device=metadata.device)
    if not root.requires_grad or root.numel() != 1 or not root.is_floating_point():
        return None
    return torch.ones_like(root, memory_format=torch.preserve_format, requires_grad=False)
