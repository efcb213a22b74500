"""init_process_group and destroy_process_group as called by the user's code inside a run.

A script for torchrun initializes the default process group. In a run this group exists already, for tensors on the
CPU and on the run's devices: the script's call sets its timeout, and the run destroys it at its end.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from parallelize.cluster.world import World
from parallelize.errors import ConfigError

__all__ = ["replace_group_functions", "user_process_group"]

_init, _destroy = dist.init_process_group, dist.destroy_process_group


@dataclass
class _Run:
    """The run of this process; a forked child has no group."""

    world: World
    pid: int
    is_destroyed: bool = False
    """Whether the user has destroyed the group, which is done when the run ends."""


_runs: list[_Run] = []  # at most one


@contextlib.contextmanager
def user_process_group(world: World, *, is_users: bool) -> Iterator[None]:
    """Let the code in the block call init_process_group and destroy_process_group; a run in a run changes nothing.

    Args:
        world: rank and world size of the run.
        is_users: whether the user has initialized the default group before the run.
    """
    if _runs:
        yield
        return
    _runs.append(_Run(world, os.getpid()))
    try:
        with replace_group_functions():
            yield
    finally:
        if _runs.pop().is_destroyed and is_users:
            _destroy()


@contextlib.contextmanager
def replace_group_functions() -> Iterator[None]:
    """Replace both functions in all modules that have imported them; outside of a run, the new ones call torch's."""
    _exchange({_init: _init_in_run, _destroy: _destroy_in_run})
    try:
        yield
    finally:
        _exchange({_init_in_run: _init, _destroy_in_run: _destroy})


def _exchange(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    modules: list[object] = list(sys.modules.values())
    for names in [module.__dict__ for module in modules if isinstance(module, types.ModuleType)]:
        for name in ("init_process_group", "destroy_process_group"):
            if isinstance(names.get(name), types.FunctionType):
                names[name] = functions.get(names[name], names[name])


@functools.wraps(_init)
def _init_in_run(*args: Any, **kwargs: Any) -> None:
    run = _active()
    if run is None:
        _init(*args, **kwargs)
        return
    arguments = inspect.signature(_init).bind(*args, **kwargs).arguments
    _require_same_world(arguments, run.world)
    run.is_destroyed = False
    if arguments.get("timeout") is not None:
        dist.distributed_c10d._set_pg_timeout(arguments["timeout"])


@functools.wraps(_destroy)
def _destroy_in_run(group: Any = None) -> None:
    run = _active()
    if run is None or (group is not None and group != dist.group.WORLD):
        _destroy(group)
    else:
        run.is_destroyed = True


def _active() -> _Run | None:
    return _runs[-1] if _runs and _runs[-1].pid == os.getpid() else None


def _require_same_world(arguments: Mapping[str, Any], world: World) -> None:
    """Raise ConfigError if the arguments, or their URL, name another rank or world size."""
    given = dict(parse_qsl(urlsplit(arguments.get("init_method") or "").query))
    for name, own in (("rank", world.rank), ("world_size", world.world_size)):
        value = int(given.get(name, arguments.get(name, -1)))
        if value not in (-1, own):
            raise ConfigError(
                f"init_process_group({name}={value}) on rank {world.rank} of a run of {world.world_size} processes",
                why="the run has started its processes, and given each of them a rank",
                fix="pass neither rank nor world size, or those of the variables RANK and WORLD_SIZE",
            )
