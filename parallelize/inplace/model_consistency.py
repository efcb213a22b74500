"""Checks that all ranks hold the same model: its structure at the entry of a block, its values every few steps."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from parallelize.errors import SyncError
from parallelize.runtime.gradients import parameters_of

__all__ = ["bits_of", "first_difference", "require_equal", "require_same_model", "verify_every"]

_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_same_model(model: nn.Module) -> None:
    """Check that a model has the same structure on all ranks; a collective, which gathers one hash per rank.

    Raises:
        SyncError: a parameter or buffer differs in name, shape, dtype or `requires_grad`; raised on every rank.
    """
    local = _signature(model)
    digests = _all_gather_object(hashlib.sha256(repr(local).encode()).digest())
    if len(set(digests)) == 1:
        return
    signatures = _all_gather_object(local)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    for first, other in itertools.zip_longest(signatures[0], signatures[rank]):
        if first != other:
            raise SyncError(
                f"{type(model).__name__} on rank {rank} has {_describe(other)} where rank 0 has {_describe(first)}",
                why="parallel training needs the same model on every rank",
                fix="build the model from the same arguments on every rank; freeze the same parameters",
            )


@contextlib.contextmanager
def verify_every(model: nn.Module, *, every: int) -> Iterator[None]:
    """Check every `every` steps of the model's optimizers that its parameters are equal on all ranks."""
    steps = itertools.count(1)

    def after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = dict(model.named_parameters())
        known = {id(parameter) for parameter in parameters.values()}
        if any(id(each) in known for each in parameters_of(optimizer)):
            step = next(steps)
            if step % every == 0:
                require_equal(parameters, model_name=type(model).__name__, when=f"after {step} optimizer steps")

    handle = register_optimizer_step_post_hook(after_step)
    try:
        yield
    finally:
        handle.remove()


def require_equal(tensors: Mapping[str, torch.Tensor], *, model_name: str, when: str) -> None:
    """Check that tensors are bitwise equal on all ranks; a collective of 8 bytes per tensor.

    Args:
        tensors: name -> tensor, in the same order on every rank.
        model_name: name of the model, for the error.
        when: time of the comparison, for the error.

    Raises:
        SyncError: a tensor differs; raised on every rank.
    """
    difference = first_difference(list(tensors.values()))
    if difference is None:
        return
    index, rank = difference
    raise SyncError(
        f"{list(tensors)[index]} of {model_name} differs between rank 0 and rank {rank} {when}",
        why="ranks that step on different gradients train different models",
        fix="look for code that only some ranks run, or that draws random numbers, between backward and step",
    )


def first_difference(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Find the first tensor that is not bitwise equal on all ranks; a collective of 8 bytes per tensor.

    Args:
        tensors: equally many on every rank, all on one device.

    Returns:
        (index, rank): the first rank that differs from rank 0, and the first tensor that differs; None: all equal.
    """
    if not tensors:
        return None
    local = torch.stack([bits_of(tensor.to_dense()).sum(dtype=torch.int64) for tensor in tensors])  # one per tensor
    rows = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, local)
    for rank, row in enumerate(rows):
        for index in (row != rows[0]).nonzero()[:1].flatten().tolist():
            return index, rank
    return None


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor as integers of the same size."""
    values = tensor.detach()
    plain = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return plain.contiguous().view(_AS_INTEGER[plain.element_size()])


def _signature(model: nn.Module) -> list[tuple[str, str, tuple[int, ...], str]]:
    parameters = [
        (name, "trained" if each.requires_grad else "frozen", tuple(each.shape), str(each.dtype))
        for name, each in model.named_parameters()
    ]
    buffers = [(name, "buffer", tuple(each.shape), str(each.dtype)) for name, each in model.named_buffers()]
    return parameters + buffers


def _describe(part: tuple[str, str, tuple[int, ...], str] | None) -> str:
    if part is None:
        return "nothing more"
    name, kind, shape, dtype = part
    return f"{name} ({kind}, {shape}, {dtype})"


def _all_gather_object(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
