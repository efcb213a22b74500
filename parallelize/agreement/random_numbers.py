"""Random numbers of the ranks in a block: they differ, for dropout masks and augmentation.

    before the block      the generators are equal on all ranks, as a seed has left them
    in the block          rank 0's generators go on, and those of the other ranks are reseeded
    after the block       all ranks go on with the states of rank 0

Generators that differ between the ranks before the block stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from parallelize.agreement.fingerprint import comparison_group
from parallelize.agreement.gather import broadcast_object, gather_objects
from parallelize.run.context import Runtime, active_or
from parallelize.run.generators import global_generators, state_hash

_Hashes = dict[str, str]
"""Name of a generator, such as "torch.cuda" -> hash of its state on one rank."""


@contextlib.contextmanager
def random_numbers_per_rank(run: Runtime, *, split: bool) -> Iterator[None]:
    """Make the global generators of torch, random and NumPy draw other numbers on each rank.

    A generator is reseeded if a lower data rank has one in the same state. So rank 0 draws the
    numbers that one process would draw, and the ranks that hold one tensor parallel model draw
    equal numbers. The new seed is made from the state and the rank, so that a run can be repeated.
    At the end of the block, unless it raises, generators whose state was rank 0's get the state
    that rank 0's has then.

    All ranks must enter and leave the context together: it makes collectives then.

    Args:
        run: runtime of this process.
        split: whether to reseed equal generators if the config has no seed. With a seed they are
            reseeded in any case.
    """
    world, config, data_ranks = run.world, run.config, active_or(run).data_ranks
    is_split = split or config.seed is not None
    # `logical=` seeds the generators for each part of a batch.
    if world.world_size == 1 or config.logical or not is_split:
        yield
        return
    generators = global_generators(run.devices)
    hashes = {}
    for name, generator in generators.items():
        hashes[name] = state_hash(generator.get())
    group = comparison_group()
    hashes_by_rank: list[_Hashes] = gather_objects(hashes, group=group)
    for name, generator in generators.items():
        lower_ranks = data_ranks.ranks[: data_ranks.rank]
        hashes_of_lower_ranks = [hashes_by_rank[rank] for rank in lower_ranks]
        if _is_among(hashes_of_lower_ranks, name, hashes[name]):
            generator.seed(int(state_hash(f"{hashes[name]}/{data_ranks.rank}"), 16))
    yield
    if not _has_equal_states(hashes_by_rank):
        # All ranks return here, or none: the broadcast is a collective.
        return
    states_of_rank = {name: generator.get() for name, generator in generators.items()}
    states = broadcast_object(states_of_rank, group=group)
    for name, generator in generators.items():
        if hashes_by_rank[0].get(name) == hashes[name]:
            generator.set(states[name])


def _is_among(hashes_by_rank: Sequence[_Hashes], name: str, state: str) -> bool:
    """Whether the generator of this name is in this state on one of the ranks."""
    return any(hashes.get(name) == state for hashes in hashes_by_rank)


def _has_equal_states(hashes_by_rank: Sequence[_Hashes]) -> bool:
    """Whether a rank had a generator in the state of rank 0's; the same answer on all ranks."""
    items_of_rank_0 = hashes_by_rank[0].items()
    return any(items_of_rank_0 & hashes.items() for hashes in hashes_by_rank[1:])
