"""That every rank holds the same model: asked at the entry of a block, and of the trained values every few steps."""

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

__all__ = ["agree", "compare", "differing", "verifying"]

_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def agree(model: nn.Module) -> None:
    """Make sure that all ranks hold a model of the same parts; a collective of a few bytes where they do.

    Raises:
        SyncError: the first part that differs in name, shape, type or in whether it is trained; on every rank.
    """
    mine = _parts(model)
    digests = _gathered(hashlib.sha256(repr(mine).encode()).digest())
    if len(set(digests)) == 1:
        return
    everyone = _gathered(mine)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    for first, other in itertools.zip_longest(everyone[0], everyone[rank]):
        if first != other:
            raise SyncError(
                f"{type(model).__name__} on rank {rank} has {_described(other)} where rank 0 has {_described(first)}",
                why="parallel training needs one model, made alike on every rank",
                fix="build the model from the same arguments on every rank; freeze the same parameters",
            )


@contextlib.contextmanager
def verifying(model: nn.Module, *, every: int) -> Iterator[None]:
    """Compare the parameters of all ranks after every so many steps of an optimizer that holds one of them."""
    steps = itertools.count(1)

    def after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = dict(model.named_parameters())
        known = {id(parameter) for parameter in parameters.values()}
        if any(id(each) in known for each in parameters_of(optimizer)):
            step = next(steps)
            if step % every == 0:
                compare(parameters, model_name=type(model).__name__, when=f"after {step} optimizer steps")

    handle = register_optimizer_step_post_hook(after_step)
    try:
        yield
    finally:
        handle.remove()


def compare(tensors: Mapping[str, torch.Tensor], *, model_name: str, when: str) -> None:
    """Make sure that tensors are bitwise equal on all ranks; a collective of 8 bytes per tensor.

    Args:
        tensors: name -> tensor, in the same order on every rank.
        model_name: the model, as the error calls it.
        when: the moment, as the error calls it.

    Raises:
        SyncError: the first tensor that differs; on every rank.
    """
    found = differing(list(tensors.values()))
    if found is None:
        return
    index, rank = found
    raise SyncError(
        f"{list(tensors)[index]} of {model_name} differs between rank 0 and rank {rank} {when}",
        why="ranks that step on different gradients train different models",
        fix="look for code that only some ranks run, or that draws random numbers, between backward and step",
    )


def differing(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Which tensor is not bitwise equal on all ranks; a collective of 8 bytes per tensor.

    Args:
        tensors: as many on every rank, on one device.

    Returns:
        The index of the first that differs, and the first rank that has another one than rank 0; None: they are equal.
    """
    if not tensors:
        return None
    mine = torch.stack([_checksum(tensor) for tensor in tensors])  # one number per tensor
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    for rank, row in enumerate(rows):
        for index in (row != rows[0]).nonzero()[:1].flatten().tolist():
            return index, rank
    return None


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes with any bit of a tensor but for coincidences: the sum of its words."""
    dense = tensor.detach().to_dense()
    plain = torch.view_as_real(dense) if dense.is_complex() else dense
    words = plain.contiguous().view(_AS_INTEGER[plain.element_size()])
    return words.sum(dtype=torch.int64)


def _parts(model: nn.Module) -> list[tuple[str, str, tuple[int, ...], str]]:
    parameters = [
        (name, "trained" if each.requires_grad else "frozen", tuple(each.shape), str(each.dtype))
        for name, each in model.named_parameters()
    ]
    buffers = [(name, "buffer", tuple(each.shape), str(each.dtype)) for name, each in model.named_buffers()]
    return parameters + buffers


def _described(part: tuple[str, str, tuple[int, ...], str] | None) -> str:
    if part is None:
        return "nothing more"
    name, kind, shape, dtype = part
    return f"{name} ({kind}, {shape}, {dtype})"


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
