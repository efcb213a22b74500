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
"""Prefixes of the modules that read data."""

_SOCKETS = "parallelize-run"
"""Prefix of the names of sockets that list a run: see `registered`."""


class LiveFacts:
    """Counts where the main thread of this process was at each look of the watchdog.

    Args:
        steps: counts the optimizer steps of this process.
        device: the device of this process. No other device is asked for its memory: that would
            initialize the driver of the machine's GPU in a run on the CPU.
    """

    def __init__(self, steps: StepCount, device: torch.device) -> None:
        self._steps = steps
        self._device = device
        self._world_size = dist.get_world_size()
        self._looks = Counter[str]()
        self._waits_from_s: float | None = None

    def __call__(self, stack: Stack, *, is_waiting: bool) -> dict[str, Any]:
        """Note where the main thread is, and return the facts, as plain data.

        The watchdog's thread calls this twice a second. `parallelize top` computes rates from the
        facts of two moments.

        Args:
            stack: of the main thread.
            is_waiting: whether the main thread waits for other ranks.

        Returns:
            Facts by name. "looks" has the number of looks by activity, "waits_s" the time since the
            first of the latest looks that all saw the thread wait; "at_s" is the time of the look.
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
    """Return "waiting" for a thread that waits for ranks, "data" if it reads data, or "computing".

    Args:
        stack: of the thread.
        is_waiting: whether the thread waits for other ranks.
    """
    if is_waiting:
        return "waiting"
    for frame, _ in stack:
        if frame.f_globals.get("__name__", "").startswith(_DATA):
            return "data"
    return "computing"


def _memory_bytes(device: torch.device) -> int:
    """Return the memory that torch has reserved on a GPU, or the peak memory of a run on the CPU.

    It is 0 on other devices, and on the CPU under Windows.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    if device.type != "cpu" or sys.platform == "win32":
        return 0
    import resource  # Windows has no such module.

    # Linux counts in units of 1024 bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def registered(store: Any) -> Iterator[None]:
    """Let `parallelize top` find the TCPStore of a run in the block.

    The address of the store is in the name of a socket. The kernel removes the name with the
    process, even if the process is killed. A FileStore is found in the folder of its call.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    with contextlib.ExitStack() as sockets:
        if isinstance(store, dist.TCPStore) and sys.platform == "linux":
            name = f"\0{_SOCKETS}/{os.getuid()}/{os.getpid()}/{store.host}:{store.port}"
            # With the name of the host, the name may be too long. In a run inside another run, the
            # outer run has bound the name.
            with contextlib.suppress(OSError):
                sockets.enter_context(socket.socket(socket.AF_UNIX)).bind(name)
        yield


def listed_runs() -> set[str]:
    """Return the stores by which the runs of this user on this machine can be asked.

    These are paths of FileStores, and HOST:PORT of TCPStores. Any user may make folders and sockets
    of such names, so those of other users are left out.
    """
    return _stores_in_folders() | _registered_stores()


def _stores_in_folders() -> set[str]:
    """Return the paths of FileStores in those call folders that only this user can look into."""
    paths = set()
    for folder in own_call_folders():
        store = folder / STORE_FILE
        # A call on several nodes has no such file, nor has a call whose workers have not met yet.
        with contextlib.suppress(FileNotFoundError):
            is_private = stat.S_IMODE(folder.lstat().st_mode) == stat.S_IRWXU
            if is_private and stat.S_ISREG(store.lstat().st_mode):
                paths.add(str(store))
    return paths


def _registered_stores() -> set[str]:
    """Return the addresses that processes of this user list by `registered`; only Linux has some.

    Lines of /proc/net/unix end with the inode and the name of a socket, with "@" for the byte 0.
    """
    try:
        socket_lines = Path("/proc/net/unix").read_text(errors="replace")
    except OSError:
        return set()
    inode_pid_and_address = rf" (\d+) @{_SOCKETS}/{os.getuid()}/(\d+)/(\S+)$"
    addresses = set()
    for inode, pid, address in re.findall(inode_pid_and_address, socket_lines, re.MULTILINE):
        if _is_socket_of_user(inode, pid):
            addresses.add(address)
    return addresses


def _is_socket_of_user(inode: str, pid: str) -> bool:
    """Return whether a process is this user's and has the socket: any user may bind any name.

    Args:
        inode: of the socket.
        pid: number of the process, as the name of the socket has it.
    """
    try:
        # The owner of this folder is the effective user of the process, even if the process lets
        # nobody look into the folder (proc(5)).
        if Path("/proc", pid).stat().st_uid != os.getuid():
            return False
        descriptors = list(Path("/proc", pid, "fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        # The process may have closed the descriptor meanwhile.
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()) == f"socket:[{inode}]":
                return True
    return False
