"""What `parallelize top` shows of a run beside the line of each rank, and how it finds the runs of this machine."""

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
from parallelize.hang_detection.stack_frames import Stack, is_in_collective
from parallelize.torch_patches.step import StepCount

__all__ = ["LiveFacts", "listed_runs", "registered"]

_DATA = ("torch.utils.data", "parallelize.data")
_SOCKETS = "parallelize-run"


class LiveFacts:
    """Counts where the main thread of this process was at each look of the watchdog.

    Args:
        steps: counts the optimizer steps of this process.
        device: the device of this process. No other one is asked for: a run on the CPU would initialize the driver of a
            GPU that this machine has.
    """

    def __init__(self, steps: StepCount, device: torch.device) -> None:
        self._world_size, self._steps, self._looks = dist.get_world_size(), steps, Counter[str]()
        self._waits_from_s: float | None = None
        self._device = device

    def __call__(self, stack: Stack) -> dict[str, Any]:
        """Note where the main thread is, and return the facts, as plain data."""
        modules = [frame.f_globals.get("__name__", "") for frame, _ in stack]
        is_waiting = is_in_collective(stack)
        is_loading = any(each.startswith(_DATA) for each in modules)
        self._looks["waiting" if is_waiting else "data" if is_loading else "computing"] += 1
        self._waits_from_s = (self._waits_from_s or time.monotonic()) if is_waiting else None
        return {
            "host": socket.gethostname(),
            "world_size": self._world_size,
            "at_s": time.monotonic(),
            "steps": self._steps.number,
            "looks": dict(self._looks),
            "waits_s": 0.0 if self._waits_from_s is None else time.monotonic() - self._waits_from_s,
            "memory_bytes": _memory_bytes(self._device),
        }


def _memory_bytes(device: torch.device) -> int:
    """Return the memory that torch has reserved on a GPU, or the largest size of a process on the CPU; else 0."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    if device.type != "cpu" or sys.platform == "win32":
        return 0
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def registered(store: Any) -> Iterator[None]:
    """List the address of a TCPStore for `parallelize top` in the name of a socket, which goes with the process."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    with contextlib.ExitStack() as sockets:
        if isinstance(store, dist.TCPStore) and sys.platform == "linux":
            name = f"\0{_SOCKETS}/{os.getuid()}/{os.getpid()}/{store.host}:{store.port}"
            with contextlib.suppress(OSError):  # a long name of the host, or a run in a run, whose name is bound
                sockets.enter_context(socket.socket(socket.AF_UNIX)).bind(name)
        yield


def listed_runs() -> set[str]:
    """Return where the runs of this user on this machine can be asked: paths of FileStores, and HOST:PORT of TCPStores.

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
    listed = re.findall(rf" (\d+) @{_SOCKETS}/{os.getuid()}/(\d+)/(\S+)$", names, re.MULTILINE)
    return {address for inode, pid, address in listed if _is_socket_of_user(inode, pid)}


def _is_socket_of_user(inode: str, pid: str) -> bool:
    """Return whether a process of this user has a socket: a name with its number is no proof of that."""
    try:
        # The owner of this folder is the effective user, also if the process lets nobody look into it (proc(5)).
        if Path("/proc", pid).stat().st_uid != os.getuid():
            return False
        descriptors = list(Path("/proc", pid, "fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(descriptor.readlink()) == f"socket:[{inode}]":
                return True
    return False
