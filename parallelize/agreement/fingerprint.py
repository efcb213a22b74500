"""Do the ranks hold the same tensors? Each sends 8 bytes for each tensor.

Glossary of the room:
    fingerprint   an int64 that depends on every element of a tensor and on its position
    digest        an int64 that depends on a text
    difference    a tensor that is not the same on all ranks, and the first rank that has another
    message       what a rank sends to the others in `gather`, signed with the key of the run
    plain value   numbers, texts, tensors and containers of them, which are read without pickle
    sync point    a place in the program that every rank passes once
    setting       a number of an optimizer's param group
    coupled       of samples: in a loss that is no mean over them

Fingerprints are exchanged in a group of their own (see `run/groups.py`). In the default group,
which is the user's, a rank that compares alone would exchange its fingerprints with a collective of
the user's code on the other ranks. Now it waits, and hang detection names both lines.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from parallelize.agreement.gather import gather_objects
from parallelize.errors import SyncError
from parallelize.run import context
from parallelize.run.groups import GroupPurpose, separate_group
from parallelize.run.surroundings import surroundings
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.module_tensors import (
    all_named_buffers,
    all_named_parameters,
    all_parameters,
    local_part,
)

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The two multipliers of the splitmix64 generator, as signed integers of 64 bits.
_FIRST_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
_SECOND_MULTIPLIER = 0xBF58476D1CE4E5B9 - 2**64

_CHUNK_ELEMENTS = 2**18
"""Elements on the CPU that are summed at once: so few that their copies stay in the caches."""

_CHUNK_ELEMENTS_ON_ACCELERATOR = 2**22
"""Elements of a tensor on an accelerator that are summed at once. There are ten kernels: with fewer
elements their starts would take longer than the kernels. The sum takes 160 MB of memory."""


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on all ranks.

    Attributes:
        index: position of the tensor among those that were passed to `differences`.
        rank: the first rank whose tensor differs.
        reference: the rank from whose tensor it differs: rank 0, or the first of the ranks that
            hold the same part of a tensor parallel model.
    """

    index: int
    rank: int
    reference: int


def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one fingerprint of several tensors, as a 0-dim tensor on the device of the last one.

    It is 0 if all elements are 0, and for no tensors. Chunks have another size on the CPU than on
    an accelerator. The fingerprint of a large tensor depends on this size, so that ranks can only
    compare tensors on the same type of device.
    """
    # The first sum is for no tensors: torch cannot stack an empty list.
    sums = [torch.zeros((), dtype=torch.int64)]
    for tensor in tensors:
        sums += map(_position_weighted_sum, _chunks_of(tensor))
    device = sums[-1].device
    return _position_weighted_sum(torch.stack([chunk_sum.to(device) for chunk_sum in sums]))


def _chunks_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in chunks of one dimension, complex numbers as two real ones.

    A tensor without elements has one chunk.
    """
    dense = local_part(tensor.detach())
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    is_on_cpu = dense.device.type == "cpu"
    size = _CHUNK_ELEMENTS if is_on_cpu else _CHUNK_ELEMENTS_ON_ACCELERATOR
    yield from torch.split(dense.reshape(-1), size)


def _position_weighted_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of all elements, each times an odd weight of its position.

    The sum is one modulo 2**64, where an odd number has an inverse: a change of one element always
    changes the sum. Before, the high bits of an element are mixed into its low bits. Otherwise the
    signs of two elements could change unseen: a sign is worth 2**63, and 2**63 times the sum of two
    odd weights is 0 modulo 2**64.

    Args:
        values: of one dimension, and not complex.
    """
    if values.is_floating_point() and values.element_size() > 1:
        # -0.0 becomes 0.0, an equal number with other bits. Types of one byte cannot be added.
        values = values + 0.0
    bits = values.view(_INTEGER_OF_SIZE[values.element_size()]).to(torch.int64)
    mixed_bits = bits ^ (bits >> 29)
    weights = torch.arange(1, len(bits) + 1, device=bits.device) * _FIRST_MULTIPLIER
    weights = (weights ^ (weights >> 31)) * _SECOND_MULTIPLIER
    odd_weights = weights | 1
    return (mixed_bits * odd_weights).sum()


def differences(tensors: Sequence[torch.Tensor]) -> list[Difference]:
    """Return the tensors that differ between the ranks, in their order; a collective.

    Of DTensors, the parts of the ranks that hold the same parts are compared. The result is the
    same on all ranks, also on those whose parts do not differ.

    Args:
        tensors: as many on every rank, since rows of fingerprints are gathered. There is no
            collective for none.
    """
    if not tensors:
        return []
    # Both tables have the shape (ranks, tensors).
    fingerprints = rows_of_ranks(_fingerprints_on_host(tensors))
    data_ranks = context.current().data_ranks
    references = [data_ranks.first_rank_of(rank) for rank in range(len(fingerprints))]
    is_different = fingerprints != fingerprints[references]
    indices = is_different.any(0).nonzero().flatten()
    differing = []
    for index in indices.tolist():
        ranks = is_different[:, index].nonzero().flatten()
        rank = int(ranks[0])
        differing.append(Difference(index, rank, reference=references[rank]))
    return differing


def _fingerprints_on_host(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the fingerprint of each tensor, of shape (tensors,), on the CPU.

    The fingerprints are stacked, so that one copy brings all of them to the CPU: the CPU waits for
    the device at every copy.

    Args:
        tensors: one or more, perhaps on several devices.
    """
    fingerprints = [fingerprint([tensor]) for tensor in tensors]
    device = fingerprints[-1].device
    return torch.stack([number.to(device) for number in fingerprints]).cpu()


