"""This process's World, Config and devices while a run lasts, its process group, and the one contextvar."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelize.config import Config
from parallelize.devices import probe
from parallelize.layout import Layout, lay_out
from parallelize.network import gloo_interface, reachable
from parallelize.store import serve_store
from parallelize.watch.apart import noticing_apart
from parallelize.watch.watch import Watch
from parallelize.world import World, detect

__all__ = [
    "Runtime",
    "activate",
    "active",
    "current",
    "device",
    "is_main",
    "local_rank",
    "new_group",
    "outside",
    "rank",
    "world_size",
]


@dataclass(frozen=True)
class Runtime:
    """One process of a run.

    Args:
        world: this process among the others.
        layout: the request, and what every local rank drives.
        told: names of what the user was told already, and is told once in a run.
        watch: finds out for whom this process waits, while it is one of several.
    """

    world: World
    layout: Layout
    told: set[str] = field(default_factory=set, compare=False, repr=False)
    watch: Watch = field(default_factory=Watch, compare=False, repr=False)

    @property
    def config(self) -> Config:
        """The request."""
        return self.layout.config

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices this process drives."""
        return self.layout.devices[self.world.local_rank]

    @property
    def device(self) -> torch.device:
        """The device on which this process's model and batches are."""
        return self.devices[0]


_active: ContextVar[Runtime | None] = ContextVar("parallelize_runtime", default=None)


def active() -> Runtime | None:
    """The run this code is part of, or None outside of one."""
    return _active.get()


def current() -> Runtime:
    """The run this code is part of; outside of one, what a launcher's variables say, else a world of one.

    Raises:
        ConfigError: a launcher's variables contradict themselves, or PARALLELIZE_<OPTION> variables do.
    """
    runtime = _active.get()
    if runtime is not None:
        return runtime
    world = _world()
    return Runtime(world, lay_out(Config.parse().merged(os.environ), probe(), world))


def _world() -> World:
    """Who this process is; nothing about devices is asked, so that a rank can be told where a device cannot."""
    runtime = _active.get()
    return runtime.world if runtime is not None else detect(os.environ) or World()


@contextlib.contextmanager
def activate(runtime: Runtime) -> Iterator[Runtime]:
    """Make this process part of a run: contextvar, current device, process group; all given back at the end."""
    token = _active.set(runtime)
    try:
        with _on_device(runtime.device), _process_group(runtime):
            yield runtime
    finally:
        _active.reset(token)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Let a block see the run around it as a program sees the launcher that has placed it: by its variables alone.

    The process group stays. A decorated function that is called in the block joins the run with options of its own.
    """
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


@contextlib.contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


@contextlib.contextmanager
def _process_group(runtime: Runtime) -> Iterator[None]:
    """The default process group of the run; one that the user's code has already made is used as it is."""
    if dist.is_initialized():
        with _watched(runtime, since_ns=None):
            yield
        return
    world, config, since_ns = runtime.world, runtime.config, time.time_ns()
    store: dist.Store | None = None
    if config.init_connection is not None:
        config.init_connection(world)
    else:
        world = _reachable(world)
        # Stale keys of an earlier group would be taken for this one's: each gets a name of its own. Every rank makes
        # its groups in the same order, so that all count alike.
        store = dist.PrefixStore(f"parallelize/{next(_groups)}", _store(world, config.timeout))
        with _gloo_interface(world), _own_excepthook(world):
            dist.init_process_group(
                runtime.layout.process_group_backend,
                store=store,
                rank=world.rank,
                world_size=world.world_size,
                timeout=config.timeout,
            )
        _wait_for_all(store, world.world_size)
    try:
        with _watched(runtime, since_ns=since_ns):
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
def _watched(runtime: Runtime, *, since_ns: int | None) -> Iterator[None]:
    """The watch over this process while it is one of several.

    Args:
        runtime: the run.
        since_ns: when its group was made (time.time_ns); None: it was there before, and stays.
    """
    if dist.get_world_size() == 1:
        yield
        return
    # Every rank enters its runs in the same order, so that all count alike.
    store = dist.PrefixStore(f"parallelize/watch/{next(_watches)}", dist.distributed_c10d._get_default_store())
    watch = runtime.watch.over(store, timeout=runtime.config.timeout, since_ns=since_ns)
    with watch, noticing_apart(runtime.told):
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


def new_group() -> Any:
    """Another process group of all ranks, by the interface that the default one uses; a collective."""
    with _gloo_interface(_reachable(_world())):
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


def rank() -> int:
    """Number of this process among all, from 0; 0 in a script that nobody launched."""
    return _world().rank


def world_size() -> int:
    """Processes in all; 1 in a script that nobody launched."""
    return _world().world_size


def local_rank() -> int:
    """Number of this process on its node, from 0."""
    return _world().local_rank


def device() -> torch.device:
    """The device on which this process's model and batches are."""
    return current().device


def is_main() -> bool:
    """Whether this process is rank 0: the one that should write files."""
    return _world().is_main
