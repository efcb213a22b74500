"""Where the ranks of a run meet: the store, and the network interface that leads to them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from parallelize.cluster.network import gloo_interface, resolvable_address
from parallelize.cluster.store import serve_store
from parallelize.cluster.world import World
from parallelize.run.surroundings import surroundings

_CLOSE_WAIT_S = 1.0
"""Longest wait for the other ranks before the connections are closed."""


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """What a launcher of this library gives its ranks to meet each other and no stranger.

    Args:
        key: a secret of the run's ranks; None: the ranks have to agree on a key, see `run_key.py`.
        store: link to the ranks' FileStore. Each rank has its own link, so that a rank can be cut
            off alone: see `interrupt_collectives`. None: the ranks meet in a TCPStore.
    """

    key: bytes | None = dataclasses.field(default=None, repr=False)
    store: Path | None = None


@dataclasses.dataclass(eq=False)
class WorldStore:
    """The store of one world, and how many runs have used it.

    Attributes:
        store: is opened once. If the next run of the world opened the port of a TCPStore anew, the
            clients of the other ranks could connect to the old server, which is about to close.
        runs: number of runs that have used the store. The prefix of a run's keys has this number,
            so that no run reads what an earlier run has written. It is the same on all ranks, which
            make their runs in one order.
    """

    store: dist.Store
    runs: int = 0


def store_of_next_run(world: World, timeout: timedelta, path: Path | None) -> dist.Store:
    """Return a part of the world's store that no other run uses; all ranks must call this.

    Args:
        world: as `reachable` returns it.
        timeout: longest time of a request.
        path: this rank's link to the FileStore; None: the ranks meet in a TCPStore.
    """
    store_of_world = surroundings().script.store_of_world
    if world not in store_of_world:
        store_of_world[world] = WorldStore(_new_store(world, timeout, path))
    world_store = store_of_world[world]
    world_store.store.set_timeout(timeout)
    number_of_run = world_store.runs
    world_store.runs += 1
    return dist.PrefixStore(f"parallelize/{number_of_run}", world_store.store)


def _new_store(world: World, timeout: timedelta, path: Path | None) -> dist.Store:
    """Open the store of a world: in memory for one rank, else in a file, else on a port."""
    if world.world_size == 1:
        return dist.HashStore()
    if path is not None:
        # With -1, FileStore does not remove the file. The caller removes it with its folder.
        return dist.FileStore(str(path), -1)
    if world.is_main and not world.has_store:
        return serve_store(world.master_addr, world.master_port, timeout)
    return dist.TCPStore(world.master_addr, world.master_port, is_master=False, timeout=timeout)


def wait_for_all(store: dist.Store, world_size: int) -> None:
    """Wait until every rank is connected.

    A rank that went on at once, and ended, would look dead to a peer that is still connecting.
    """
    if store.add("connected", 1) == world_size:
        store.set("all connected", "1")
    store.wait(["all connected"])


def wait_before_closing(store: dist.Store, world_size: int) -> None:
    """Wait up to 1 s for the other ranks before closing the connections.

    Closing a socket with unread data sends RST, which discards data that the peer has not read: the
    last collective of a slower rank would fail. The wait is short because a rank that is busy for
    longer has already read its data, and because a rank that waits for this one in a later
    collective must see the closed connection.
    """
    if store.add("leaving", 1) == world_size:
        store.set("all leaving", "1")
    end_s = time.monotonic() + _CLOSE_WAIT_S
    while not store.check(["all leaving"]) and time.monotonic() < end_s:
        time.sleep(0.005)


def reachable(world: World) -> World:
    """Return the world with an address of rank 0 that other nodes can connect to without DNS.

    The world of one node stays as it is: no other node connects.
    """
    if world.num_nodes == 1:
        return world
    return dataclasses.replace(world, master_addr=resolvable_address(world.master_addr))


@contextlib.contextmanager
def reachable_gloo(world: World) -> Iterator[None]:
    """Let the groups of gloo that are made in the block use the interface to the other ranks.

    gloo reads the name of the interface from GLOO_SOCKET_IFNAME when a group is made. If the user
    has set the variable, its value stays. Without a name, gloo takes the interface to which the
    name of the host resolves, which the other ranks may be unable to reach.

    Args:
        world: as `reachable` returns it.
    """
    variable = "GLOO_SOCKET_IFNAME"
    interface = None
    if variable not in os.environ:
        interface = gloo_interface(world.master_addr)
    if interface is None:
        yield
        return
    os.environ[variable] = interface
    try:
        yield
    finally:
        os.environ.pop(variable, None)
