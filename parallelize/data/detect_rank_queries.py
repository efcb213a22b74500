"""Detection of datasets that query their rank or the world size, and so may shard themselves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist

from parallelize.errors import ConfigError
from parallelize.runtime import context

__all__ = ["NUM_SHARDS_ATTRIBUTES", "ambiguous_sharding_error", "detect_rank_queries", "world_size_attribute"]

# Attributes for a sampler's number of shards; torch, Lightning and timm use the first, Accelerate the second.
NUM_SHARDS_ATTRIBUTES = ("num_replicas", "num_processes", "num_shards", "world_size", "_num_replicas", "_world_size")

# The only torch module that queries the rank in order to shard; DataLoader and collectives query it for other reasons.
_SHARDING_MODULE = "torch.utils.data.distributed"


def world_size_attribute(dataset: object, world_size: int) -> str | None:
    """Return the name of a dataset's attribute whose value is the world size, or None."""
    names = (*NUM_SHARDS_ATTRIBUTES, "world", "num_nodes")
    return next(
        (name for name in names if type(size := getattr(dataset, name, None)) is int and size == world_size), None
    )


@contextlib.contextmanager
def detect_rank_queries() -> Iterator[set[str]]:
    """Record which of the functions that return the rank or the world size are called in the block.

    A profile function (sys.setprofile) detects the calls, because callers may have imported the functions under any
    name; it slows the block down. Nothing is recorded if another profiler is active.

    Yields:
        The names of the functions called so far.
    """
    called: set[str] = set()
    if sys.getprofile() is not None:
        yield called
        return
    codes = set(_query_codes())

    def profile(frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call" and frame.f_code in codes and _is_user_code(frame.f_back):
            called.add(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(None)


def _query_codes() -> Iterator[CodeType]:
    for module in (dist, context):
        for name in ("get_rank", "get_world_size", "rank", "world_size"):
            code = getattr(getattr(module, name, None), "__code__", None)  # absent in torch without distributed
            if code is not None:
                yield code


def _is_user_code(frame: FrameType | None) -> bool:
    """Return whether a frame runs torch's DistributedSampler, or code outside of torch and this package."""
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name == _SHARDING_MODULE or name.partition(".")[0] not in ("torch", "parallelize")


def ambiguous_sharding_error(dataset: object, evidence: str) -> ConfigError:
    """Build the error for a dataset that may or may not shard itself over the processes.

    Args:
        dataset: the user's dataset.
        evidence: why it may, as a clause such as "it has world_size=2".
    """
    name = type(dataset).__name__
    return ConfigError(
        f"the iterable {name} may shard itself over the processes: {evidence}",
        why="if it does, sharding it again would skip samples; if it does not, every process would iterate all samples",
        fix=f"use shard_loader(loader, divides='processes') if {name} shards its data over the processes, or "
        "divides='nothing' if every process iterates all of it",
    )
