"""Comparison of tensors across ranks: a 64-bit fingerprint of them, gathered from all ranks.

Comparisons have a group of their own. A rank that makes another call instead is in another group, so that hang
detection tells where both are, and no collective gets the data of another one.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from parallelize.agreement.gather import gather_objects
from parallelize.errors import SyncError
from parallelize.run import context
from parallelize.run.process_group import GroupPurpose, separate_group
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.module_tensors import all_named_buffers, all_named_parameters, all_parameters

__all__ = ["differences", "digest", "fingerprint", "require_same_model", "warn_if_trained_apart"]

_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64  # of the splitmix64 generator, as int64

_MAX_ELEMENTS = 2**18
"""Size of a part of a tensor on the CPU, of which a sum is computed at once. Its copies stay in the caches."""

_MAX_ELEMENTS_ON_ACCELERATOR = 2**22
"""Size of a part on an accelerator. Its ten kernels run for longer than their starts take, in 160 MB of memory."""

# Models that have been in a block of this process.
_entered: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 0-dim int64 tensor that depends on all elements of the tensors and their positions; 0 for zeros.

    That of a large tensor depends on whether it is on the CPU: ranks compare tensors on the same type of device.
    """
    parts = list[torch.Tensor]()
    for tensor in tensors:
        size = _MAX_ELEMENTS if tensor.device.type == "cpu" else _MAX_ELEMENTS_ON_ACCELERATOR
        parts += torch.split(_flat(tensor.detach()), size)
    sums = [torch.zeros((), dtype=torch.int64), *map(_weighted_sum, parts)]
    return _weighted_sum(torch.stack([each.to(sums[-1].device) for each in sums]))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).reshape(-1)


def _weighted_sum(values: torch.Tensor) -> torch.Tensor:
    if values.is_floating_point() and values.element_size() > 1:
        values = values + 0.0  # -0.0 becomes 0.0
    bits = values.view(_AS_INTEGER[values.element_size()]).to(torch.int64)
    weights = torch.arange(1, len(bits) + 1, device=bits.device) * _FACTORS[0]
    # Weights are odd, and the highest bits are mixed with others: the sum of an even number of them would be 0.
    return ((bits ^ (bits >> 29)) * ((weights ^ (weights >> 31)) * _FACTORS[1] | 1)).sum()


def differences(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Compare tensors bitwise across ranks; a collective in which each rank sends 8 bytes per tensor.

    Args:
        tensors: equally many on every rank.

    Returns:
        (index, rank) of each tensor that differs, with the first rank where it differs from rank 0's.
    """
    if not tensors:
        return []
    run, found = context.current(), [fingerprint([each]) for each in tensors]
    # Read in one piece: each copy from a device waits for it.
    local = torch.stack([each.to(found[-1].device) for each in found]).cpu()
    rows = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, local, group=separate_group(run.world, run.device, GroupPurpose.COMPARISONS))
    is_other = torch.stack(rows) != rows[0]  # (ranks, tensors)
    return [(index, int(is_other[:, index].nonzero()[0])) for index in is_other.any(0).nonzero().flatten().tolist()]


def require_same_model(model: nn.Module) -> None:
    """Check that a model has the same structure on all ranks; a collective that compares a hash.

    Raises:
        SyncError: a parameter or buffer differs in name, shape, dtype or `requires_grad`.
    """
    parts = [
        f"{name} ({_kind(each)}, {tuple(each.shape)}, {each.dtype})"
        for name, each in (*all_named_parameters(model), *all_named_buffers(model))
    ]
    for _, rank in differences([digest(repr(parts))]):
        found = gather_objects(parts)
        pairs = itertools.zip_longest(found[0], found[rank], fillvalue="nothing more")
        first, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise SyncError(
            f"{type(model).__name__} on rank {rank} has {other} where rank 0 has {first}",
            why="parallel training needs the same model on every rank",
            fix="build the model from the same arguments on every rank; freeze the same parameters",
        )


def warn_if_trained_apart(models: Sequence[nn.Module]) -> None:
    """Warn if models that have been in a block before, and get rank 0's parameters now, differ; sends 32 bytes."""
    is_known = all(each in _entered for each in models)
    _entered.update(models)
    parameters = [each for model in models for each in all_parameters(model)] if is_known else []
    found = [index for index, _ in differences([torch.tensor(float(is_known)), fingerprint(parameters)])]
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
