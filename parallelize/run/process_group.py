"""Lifetime of a run's default process group: from its initialization to its destruction.

    initialize      the ranks meet in the store of their world; all are connected before any goes on
    run             hang detection watches; groups that the user makes have the timeout of the run
    end             the ranks wait for each other for up to a second, then destroy their groups
    end by an error the groups are aborted, without waiting for other ranks

A default group that the user's code has initialized is used as it is, and outlives the run.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from parallelize.cluster.world import World
from parallelize.config.layout import Layout
from parallelize.hang_detection.watchdog import Watchdog
from parallelize.run.group_abort import abort_and_destroy
from parallelize.run.rendezvous import (
    Rendezvous,
    reachable,
    reachable_gloo,
    store_of_next_run,
    wait_before_closing,
    wait_for_all,
)
from parallelize.run.run_key import give_run_key, known_run_key, run_key
from parallelize.run.watching import DEBUGGED, watching
from parallelize.torch_patches.objects import signed_objects
from parallelize.torch_patches.process_groups import (
    destroy_group,
    replace_group_functions,
    timeout_of_new_groups,
)

_log = logging.getLogger("parallelize")


@contextlib.contextmanager
def process_group(
    world: World,
    layout: Layout,
    watchdog: Watchdog,
    rendezvous: Rendezvous,
) -> Iterator[None]:
    """In the block, have a default process group: the user's if it exists, else one of the run.

    Args:
        world: rank and world size.
        layout: provides the timeout, `init_connection` and the group's backend.
        watchdog: detects hangs if the group has several processes.
        rendezvous: what a launcher of this library gives its ranks to meet each other.
    """
    if dist.is_initialized():
        lifetime = _users_group(world, layout, watchdog)
    else:
        lifetime = _group_of_run(world, layout, watchdog, rendezvous)
    with lifetime:
        yield


@contextlib.contextmanager
def _users_group(world: World, layout: Layout, watchdog: Watchdog) -> Iterator[None]:
    """Use the default group that the user's code has initialized, and leave it as it is.

    The ranks run no collective to agree on a key, as under `init_connection`: see `_key_at_start`.
    """
    device = layout.devices[world.local_rank][0]
    with (
        watching(watchdog, device, layout.config.timeout, since_ns=None),
        replace_group_functions(),
        _signed_objects(known_run_key()),
    ):
        yield


@contextlib.contextmanager
def _group_of_run(
    world: World,
    layout: Layout,
    watchdog: Watchdog,
    rendezvous: Rendezvous,
) -> Iterator[None]:
    """Initialize the default group for the block, and destroy it at the end."""
    config = layout.config
    since_ns = time.time_ns()
    torch_timeout = config.timeout
    # A rank may be stopped in pdb for long. The watchdog knows that, and torch's timeout does not.
    if watchdog.has_debugger:
        torch_timeout = DEBUGGED
    store: dist.Store | None = None
    if config.init_connection is not None:
        config.init_connection(world)
    else:
        store = _initialize(reachable(world), layout, torch_timeout, rendezvous.store)
    # PARALLELIZE_KEY, if the user has set it, comes before the key of a launcher.
    if rendezvous.key is not None and known_run_key() is None:
        give_run_key(rendezvous.key)
    device = layout.devices[world.local_rank][0]
    try:
        with (
            timeout_of_new_groups(torch_timeout),
            # The user may make groups of gloo, too.
            reachable_gloo(reachable(world)),
            watching(watchdog, device, config.timeout, since_ns=since_ns),
            replace_group_functions(),
            _signed_objects(_key_at_start(world, is_connected_by_user=store is None)),
        ):
            yield
    except BaseException:
        if dist.is_initialized():
            abort_and_destroy()
        raise
    _close(store, world)


def _key_at_start(world: World, *, is_connected_by_user: bool) -> bytes | None:
    """Return the key with which the ranks sign objects at the start of a run; None: no key.

    The ranks may need a collective to agree on a key. Ranks that `init_connection` has connected
    run no collective now, because their group may be unable to send: they have a key only if a
    launcher or PARALLELIZE_KEY has given it.
    """
    if is_connected_by_user or world.world_size == 1:
        return known_run_key()
    return run_key()


def _signed_objects(key: bytes | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the objects that torch sends are signed; without a key, not."""
    if key is None:
        return contextlib.nullcontext()
    return signed_objects(key)


def _initialize(world: World, layout: Layout, timeout: timedelta, path: Path | None) -> dist.Store:
    """Initialize the default group of a run; return the run's part of the world's store.

    Args:
        world: as `reachable` returns it.
        layout: provides the group's backend, and the devices.
        timeout: of the group and of requests to the store.
        path: this rank's link to the FileStore; None: the ranks meet in a TCPStore.
    """
    store = store_of_next_run(world, timeout, path)
    excepthook = sys.excepthook
    with reachable_gloo(world):
        dist.init_process_group(
            layout.process_group_backend,
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=bound_device(world, layout),
        )
    if world.world_size == 1:
        # init_process_group has set a hook, which would write "[rank0]: " before every line of a
        # traceback. After several runs it would do so several times.
        sys.excepthook = excepthook
    wait_for_all(store, world.world_size)
    return store


def bound_device(world: World, layout: Layout) -> torch.device | None:
    """Return the device to which the default group is bound; None: the group is bound to none.

    In a bound group, NCCL connects the ranks at once, not in the first collective, and new groups
    are split from the default group. A group is not bound if

        its processes have several devices   torch binds a group to one device
        gloo sends its tensors               gloo has nothing to connect on a device
        its process is alone                 there is nobody to connect to, and NCCL's communicator
                                             costs a second and memory of the device. The user's
                                             first collective makes it, if there is one.

    The last row needs a backend for the CPU. In a group that is not bound, `barrier()` uses that
    backend, and warns if there is none. Without such a backend, the group is bound.

    Source: https://docs.pytorch.org/docs/stable/distributed.html, at init_process_group
    """
    devices = layout.devices[world.local_rank]
    device = devices[0]
    # Such as "nccl", or "cpu:gloo,cuda:nccl" with a backend for each type of device.
    backend = layout.process_group_backend
    is_gloo = backend == "gloo" or f"{device.type}:gloo" in backend
    if len(devices) > 1 or device.type == "cpu" or is_gloo:
        return None
    has_cpu_backend = "cpu:" in backend
    if world.world_size == 1 and has_cpu_backend:
        return None
    return device


def _close(store: dist.Store | None, world: World) -> None:
    """Destroy the process groups when the run has ended without an error.

    Args:
        store: the run's part of the world's store; None: `init_connection` has connected the ranks.
        world: rank and world size.
    """
    try:
        if store is not None:
            wait_before_closing(store, world.world_size)
        if dist.is_initialized():
            destroy_group()
    except Exception:  # noqa: BLE001 - whatever a library raises, the result must not be lost
        when = "while the process group was closed, after the function had returned"
        _log.exception("an error %s", when)
