"""The process group of a run: made, watched, and left by all ranks together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallelize.cluster.network import gloo_interface, reachable
from parallelize.cluster.store import serve_store
from parallelize.cluster.world import World
from parallelize.config.layout import Layout
from parallelize.hang_detection.unsynced_training import noticing_apart
from parallelize.hang_detection.watchdog import Watch

__all__ = ["new_group", "process_group"]


@contextlib.contextmanager
def process_group(world: World, layout: Layout, watchdog: Watch, *, told: set[str]) -> Iterator[None]:
    """Open the default process group of a run; one that the user's code has already made is used as it is.

    Args:
        world: this process among the others.
        layout: the request: its timeout, its `init_connection`, the backend of the group.
        watchdog: watches this process while it is one of several.
        told: names of what the user was told already in this run.
    """
    timeout = layout.config.timeout
    if dist.is_initialized():
        with _watched(watchdog, timeout, told=told, since_ns=None):
            yield
        return
    config, since_ns = layout.config, time.time_ns()
    store: dist.Store | None = None
    if config.init_connection is not None:
        config.init_connection(world)
    else:
        world = _reachable(world)
        # Stale keys of an earlier group would be taken for this one's: each gets a name of its own. Every rank makes
        # its groups in the same order, so that all count alike.
        store = dist.PrefixStore(f"parallelize/{next(_groups)}", _store(world, timeout))
        with _gloo_interface(world), _own_excepthook(world):
            dist.init_process_group(
                layout.process_group_backend,
                store=store,
                rank=world.rank,
                world_size=world.world_size,
                timeout=timeout,
            )
        _wait_for_all(store, world.world_size)
    try:
        with _watched(watchdog, timeout, told=told, since_ns=since_ns):
            yield
        if store is not None:
            _leave_together(store, world.world_size)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _own_excepthook(world: World) -> Iterator[None]:
    """Torch puts "[rank0]: " before each line of a traceback, once more for every group, and for good."""
    before = sys.excepthook
    yield
    if world.world_size == 1:
        sys.excepthook = before


@contextlib.contextmanager
def _watched(watchdog: Watch, timeout: timedelta, *, told: set[str], since_ns: int | None) -> Iterator[None]:
    """Run the watchdog of this process while it is one of several.

    Args:
        watchdog: the watchdog.
        timeout: of a collective.
        told: names of what the user was told already in this run.
        since_ns: when its group was made (time.time_ns); None: it was there before, and stays.
    """
    if dist.get_world_size() == 1:
        yield
        return
    # Every rank enters its runs in the same order, so that all count alike.
    store = dist.PrefixStore(f"parallelize/watch/{next(_watches)}", dist.distributed_c10d._get_default_store())
    with watchdog.over(store, timeout=timeout, since_ns=since_ns), noticing_apart(told):
        yield


_groups = itertools.count()
_watches = itertools.count()
_LEAVE_WITHIN_S = 1.0


def _wait_for_all(store: dist.Store, world_size: int) -> None:
    """Return when every rank is connected: one that is done by then looks dead to a peer that still connects."""
    if store.add("connected", 1) == world_size:
        store.set("all connected", "1")
    store.wait(["all connected"])


def _leave_together(store: dist.Store, world_size: int) -> None:
    """Wait a moment for ranks that are about to be done, too.

    A socket that is closed with something unread in it takes back what its peer has yet to read: the last collective
    of a rank would fail because another was quicker. A rank that is still busy after that moment has read all there
    was; if it waits for this one, it must see that this one has gone.
    """
    if store.add("leaving", 1) == world_size:
        store.set("all leaving", "1")
    end = time.monotonic() + _LEAVE_WITHIN_S
    while not store.check(["all leaving"]) and time.monotonic() < end:
        time.sleep(0.005)


def new_group(world: World) -> Any:
    """Make another process group of all ranks, over the network interface of the default one; a collective."""
    with _gloo_interface(_reachable(world)):
        return dist.new_group()


def _reachable(world: World) -> World:
    """The same world, rank 0's address such that other nodes need no names to find it."""
    if world.num_nodes == 1:
        return world
    return dataclasses.replace(world, master_addr=reachable(world.master_addr))


@contextlib.contextmanager
def _gloo_interface(world: World) -> Iterator[None]:
    """Tell gloo, which reads its variable when a group is made, by which interface the other nodes are reached."""
    name = "GLOO_SOCKET_IFNAME"
    interface = None if world.num_nodes == 1 or name in os.environ else gloo_interface(world.master_addr)
    if interface is None:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        del os.environ[name]


@functools.cache
def _store(world: World, timeout: timedelta) -> dist.Store:
    """The store where the ranks meet; kept, because a served port that is closed and opened again loses callers."""
    if world.world_size == 1:
        return dist.HashStore()
    if world.is_main and not world.has_store:
        return serve_store(world.master_addr, world.master_port, timeout)
    return dist.TCPStore(world.master_addr, world.master_port, is_master=False, timeout=timeout)
