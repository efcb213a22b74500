"""torch.autograd.grad with respect to tensors that were joined from parts.

    latents 0 ──> images 0 ──┐
      └─┐                    ├──> joined images ──> loss
    latents 1 ──> images 1 ──┘
      └─┴──> joined latents

    grad(loss, joined latents)  =  cat([grad(loss, latents 0), grad(loss, latents 1)])

The balanced backend runs a model on parts of a batch, and joins its outputs. A forward that returns
images and the latents behind them, as StyleGAN's does, computes the images of each part. The graph
has no path from the loss to the joined latents, which the user's code has: torch would raise.
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
    """The parts of a joined tensor.

    Args:
        dim: the dimension along which the parts were concatenated.
        edges: for each part, the place in the autograd graph where its gradient arrives.
    """

    dim: int
    edges: Sequence[GradientEdge]


@contextlib.contextmanager
def gradients_by_parts(parts_of: Callable[[Root], Parts | None]) -> Iterator[None]:
    """In the context, let torch.autograd.grad differentiate by the parts of its inputs.

    It returns the concatenated gradients of the parts as the gradient of the joined tensor.

    Args:
        parts_of: returns the parts of an input; None: the input was not joined.
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
    """Return the gradient of one input; None: the loss does not depend on the input.

    Args:
        gradients: the gradients of all parts of all inputs, of which those of this input are next.
        parts: the parts of the input; None: the input was not joined.
    """
    if parts is None:
        return next(gradients)
    gradients_of_parts = [next(gradients) for _ in parts.edges]
    # Under allow_unused=True, torch returns None for an input that the loss does not depend on.
    if any(gradient is None for gradient in gradients_of_parts):
        return gradients_of_parts[0]
    return torch.cat(gradients_of_parts, parts.dim)