def rows_of_ranks(row: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, of shape (ranks, length of a row); a collective.

    Args:
        row: this rank's, on the CPU: the group of comparisons sends no other tensors.
    """
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row, group=comparison_group())
    return torch.stack(rows)


def comparison_group() -> dist.ProcessGroup:
    """Return the group in which the ranks of a run compare; a collective, at its first call."""
    run = context.current()
    group: dist.ProcessGroup = separate_group(run.world, run.device, GroupPurpose.COMPARISONS)
    return group


def require_same_model(model: nn.Module) -> None:
    """Check that a model has the same structure on all ranks; a collective.

    It is called before an engine sends rank 0's parameters: the ranks would exchange tensors of
    different shapes. The ranks exchange one digest. Only if it differs, they exchange the
    descriptions of all tensors, for the error.

    Raises:
        SyncError: a parameter or buffer differs in name, shape, dtype or `requires_grad`.
    """
    descriptions = []
    for name, tensor in (*all_named_parameters(model), *all_named_buffers(model)):
        role = _role_of(tensor)
        descriptions.append(f"{name} ({role}, {tuple(tensor.shape)}, {tensor.dtype})")
    # There is one difference at most: that of the digest.
    for difference in differences([digest(repr(descriptions))]):
        descriptions_by_rank = gather_objects(descriptions)
        pairs = itertools.zip_longest(
            descriptions_by_rank[difference.reference],
            descriptions_by_rank[difference.rank],
            fillvalue="nothing more",
        )
        on_reference, on_rank = next(pair for pair in pairs if pair[0] != pair[1])
        raise SyncError(
            f"{type(model).__name__} on rank {difference.rank} has {on_rank} where rank "
            f"{difference.reference} has {on_reference}",
            why="parallel training needs the same model on every rank",
            fix="build the model from the same arguments on every rank; freeze the same parameters",
        )


def _role_of(tensor: torch.Tensor) -> str:
    """Return "buffer", "trained" or "frozen": what training does with a tensor of a model."""
    if not isinstance(tensor, nn.Parameter):
        return "buffer"
    return "trained" if tensor.requires_grad else "frozen"


def warn_if_trained_apart(models: Sequence[nn.Module]) -> None:
    """Warn of models that the ranks have trained apart between two blocks; a collective.

    It is called at the entry of a block, before engines give all ranks rank 0's parameters. What
    the other ranks have trained is lost then. Before the first block of a model there is nothing to
    lose: ranks may have initialized it differently.
    """
    # A model outlives the run: in a script without a decorated function, each block is a run of its
    # own.
    earlier_models = surroundings().script.models_of_earlier_blocks
    were_in_block = all(model in earlier_models for model in models)
    earlier_models.update(models)
    parameters: list[torch.Tensor] = []
    if were_in_block:
        for model in models:
            parameters += all_parameters(model)
    compared = [torch.tensor(float(were_in_block)), fingerprint(parameters)]
    differing = [difference.index for difference in differences(compared)]
    # If index 0 differs, some ranks have passed no parameters: their fingerprints say nothing.
    are_parameters_different = differing == [1]
    if were_in_block and are_parameters_different and context.is_main():
        names = ", ".join(type(model).__name__ for model in models)
        warnings.warn(
            f"{names} has changed differently on the ranks since its last parallel_model block, "
            "and gets rank 0's parameters. Right if rank 0 has loaded or initialized them; put the "
            "whole loop into one block if ranks have trained it in between, or have called "
            "backward after a block.",
            stacklevel=user_stacklevel(),
        )


def digest(text: str) -> torch.Tensor:
    """Return a 0-dim int64 tensor that is equal for equal texts, on all ranks.

    Python's `hash` of a text is another number in each process.
    """
    hashed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.tensor(int.from_bytes(hashed, "big", signed=True))
