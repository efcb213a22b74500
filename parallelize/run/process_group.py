"""Lifetime of a run's default process group: initialization, hang detection, destruction."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import os
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelize.cluster.network import gloo_interface, resolvable_address
from parallelize.cluster.store import serve_store
from parallelize.cluster.world import World
from parallelize.config.layout import Layout
from parallelize.config.options import backend_by_device_type
from parallelize.hang_detection.rank_state import Collective
from parallelize.hang_detection.watchdog import Watchdog
from parallelize.run.group_abort import abort_and_destroy
from parallelize.run.live_facts import LiveFacts, registered
from parallelize.run.run_key import give_run_key, known_run_key, run_key
from parallelize.run.threads import begin_on
from parallelize.torch_patches.objects import signed_objects
from parallelize.torch_patches.process_groups import (
    destroy_group,
    replace_group_functions,
    timeout_of_new_groups,
)
from parallelize.torch_patches.save import atomic_saves
from parallelize.torch_patches.step import AfterStep, StepCount, after_step

__all__ = [
    "GroupPurpose",
    "Rendezvous",
    "bound_device",
    "default_store",
    "process_group",
    "separate_group",
    "subgroup_of_this_rank",
]

_log = logging.getLogger("parallelize")

_DEBUGGED = timedelta(days=7)
"""Timeout of torch's collectives while the watchdog has that of the run: ranks wait for one that is in pdb."""


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """What a launcher of this library gives its ranks, beside the World, to meet each other and no stranger.

    Args:
        key: a secret of the run's ranks; None: see `run_key`.
        store: path of the ranks' FileStore, another one on each rank; None: they meet in a TCPStore.
    """

    key: bytes | None = dataclasses.field(default=None, repr=False)
    store: Path | None = None


@contextlib.contextmanager
def process_group(world: World, layout: Layout, watchdog: Watchdog, rendezvous: Rendezvous) -> Iterator[None]:
    """Initialize the default process group of a run, or use the one that the user's code has initialized.

    Args:
        world: rank and world size.
        layout: provides the timeout, `init_connection` and the group's backend.
        watchdog: detects hangs if the group has several processes.
        rendezvous: what the launcher gives.
    """
    config, since_ns, device = layout.config, time.time_ns(), layout.devices[world.local_rank][0]
    torch_timeout = _DEBUGGED if watchdog.has_debugger else config.timeout
    if dist.is_initialized():
        with (
            _with_watchdog(watchdog, device, config.timeout, since_ns=None),
            replace_group_functions(),
            _signed_objects(known_run_key()),
        ):
            yield
        return
    store: dist.Store | None = None
    if config.init_connection is not None:
        config.init_connection(world)
    else:
        store = _initialize(_reachable(world), layout, torch_timeout, rendezvous.store)
    if rendezvous.key is not None and known_run_key() is None:
        give_run_key(rendezvous.key)
    try:
        with (
            timeout_of_new_groups(torch_timeout),
            _gloo_interface(_reachable(world)),  # of groups that the user makes, too
            _with_watchdog(watchdog, device, config.timeout, since_ns=since_ns),
            replace_group_functions(),
            _signed_objects(known_run_key() if store is None or world.world_size == 1 else run_key()),
        ):
            yield
    except BaseException:
        if dist.is_initialized():
            abort_and_destroy()
        raise
    try:
        if store is not None:
            _wait_before_closing(store, world.world_size)
        if dist.is_initialized():
            destroy_group()
    except Exception:  # noqa: BLE001 - whatever a library raises: the block has its result, which must not be lost
        _log.exception("an error while the process group was closed, after the function had returned")


def bound_device(world: World, layout: Layout) -> torch.device | None:
    """Return the one device that this process drives, if not gloo carries its tensors; else None.

    NCCL then connects its ranks at once, not in the first collective, and new groups are split from the default group.
    A process that is alone has nobody to connect to. NCCL's communicator, which costs a second and memory of the
    device, is left to the first collective of a device's tensor, which is the user's. `barrier()` of a group that is
    not bound uses the CPU's backend; without one it would warn, so that a group without one is bound.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
    """
    device, *others = layout.devices[world.local_rank]
    backend = layout.process_group_backend
    is_gloo = backend == "gloo" or f"{device.type}:gloo" in backend
    if others or device.type == "cpu" or is_gloo:
        return None
    return None if world.world_size == 1 and "cpu:" in backend else device


