"""torch.autograd.grad with respect to tensors that were joined of parts.

    part 0 ──> loss of part 0 ──┐
      └─┐                       ├──> loss
    part 1 ──> loss of part 1 ──┘
      └─┴──> joined

    grad(loss, joined)  =  cat([grad(loss, part 0), grad(loss, part 1)])

The loss is computed from the parts. Without this, torch finds no path to the joined tensor, which
is what the user's code has, and raises.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from parallelize.torch_patches.backward import Root, as_roots
from parallelize.torch_patches.private import replace_attribute


@dataclass(frozen=True)
class Parts:
    """The tensors of which one was joined.

    Args:
        dim: the dimension along which they lie one behind the other.
        edges: where their gradients arrive.
    """

    dim: int
    edges: Sequence[GradientEdge]


@contextlib.contextmanager
def gradients_by_parts(parts_of: Callable[[Root], Parts | None]) -> Iterator[None]:
    """In the context, let torch.autograd.grad join the gradients of the parts of its inputs.

    Args:
        parts_of: returns the parts of an input; None: it was not joined.
    """
    original = torch.autograd.grad

    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        parts_of_inputs: list[Parts | None] = []
        edges: list[Any] = []
        for tensor in as_roots(inputs):
            parts = parts_of(tensor)
            parts_of_inputs.append(parts)
            if parts is None:
                edges.append(tensor)
            else:
                edges += parts.edges
        gradients = iter(original(outputs, edges, *args, **kwargs))
        return tuple(_joined(gradients, parts) for parts in parts_of_inputs)

    with replace_attribute(torch.autograd, "grad", grad):
        yield


def _joined(gradients: Iterator[Any], parts: Parts | None) -> Any:
    """Take the gradients of one input's parts, and return its own; None: the loss has none."""
    if parts is None:
        return next(gradients)
    gradients_of_parts = [next(gradients) for _ in parts.edges]
    if any(gradient is None for gradient in gradients_of_parts):  # under allow_unused=True
        return gradients_of_parts[0]
    return torch.cat(gradients_of_parts, parts.dim)
