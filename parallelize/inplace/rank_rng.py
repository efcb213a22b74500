"""Random numbers per rank from the global generators: dropout and augmentation differ between ranks, reproducibly."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallelize.hang_detection.stack_frames import user_stacklevel
from parallelize.runtime.context import Runtime
from parallelize.runtime.rng_state import default_generator

__all__ = ["random_numbers_per_rank"]


@dataclass(frozen=True)
class _Generator:
    """A global generator, with a hash of its state when this object was created."""

    state_hash: str
    seed: Callable[[int], Any]
    state: Callable[[], Any]
    restore: Callable[[Any], Any]


@contextlib.contextmanager
def random_numbers_per_rank(run: Runtime, *, split: bool) -> Iterator[None]:
    """Make the global generators of torch, random and (if imported) numpy draw other numbers on each rank in a block.

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
        _seed(seed=run.config.seed, rank=world.rank)
        yield
        return
    generators = _global_generators(run.devices)
    hashes: list[Any] = [None] * world.world_size  # of the states of each rank's generators, by name
    dist.all_gather_object(hashes, {name: each.state_hash for name, each in generators.items()})
    if not split:
        _warn_of_equal(hashes)
        yield
        return
    for name, each in generators.items():
        if any(lower.get(name) == each.state_hash for lower in hashes[: world.rank]):
            each.seed(int(_hash(f"{each.state_hash}/{world.rank}"), 16))
    yield
    if any(set(hashes[0].items()) & set(other.items()) for other in hashes[1:]):
        states: list[Any] = [{name: each.state() for name, each in generators.items()} if world.is_main else None]
        dist.broadcast_object_list(states, src=0)
        for name, each in generators.items():
            if hashes[0].get(name) == each.state_hash:
                each.restore(states[0][name])


def _warn_of_equal(hashes: Sequence[Mapping[str, str]]) -> None:
    by_name = {name: [each[name] for each in hashes if name in each] for name in hashes[0]}
    equal = [name for name, each in by_name.items() if len(set(each)) < len(each)]
    if equal:
        warnings.warn(
            f"split_rng=False, and {' and '.join(equal)} draw the same numbers on {len(hashes)} ranks: dropout masks, "
            "noise and augmentation are the same on all of them; drop split_rng=False, or seed each rank differently",
            stacklevel=user_stacklevel(),
        )


def _seed(*, seed: int, rank: int) -> None:
    # The number drawn makes a second block of the run draw other numbers.
    drawn = int(torch.randint(2**62, ()).item())
    state = int(_hash(f"{seed}/{rank}/{drawn}"), 16)
    torch.manual_seed(state)
    random.seed(state)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(state % 2**32)


def _global_generators(devices: Sequence[torch.device]) -> dict[str, _Generator]:
    found = {}
    accelerators = [each for each in devices if each.type != "cpu"]
    for number, device in enumerate([torch.device("cpu"), *accelerators]):
        generator = default_generator(device)
        name = "torch" if number == 0 else f"torch.{device.type}" if number == 1 else f"torch.{device.type} {number}"
        text = _hash(generator.get_state().tolist())
        found[name] = _Generator(text, generator.manual_seed, generator.get_state, generator.set_state)
    found["random"] = _Generator(_hash(random.getstate()), random.seed, random.getstate, random.setstate)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        get, restore = numpy.random.get_state, numpy.random.set_state
        found["numpy.random"] = _Generator(_hash(state), lambda seed: numpy.random.seed(seed % 2**32), get, restore)
    return found


def _hash(value: object) -> str:
    """Return a hash of the value's text, as 16 hexadecimal digits."""
    return hashlib.blake2b(str(value).encode(), digest_size=8).hexdigest()