def _signed_objects(key: bytes | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if key is None else signed_objects(key)


def _initialize(world: World, layout: Layout, timeout: timedelta, path: Path | None) -> dist.Store:
    """Initialize the default group of a run on the run's store, and return its part of the store."""
    # Each group has its own prefix, so that it does not read the keys of an earlier run's. All ranks make their
    # groups in the same order, so their counters agree.
    store = dist.PrefixStore(f"parallelize/{next(_group_ids)}", _store(world, timeout, path))
    excepthook = sys.excepthook
    with _gloo_interface(world):
        dist.init_process_group(
            layout.process_group_backend,
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=bound_device(world, layout),
        )
    if world.world_size == 1:  # torch's hook adds one "[rank0]: " per group before every line
        sys.excepthook = excepthook
    _wait_for_all(store, world.world_size)
    return store


@contextlib.contextmanager
def _with_watchdog(
    watchdog: Watchdog, device: torch.device, timeout: timedelta, *, since_ns: int | None
) -> Iterator[None]:
    """Run the watchdog in the block if the process group has several processes.

    Args:
        watchdog: the watchdog of this process.
        device: the device of this process.
        timeout: timeout of the run, which is the least timeout of a wait if the group is the user's.
        since_ns: time when the run initialized the group (time.time_ns); None: it is the user's and outlives the run.
    """
    if dist.get_world_size() == 1:
        yield
        return
    # All ranks enter their runs in the same order, so their counters agree.
    store = dist.PrefixStore(f"parallelize/watch/{next(_watch_ids)}", default_store())
    steps = StepCount()
    watchdog.on_start = functools.partial(begin_on, device)
    watchdog.on_look = LiveFacts(steps, device)

    def timeout_s(calls: Sequence[Collective]) -> float:
        longest = _longest_timeout(calls, timeout)
        return (max(longest, timeout) if since_ns is None else longest).total_seconds()

    watching = watchdog.watch(store, timeout_s=timeout_s, since_ns=since_ns)
    counting = after_step(AfterStep.COUNT, steps)
    with counting, registered(default_store()), atomic_saves(store, dist.get_rank()), watching:
        yield


def _longest_timeout(calls: Sequence[Collective], default: timedelta) -> timedelta:
    """Return the longest timeout of the default group and of the groups of these collectives; of all groups if none."""
    names, found = {call.counter.partition("/")[0] for call in calls}, list[timedelta]()
    groups = list(dist.distributed_c10d._world.pg_names.items())
    wanted = [group for group, name in groups if not names or name in names or group is dist.group.WORLD]
    for group in wanted:
        for device in group._device_types:
            with contextlib.suppress(RuntimeError, AttributeError):  # not every backend has options
                limit = group._get_backend(device).options._timeout
                found.append(default if limit == _DEBUGGED else limit)
    return max(found, default=default)


_group_ids = itertools.count()

# The separate groups of each default group, by their purposes and backends; and those of some ranks, by their names.
_separate_groups: weakref.WeakKeyDictionary[Any, dict[tuple[GroupPurpose, str | None], Any]]
_separate_groups = weakref.WeakKeyDictionary()
_watch_ids = itertools.count()
_CLOSE_WAIT_S = 1.0


def _wait_for_all(store: dist.Store, world_size: int) -> None:
    """Wait until every rank is connected: a rank that ended earlier looks dead to a peer that is still connecting."""
    if store.add("connected", 1) == world_size:
        store.set("all connected", "1")
    store.wait(["all connected"])


def _wait_before_closing(store: dist.Store, world_size: int) -> None:
    """Wait up to 1 s for the other ranks before closing the connections.

    Closing a socket with unread data sends RST, which discards data that the peer has not read: the last collective of
    a slower rank would fail. The wait is short because a rank that is busy for longer has already read its data, and
    because a rank that waits for this one in a later collective must see the closed connection.
    """
    if store.add("leaving", 1) == world_size:
        store.set("all leaving", "1")
    end = time.monotonic() + _CLOSE_WAIT_S
    while not store.check(["all leaving"]) and time.monotonic() < end:
        time.sleep(0.005)


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


class GroupPurpose(enum.Enum):
    """Who uses a group beside the default one.

    Two users of one group would have to send in one order on all ranks. The order of the user's collectives, of a
    reducer's in backward and of another thread's is not the same on all ranks, so that each has a group of its own.
    """

    TRAINING = enum.auto()
    """Gradients of a `Reducer`; under fsdp, what the user's code gathers. Its tensors are on one type of device."""

    OFFLOADED = enum.auto()
    """What the user's code gathers under fsdp with `cpu_offload=True`. Its tensors are on the device and on the CPU."""

    COMPARISONS = enum.auto()
    """Fingerprints, and the objects and shards of a checkpoint that the main thread writes. Its tensors are on the CPU.
    Hang detection tells a rank that compares from one that trains."""

    BACKGROUND_SAVES = enum.auto()
    """What the thread that writes checkpoints in the background sends. Its tensors are on the CPU."""


def separate_group(world: World, device: torch.device, purpose: GroupPurpose) -> Any:
    """Return the group of all ranks for a purpose; all ranks must call this.

    Args:
        world: the ranks.
        device: a device of this process. Under `TRAINING`, that of the tensors to be sent.
        purpose: who uses the group.
    """
    groups = _separate_groups.setdefault(dist.group.WORLD, {})
    backend = _backend_of(purpose, device)
    if (purpose, backend) not in groups:
        with _meeting_for_new_groups(world, device) as timeout:
            groups[purpose, backend] = dist.new_group(backend=backend, timeout=timeout)
    return groups[purpose, backend]


def subgroup_of_this_rank(
    world: World, device: torch.device, purpose: GroupPurpose, ranks_of_groups: Sequence[Sequence[int]], *, name: str
) -> Any:
    """Return the group of some ranks, this one among them, for a purpose; all ranks must call this.

    Args:
        world: the ranks.
        device: as for `separate_group`.
        purpose: as for `separate_group`.
        ranks_of_groups: the ranks of each group. Each rank of the world is in one group.
        name: description of the groups.
    """
    groups = _separate_groups.setdefault(dist.group.WORLD, {})
    key = purpose, f"{name} of {ranks_of_groups}"
    if key not in groups:
        make: Any = dist.new_subgroups_by_enumeration
        backend = _backend_of(purpose, device)
        with _meeting_for_new_groups(world, device) as timeout:
            groups[key], _ = make(ranks_of_groups, timeout=timeout, backend=backend, group_desc=name)
    return groups[key]


def _backend_of(purpose: GroupPurpose, device: torch.device) -> str | None:
    """Return the backend of a group, as for torch.distributed.new_group; None: those of the default group.

    Those of the default group, "cpu:gloo,cuda:nccl", connect all ranks by gloo once more. For tensors on one type of
    device, its own backend is enough. No name has a device in it: if the default group is bound to a device, each group
    must have a backend for that device. "gloo" has one for each device, and "cpu:gloo" has not.
    """
    if purpose is GroupPurpose.OFFLOADED:
        return None
    if purpose is GroupPurpose.TRAINING:
        return backend_by_device_type(dist.get_backend_config()).get(device.type)
    return "gloo"


@contextlib.contextmanager
def _meeting_for_new_groups(world: World, device: torch.device) -> Iterator[timedelta]:
    """Wait for all ranks, which make groups in the block; yield the timeout of the default group."""
    # Hang detection sees a rank that waits in a collective, and not one that waits for a new group.
    dist.all_reduce(torch.zeros(3, dtype=torch.int32, device=device))
    default: Any = dist.group.WORLD
    with _gloo_interface(_reachable(world)):
        yield default._get_backend(device).options._timeout


def _reachable(world: World) -> World:
    """Return the world with rank 0's address replaced by one that other nodes can connect to without DNS."""
    if world.num_nodes == 1:
        return world
    return dataclasses.replace(world, master_addr=resolvable_address(world.master_addr))


@contextlib.contextmanager
def _gloo_interface(world: World) -> Iterator[None]:
    """Set GLOO_SOCKET_IFNAME, which gloo reads when a group is made, to the interface that reaches the other ranks."""
    name = "GLOO_SOCKET_IFNAME"
    interface = None if name in os.environ else gloo_interface(world.master_addr)
    if interface is None:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _store(world: World, timeout: timedelta, path: Path | None) -> dist.Store:
    """Return the rendezvous store, one per world: clients may fail while the server closes and reopens its port."""
    if world not in _stores:
        _stores[world] = _new_store(world, timeout, path)
    _stores[world].set_timeout(timeout)
    return _stores[world]


_stores: dict[World, dist.Store] = {}


def _new_store(world: World, timeout: timedelta, path: Path | None) -> dist.Store:
    if world.world_size == 1:
        return dist.HashStore()
    if path is not None:
        return dist.FileStore(str(path), -1)  # -1: the file is not removed by its last user, but with its folder
    if world.is_main and not world.has_store:
        return serve_store(world.master_addr, world.master_port, timeout)
    return dist.TCPStore(world.master_addr, world.master_port, is_master=False, timeout=timeout)
