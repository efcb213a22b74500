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
        key: a secret of the run's ranks; None: see `run_key`.
        store: path of the ranks' FileStore, another one on each rank; None: they meet in a
            TCPStore.
    """

    key: bytes | None = dataclasses.field(default=None, repr=False)
    store: Path | None = None


@dataclasses.dataclass(eq=False)
class WorldStore:
    """The store of one world, and how many runs have used it.

    Attributes:
        store: is opened once. The server of a TCPStore holds its port: if the next run of the world
            opened the port anew, the clients of the other ranks would connect to a server that is
            about to close.
        runs: number of default groups that were made on the store. It must be the same on all
            ranks, which make their groups in one order: the prefix of a group's keys has it, so
            that no run reads what an earlier one has written.
    """

    store: dist.Store
    runs: int = 0


def store_of_next_run(world: World, timeout: timedelta, path: Path | None) -> dist.Store:
    """Return a part of the world's store that no other run uses; all ranks must call this.

    Args:
        world: rank and world size.
        timeout: longest time of a request.
        path: of this rank's FileStore; None: the ranks meet in a TCPStore.
    """
    store_of_world = surroundings().script.store_of_world
    if world not in store_of_world:
        store_of_world[world] = WorldStore(_new_store(world, timeout, path))
    meeting = store_of_world[world]
    meeting.store.set_timeout(timeout)
    number = meeting.runs
    meeting.runs += 1
    return dist.PrefixStore(f"parallelize/{number}", meeting.store)


def _new_store(world: World, timeout: timedelta, path: Path | None) -> dist.Store:
    if world.world_size == 1:
        return dist.HashStore()
    if path is not None:
        # With -1, the file is not removed by its last user, but with its folder.
        return dist.FileStore(str(path), -1)
    if world.is_main and not world.has_store:
        return serve_store(world.master_addr, world.master_port, timeout)
    return dist.TCPStore(world.master_addr, world.master_port, is_master=False, timeout=timeout)


def wait_for_all(store: dist.Store, world_size: int) -> None:
    """Wait until every rank is connected.

    A rank that ended earlier would look dead to a peer that is still connecting.
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

    gloo reads its name from GLOO_SOCKET_IFNAME when a group is made. The user's value stays.
    Without a name, gloo takes the interface of the host's own name, which may lead nowhere.

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
