"""Comparison of tensors across ranks: a 64-bit fingerprint of each tensor, and one all-reduce of their extrema.

Comparisons have a group of their own. A rank that makes another call instead is in another group, so that hang
detection tells where both are, and no collective gets the data of another one.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.errors import SyncError
from parallelize.runtime import context
from parallelize.runtime.process_group import separate_group
from parallelize.runtime.user_line import user_stacklevel

__all__ = [
    "differences",
    "digest",
    "fingerprint",
    "flat_fingerprint",
    "largest_difference",
    "require_same_model",
    "warn_if_trained_apart",
]

_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64  # of the splitmix64 generator, as int64
_MAX_JOINED = 2**22  # elements

# Models that have been in a block of this process.
_entered: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 0-dim int64 tensor that depends on all elements of a tensor and their positions; 0 for zeros."""
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce()
        used = values.values().flatten(1).any(1) if values.values().dim() > 1 else values.values() != 0
        return fingerprint(values.values()[used]) + fingerprint(values.indices()[:, used])
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.is_floating_point() and values.element_size() > 1:
        values = values + 0.0  # -0.0 becomes 0.0, in a copy
    bits = values.contiguous().view(_AS_INTEGER[values.element_size()])
    if values.element_size() == 8:
        bits = bits ^ (bits >> 29)  # the sum of an even number of sign bits would be 0
    rows = bits.reshape(len(bits) if bits.dim() else 1, -1) if bits.numel() else bits.new_zeros(1, 1)
    total: torch.Tensor = _weighted_sum(rows, 1) + _FACTORS[1] * _weighted_sum(rows, 0)
    return total


def _weighted_sum(rows: torch.Tensor, dim: int) -> torch.Tensor:
    sums = rows.sum(dim, dtype=torch.int64)
    weights = torch.arange(1, len(sums) + 1, device=sums.device) * _FACTORS[0]
    return (sums * ((weights ^ (weights >> 31)) * _FACTORS[1] | 1)).sum()


def differences(tensors: Sequence[torch.Tensor | None]) -> Iterator[tuple[int, int]]:
    """Compare tensors bitwise across ranks; a collective of 16 bytes per tensor.

    Args:
        tensors: equally many on every rank; None stands for zeros.

    Yields:
        (index, rank): each tensor that differs, with the first rank where it differs from rank 0's. Every rank must
        take equally many, as each is a collective.
    """
    if not tensors:
        return
    group, zero = _group(), torch.zeros((), dtype=torch.int64)
    found = [zero if each is None else fingerprint(each) for each in tensors]
    # Read in one piece: each copy from a device waits for it.
    local = torch.stack([each.to(found[-1].device) for each in found]).cpu()
    extrema = torch.stack([local, ~local])  # the maximum of ~x is that of the smallest x
    dist.all_reduce(extrema, dist.ReduceOp.MAX, group=group)
    for index in (extrema[0] != ~extrema[1]).nonzero().flatten().tolist():
        rows = [torch.empty_like(local[index]) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, local[index].clone(), group=group)
        all_ranks = torch.stack(rows)
        yield index, int((all_ranks != all_ranks[0]).nonzero()[0])


def _group() -> Any:
    run = context.current()
    return separate_group(run.world, run.device, backend="gloo")


def flat_fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the fingerprint of many tensors at once: small ones of a dtype are joined, as kernels cost most."""
    device = context.current().device
    total = torch.zeros((), dtype=torch.int64, device=device)
    joined: dict[Any, list[torch.Tensor]] = {}
    size = 0
    for number, each in enumerate(tensors, start=1):
        values = each.detach()
        if values.layout is not torch.strided or values.is_complex() or values.numel() > _MAX_JOINED:
            total = total + number * fingerprint(values).to(device)
            continue
        joined.setdefault((values.dtype, values.device), []).append(values.reshape(-1))
        size += values.numel()
        if size > _MAX_JOINED:
            total, size = total + _of_joined(joined, number, device), 0
    return total + _of_joined(joined, len(tensors) + 1, device)


def _of_joined(joined: dict[Any, list[torch.Tensor]], number: int, device: torch.device) -> torch.Tensor:
    found = [fingerprint(torch.cat(each)).to(device) for each in joined.values()]
    joined.clear()
    return number * torch.stack(found).sum() if found else torch.zeros((), dtype=torch.int64, device=device)


def largest_difference(tensor: torch.Tensor) -> float:
    """Return how far a tensor is apart across the ranks; a collective of twice its size."""
    values = tensor.detach().to("cpu", torch.float64 if tensor.dtype.itemsize > 4 else torch.float32)
    extrema = torch.stack([values, -values])
    dist.all_reduce(extrema, dist.ReduceOp.MAX, group=_group())
    return float(extrema.sum(0).max()) if extrema.numel() else 0.0


def require_same_model(model: nn.Module) -> None:
    """Check that a model has the same structure on all ranks; a collective that compares a hash.

    Raises:
        SyncError: a parameter or buffer differs in name, shape, dtype or `requires_grad`.
    """
    parts = [
        f"{name} ({_kind(each)}, {tuple(each.shape)}, {each.dtype})"
        for name, each in (*model.named_parameters(), *model.named_buffers())
    ]
    rank = next((rank for _, rank in differences([digest(repr(parts))])), None)
    if rank is None:
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, parts)
    for first, other in itertools.zip_longest(found[0], found[rank], fillvalue="nothing more"):
        if first != other:
            raise SyncError(
                f"{type(model).__name__} on rank {rank} has {other} where rank 0 has {first}",
                why="parallel training needs the same model on every rank",
                fix="build the model from the same arguments on every rank; freeze the same parameters",
            )


def warn_if_trained_apart(models: Sequence[nn.Module]) -> None:
    """Warn if models that have been in a block before, and get rank 0's parameters now, differ; sends 32 bytes."""
    is_known = all(each in _entered for each in models)
    _entered.update(models)
    parameters = [each for model in models for each in model.parameters()] if is_known else []
    found = [index for index, _ in differences([torch.tensor(float(is_known)), flat_fingerprint(parameters)])]
    if is_known and found == [1] and context.is_main():
        warnings.warn(
            f"{', '.join(type(each).__name__ for each in models)} has changed differently on the ranks since its last "
            "parallel_model block, and gets rank 0's parameters. Right if rank 0 has loaded or initialized them; put "
            "the whole loop into one block if ranks have trained it in between, or have called backward after a block.",
            stacklevel=user_stacklevel(),
        )


def _kind(each: torch.Tensor) -> str:
    return "buffer" if not isinstance(each, nn.Parameter) else "trained" if each.requires_grad else "frozen"


def digest(text: str) -> torch.Tensor:
    """Return a 0-dim int64 tensor that is equal for equal texts."""
    hashed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.tensor(int.from_bytes(hashed, "big", signed=True))
