"""What shows that data know of the processes which read them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist

from parallelize.errors import ConfigError
from parallelize.runtime import context

__all__ = ["SIZES", "asking", "known_size", "unclear"]

# What samplers call the number of parts they divide into: torch's, Lightning's and timm's; Accelerate's; others'.
SIZES = ("num_replicas", "num_processes", "num_shards", "world_size", "_num_replicas", "_world_size")

# Of torch's modules only this one asks in order to divide; DataLoader and collectives have reasons of their own.
_DIVIDING = "torch.utils.data.distributed"


def known_size(dataset: object, world_size: int) -> str | None:
    """The attribute in which a dataset keeps the number of the processes, or None."""
    names = (*SIZES, "world", "num_nodes")
    return next(
        (name for name in names if type(size := getattr(dataset, name, None)) is int and size == world_size), None
    )


@contextlib.contextmanager
def asking() -> Iterator[set[str]]:
    """A block of which is seen whether it asks for its rank, or for the number of processes.

    By the calls themselves: who asks may have imported the functions under any name. It slows the block down, and sees
    nothing while somebody else profiles it.

    Yields:
        The names of the functions that were asked so far.
    """
    asked: set[str] = set()
    if sys.getprofile() is not None:
        yield asked
        return
    codes = set(_codes())

    def see(frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call" and frame.f_code in codes and _is_foreign(frame.f_back):
            asked.add(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        yield asked
    finally:
        sys.setprofile(None)


def _codes() -> Iterator[CodeType]:
    for module in (dist, context):
        for name in ("get_rank", "get_world_size", "rank", "world_size"):
            code = getattr(getattr(module, name, None), "__code__", None)  # torch may be built without
            if code is not None:
                yield code


def _is_foreign(frame: FrameType | None) -> bool:
    """Whether a call comes from neither torch nor this package."""
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name == _DIVIDING or name.partition(".")[0] not in ("torch", "parallelize")


def unclear(dataset: object, how: str) -> ConfigError:
    """What there is to say of a dataset that may divide itself over the processes, or may not.

    Args:
        dataset: the user's.
        how: what shows that it knows them.
    """
    name = type(dataset).__name__
    return ConfigError(
        f"the iterable {name} knows of the processes: {how}",
        why="if it gives each process a part of its own, dividing it again would leave the rest to nobody",
        fix=f"use shard_loader(loader, divides='processes') if {name} divides its data over the processes, and "
        "divides='nothing' if each process would read all of them",
    )
