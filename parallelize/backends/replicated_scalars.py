"""Scalar parameters of a sharded model, which fully_shard cannot shard: every rank holds them, as under ddp."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from parallelize.runtime import differentiable

__all__ = ["averaged_gradients", "scalar_parameters"]


def scalar_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have no dimension, such as a temperature `nn.Parameter(torch.ones([]))`."""
    return [each for each in module.parameters() if each.ndim == 0]


@contextlib.contextmanager
def averaged_gradients(scalars: Iterable[nn.Parameter]) -> Iterator[None]:
    """Average gradients of `scalars` over the ranks in each backward inside the context, and those from before it."""
    handles = []
    for each in scalars:
        if each.requires_grad:
            gradient = torch.zeros_like(each) if each.grad is None else each.grad
            averaged = _average(gradient.detach())
            each.grad = None if each.grad is None else averaged
        is_trained = each.requires_grad
        hooked: Any = each.requires_grad_()  # frozen parameters accept no hooks
        handles.append(hooked.register_hook(_average))
        each.requires_grad_(is_trained)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _average(gradient: torch.Tensor) -> torch.Tensor:
    return differentiable.all_reduce(gradient, "mean")
