"""Random numbers of the ranks: in a block they differ between the ranks, for dropout masks and augmentation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from parallelize.agreement.gather import broadcast_object, gather_objects
from parallelize.run.context import Runtime
from parallelize.run.rng import global_generators, state_hash

__all__ = ["random_numbers_per_rank"]


@contextlib.contextmanager
def random_numbers_per_rank(run: Runtime, *, split: bool) -> Iterator[None]:
    """Make the global generators of torch, random and NumPy draw other numbers on each rank in a block.

    A generator whose state is that of a lower rank's is reseeded, so that a run can be repeated: rank 0 draws the
    numbers of one process, and ranks that differ already are left alone. A collective gathers one hash per generator
    and rank; at the end of the block, unless by an exception, another one sends rank 0's states to the ranks that had
    equal ones.

    Args:
        run: runtime of this process.
        split: whether to reseed equal generators if the config has no seed; with a seed they always are.
    """
    world = run.world
    if world.world_size == 1 or run.config.logical or (run.config.seed is None and not split):
        yield
        return
    generators = global_generators(run.devices)
    own = {name: state_hash(each.get()) for name, each in generators.items()}
    ranks = gather_objects(own)  # hashes of each rank's states, by name
    for name, each in generators.items():
        if any(lower.get(name) == own[name] for lower in ranks[: world.rank]):
            each.seed(int(state_hash(f"{own[name]}/{world.rank}"), 16))
    yield
    if any(ranks[0].items() & other.items() for other in ranks[1:]):
        states = broadcast_object({name: each.get() for name, each in generators.items()})
        for name, each in generators.items():
            if ranks[0].get(name) == own[name]:
                each.set(states[name])
