"""A stream of random numbers for each rank, reproducible from the seed: same initial model, different augmentation."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

__all__ = ["split_streams"]


def split_streams(*, seed: int, rank: int) -> None:
    """Seed the generators of torch, random and (where it is imported) numpy anew, each rank differently.

    The state they are in now takes part, so that a second block of the same run continues with other numbers.

    Args:
        seed: the run's.
        rank: of this process among all.
    """
    drawn = int(torch.randint(2**62, ()).item())
    digest = hashlib.blake2b(f"{seed}/{rank}/{drawn}".encode(), digest_size=8).digest()
    state = int.from_bytes(digest, "big")
    torch.manual_seed(state)
    random.seed(state)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(state % 2**32)
