"""One process that plays the ranks of a world, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import lay_out
from parallelize.runtime.context import Runtime, _active

__all__ = ["keep_handler", "place", "values"]


@contextlib.contextmanager
def place(rank: int, world_size: int, **options: Any) -> Iterator[None]:
    """This process as one of a world whose others are not there: nothing collective could run."""
    config = Config.parse(processes=world_size, **options)
    world = World(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    token = _active.set(Runtime(world, lay_out(config, Hardware())))
    try:
        yield
    finally:
        _active.reset(token)


def values(batches: Iterable[torch.Tensor]) -> list[Any]:
    """What lies in batches of one dimension."""
    return [value for batch in batches for value in batch.tolist()]


def keep_handler() -> None:
    """Let torch set its handler for SIGCHLD, which a loader sets when it first has workers, and keeps."""
    torch.utils.data._utils.signal_handling._set_SIGCHLD_handler()
