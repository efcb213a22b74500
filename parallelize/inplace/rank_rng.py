"""Seeding of the global RNGs per rank: dropout and augmentation differ between ranks, reproducibly."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

__all__ = ["seed_per_rank"]


def seed_per_rank(*, seed: int, rank: int) -> None:
    """Seed the global generators of torch, random and (if imported) numpy, differently on each rank.

    The new seed also depends on torch's current RNG state, so that a second block of the run draws other numbers.

    Args:
        seed: seed of the run.
        rank: rank of this process in the world.
    """
    drawn = int(torch.randint(2**62, ()).item())
    digest = hashlib.blake2b(f"{seed}/{rank}/{drawn}".encode(), digest_size=8).digest()
    state = int.from_bytes(digest, "big")
    torch.manual_seed(state)
    random.seed(state)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(state % 2**32)
