"""Random numbers per rank from the global generators: dropout and augmentation differ between ranks, reproducibly."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallelize.runtime.context import Runtime
from parallelize.runtime.rng_state import global_generators
from parallelize.runtime.user_line import user_stacklevel

__all__ = ["random_numbers_per_rank"]


@contextlib.contextmanager
def random_numbers_per_rank(run: Runtime, *, split: bool) -> Iterator[None]:
    """Make the global generators of torch, random and NumPy draw other numbers on each rank in a block.

    With a seed in the config they are seeded. Else, a generator whose state is that of a lower rank's is reseeded: rank
    0 draws the numbers of one process, and ranks that differ already are left alone. Both can be repeated. Without a
    seed, a collective gathers one hash per generator and rank; at the end of the block, unless by an exception, another
    one sends rank 0's states to the ranks that had equal ones.

    Args:
        run: runtime of this process.
        split: whether to reseed equal generators; otherwise, warn of them.
    """
    world = run.world
    if world.world_size == 1:
        yield
        return
    if run.config.seed is not None:
        # The number drawn makes a second block of the run draw other numbers.
        drawn = int(torch.randint(2**62, ()).item())
        seed = int(_hash(f"{run.config.seed}/{world.rank}/{drawn}"), 16)
        torch.manual_seed(seed)  # every accelerator's generator, too
        for each in global_generators(None).values():
            each.seed(seed)
        yield
        return
    generators = global_generators(run.devices)
    own = {name: _hash(each.get()) for name, each in generators.items()}
    hashes: list[Any] = [None] * world.world_size  # of the states of each rank's generators, by name
    dist.all_gather_object(hashes, own)
    if not split:
        _warn_of_equal(hashes)
        yield
        return
    for name, each in generators.items():
        if any(lower.get(name) == own[name] for lower in hashes[: world.rank]):
            each.seed(int(_hash(f"{own[name]}/{world.rank}"), 16))
    yield
    if any(set(hashes[0].items()) & set(other.items()) for other in hashes[1:]):
        states: list[Any] = [{name: each.get() for name, each in generators.items()} if world.is_main else None]
        dist.broadcast_object_list(states, src=0)
        for name, each in generators.items():
            if hashes[0].get(name) == own[name]:
                each.set(states[0][name])


def _warn_of_equal(hashes: Sequence[Mapping[str, str]]) -> None:
    by_name = {name: [each[name] for each in hashes if name in each] for name in hashes[0]}
    equal = [name for name, each in by_name.items() if len(set(each)) < len(each)]
    if equal:
        warnings.warn(
            f"split_rng=False, and {' and '.join(equal)} draw the same numbers on {len(hashes)} ranks: dropout masks, "
            "noise and augmentation are the same on all of them; drop split_rng=False, or seed each rank differently",
            stacklevel=user_stacklevel(),
        )


def _hash(value: object) -> str:
    """Return a hash of the value's text, as 16 hexadecimal digits."""
    text = str(value.tolist() if isinstance(value, torch.Tensor) else value)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
