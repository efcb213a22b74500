"""Abort of process groups: collectives that wait for other ranks raise an error, and destroying a group cannot block.

torch aborts NCCL's communicators only. A gloo collective waits until its timeout, or until a connection closes, and
destroying its group waits for it: its connections are shut down here, which gloo reports as "Connection closed".
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["abort_and_destroy", "interrupt_collectives", "is_interrupted", "mark_as_interrupted"]

_ABORT_TIMEOUT_S = 10.0

_log = logging.getLogger("parallelize")
_interrupted = threading.Event()


def mark_as_interrupted() -> None:
    """Let this process work alone from here on: Ctrl-C has interrupted the ranks, each of them somewhere else."""
    _interrupted.set()


def is_interrupted() -> bool:
    """Return whether Ctrl-C has interrupted the ranks: this library makes no collectives and comparisons any more."""
    return _interrupted.is_set()


def interrupt_collectives(*, store: int | Path | None = None) -> None:
    """Make the collectives and store requests in which other threads wait raise an error; return at once.

    The groups keep their ranks and names. Use this only in a process that is about to end.

    Args:
        store: port of the TCPStore, or this rank's link to the FileStore, whose requests fail; None: none does.
    """
    if isinstance(store, Path):
        _cut_off(store)
    _shut_down(store if isinstance(store, int) else None)
    groups: Any = list(dist.distributed_c10d._world.pg_names)
    for group in groups:  # at the same time, because one communicator's abort may wait for another's
        threading.Thread(target=group.abort, name="parallelize-abort", daemon=True).start()


def abort_and_destroy() -> None:
    """Abort and remove all process groups of this process, without waiting for other ranks."""
    if dist.get_world_size() > 1:
        _shut_down(None)
    abort_all = dist.distributed_c10d._abort_process_group  # NCCL's may hang
    abort = threading.Thread(target=abort_all, name="parallelize-abort", daemon=True)
    abort.start()
    abort.join(_ABORT_TIMEOUT_S)
    if abort.is_alive():
        _log.error("the process groups could not be aborted within %g s", _ABORT_TIMEOUT_S)


def _cut_off(link: Path) -> None:
    """Make the requests to a FileStore fail whose path is this link.

    FileStore opens its file for each request, and each time it looks whether a key has come (FileStore.cpp). It waits
    for a file that does not exist; a link that leads to itself cannot be opened (ELOOP), which is an error at once.
    """
    loop = link.with_name(f"{link.name}.lost")
    with contextlib.suppress(OSError):  # the folder is removed, or this was done before
        loop.symlink_to(link.name)
        loop.replace(link)


def _shut_down(store_port: int | None) -> None:
    """Shut down gloo's connections and those to a store; on systems without /proc, none."""
    facts = list(Path("/proc/self/fdinfo").glob("*"))
    of_gloo = {number for each in facts for number in _polled_by_gloo(each)}
    for number in [int(each.name) for each in facts if _is_socket(int(each.name))]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as each:
            # Shutting down gloo's listening socket would abort the process in gloo's thread.
            is_listening = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if each.family == socket.AF_UNIX or is_listening:
                continue
            if number in of_gloo or each.getpeername()[1] == store_port:
                each.shutdown(socket.SHUT_RDWR)


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # closed by another thread
        return False


def _polled_by_gloo(facts: Path) -> list[int]:
    """Return what an epoll instance watches if it is gloo's, which lacks the flag that Python's have; else nothing."""
    try:
        text = facts.read_text()
    except OSError:
        return []
    flags = re.search(r"flags:\s*(\d+)", text)
    is_python = flags is None or int(flags[1], 8) & os.O_CLOEXEC
    return [] if is_python else [int(number) for number in re.findall(r"tfd:\s*(\d+)", text)]
