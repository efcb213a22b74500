"""What `parallelize top` shows beside the line of each rank, and how it finds the runs."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelize.cluster.call_folders import own_call_folders
from parallelize.cluster.store import STORE_FILE
from parallelize.hang_detection.stack_frames import Stack
from parallelize.torch_patches.step import StepCount

_DATA = ("torch.utils.data", "parallelize.data")
_SOCKETS = "parallelize-run"


class LiveFacts:
    """Counts where the main thread of this process was at each look of the watchdog.

    Args:
        steps: counts the optimizer steps of this process.
        device: the device of this process. No other one is asked for: a run on the CPU would
            initialize the driver of a GPU that this machine has.
    """

    def __init__(self, steps: StepCount, device: torch.device) -> None:
        self._steps = steps
        self._device = device
        self._world_size = dist.get_world_size()
        self._looks = Counter[str]()
        self._waits_from_s: float | None = None

    def __call__(self, stack: Stack, *, is_waiting: bool) -> dict[str, Any]:
        """Note where the main thread is, and return the facts, as plain data.

        Args:
            stack: of the main thread.
            is_waiting: whether it waits for other ranks.
        """
        now_s = time.monotonic()
        activity = _activity(stack, is_waiting=is_waiting)
        self._looks[activity] += 1
        if activity != "waiting":
            self._waits_from_s = None
        elif self._waits_from_s is None:
            self._waits_from_s = now_s
        waits_s = 0.0
        if self._waits_from_s is not None:
            waits_s = now_s - self._waits_from_s
        return {
            "host": socket.gethostname(),
            "world_size": self._world_size,
            "at_s": now_s,
            "steps": self._steps.number,
            "looks": dict(self._looks),
            "waits_s": waits_s,
            "memory_bytes": _memory_bytes(self._device),
        }


def _activity(stack: Stack, *, is_waiting: bool) -> str:
    """Return what a thread does: it is "waiting" for ranks, reads "data", or is "computing"."""
    if is_waiting:
        return "waiting"
    for frame, _ in stack:
        if frame.f_globals.get("__name__", "").startswith(_DATA):
            return "data"
    return "computing"


def _memory_bytes(device: torch.device) -> int:
    """Return the memory that torch has reserved on a GPU, or that a process on the CPU has had.

    It is 0 on other devices, and on the CPU under Windows.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    if device.type != "cpu" or sys.platform == "win32":
        return 0
    import resource  # Windows has no such module.

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def registered(store: Any) -> Iterator[None]:
    """List the address of a TCPStore for `parallelize top` in the block.

    It is the name of a socket, which the kernel removes with the process, however that ends.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    with contextlib.ExitStack() as sockets:
        if isinstance(store, dist.TCPStore) and sys.platform == "linux":
            name = f"\0{_SOCKETS}/{os.getuid()}/{os.getpid()}/{store.host}:{store.port}"
            # The name of the host may be too long, and in a run inside another one the name is
            # bound.
            with contextlib.suppress(OSError):
                sockets.enter_context(socket.socket(socket.AF_UNIX)).bind(name)
        yield


def listed_runs() -> set[str]:
    """Return where the runs of this user on this machine can be asked.

    These are paths of FileStores, and HOST:PORT of TCPStores.

    Anybody may make folders and sockets of any name. Those of other users are left out.
    """
    return _stores_in_folders() | _registered_stores()


def _stores_in_folders() -> set[str]:
    """Return the stores in the folders of this user's calls that nobody else can look into."""
    paths = set()
    for folder in own_call_folders():
        store = folder / STORE_FILE
        # There is none in a call of several nodes, or in one whose workers have not met yet.
        with contextlib.suppress(FileNotFoundError):
            is_private = stat.S_IMODE(folder.lstat().st_mode) == stat.S_IRWXU
            if is_private and stat.S_ISREG(store.lstat().st_mode):
                paths.add(str(store))
    return paths


def _registered_stores() -> set[str]:
    """Return the stores that processes of this user have listed; none but on Linux."""
    try:
        names = Path("/proc/net/unix").read_text(errors="replace")
    except OSError:
        return set()
    line = rf" (\d+) @{_SOCKETS}/{os.getuid()}/(\d+)/(\S+)$"
    addresses = set()
    for inode, pid, address in re.findall(line, names, re.MULTILINE):
        if _is_socket_of_user(inode, pid):
            addresses.add(address)
    return addresses


def _is_socket_of_user(inode: str, pid: str) -> bool:
    """Return whether a process of this user has a socket: its number in a name is no proof."""
    try:
        # The owner of this folder is the effective user, also if the process lets nobody look into
        # it (proc(5)).
        if Path("/proc", pid).stat().st_uid != os.getuid():
            return False
        descriptors = list(Path("/proc", pid, "fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        # The process may have closed it meanwhile.
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()) == f"socket:[{inode}]":
                return True
    return False
