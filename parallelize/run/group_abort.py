"""Abort of process groups, so that neither a collective nor the end of a group waits for a rank.

torch aborts NCCL's communicators only. A gloo collective waits until its timeout, or until a
connection closes, and destroying its group waits for it: its connections are shut down here, which
gloo reports as "Connection closed".
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

from parallelize.run.surroundings import surroundings

_ABORT_TIMEOUT_S = 10.0

_log = logging.getLogger("parallelize")


def mark_as_interrupted() -> None:
    """Let this process work alone from here on: Ctrl-C has interrupted each rank somewhere else."""
    surroundings().script.interrupted.set()


def is_interrupted() -> bool:
    """Return whether Ctrl-C has interrupted the ranks.

    This library then makes no collectives and comparisons any more: other ranks would not answer.
    """
    return surroundings().script.interrupted.is_set()


def interrupt_collectives(*, store: int | Path | None = None) -> None:
    """Make the collectives and store requests in which other threads wait raise an error.

    It returns at once. The groups keep their ranks and names. Use this only in a process that is
    about to end.

    Args:
        store: port of the TCPStore, or this rank's link to the FileStore, whose requests fail;
            None: none does.
    """
    if isinstance(store, Path):
        _cut_off(store)
        _shut_down_connections(store_port=None)
    else:
        _shut_down_connections(store_port=store)
    groups: Any = list(dist.distributed_c10d._world.pg_names)
    # At the same time, because the abort of one communicator may wait for that of another.
    for group in groups:
        threading.Thread(target=group.abort, name="parallelize-abort", daemon=True).start()


def abort_and_destroy() -> None:
    """Abort and remove all process groups of this process, without waiting for other ranks."""
    if dist.get_world_size() > 1:
        _shut_down_connections(store_port=None)
    # The abort of NCCL may hang, so that it has a thread which this process can leave behind.
    abort_all = dist.distributed_c10d._abort_process_group
    abort = threading.Thread(target=abort_all, name="parallelize-abort", daemon=True)
    abort.start()
    abort.join(_ABORT_TIMEOUT_S)
    if abort.is_alive():
        _log.error("the process groups could not be aborted within %g s", _ABORT_TIMEOUT_S)


def _cut_off(link: Path) -> None:
    """Make the requests to a FileStore fail whose path is this link.

    FileStore opens its file for each request, and each time it looks whether a key has come
    (FileStore.cpp). It waits for a file that does not exist; a link that leads to itself cannot be
    opened (ELOOP), which is an error at once.
    """
    loop = link.with_name(f"{link.name}.lost")
    # The folder may be removed, or this may have been done before.
    with contextlib.suppress(OSError):
        loop.symlink_to(link.name)
        loop.replace(link)


def _shut_down_connections(*, store_port: int | None) -> None:
    """Shut down gloo's connections and those to a store; on systems without /proc, none.

    Args:
        store_port: port of the store; None: its connections stay.
    """
    fact_files = list(Path("/proc/self/fdinfo").glob("*"))
    numbers_of_gloo: set[int] = set()
    for fact_file in fact_files:
        numbers_of_gloo.update(_polled_by_gloo(fact_file))
    numbers = [int(fact_file.name) for fact_file in fact_files]
    for number in filter(_is_socket, numbers):
        # Another thread may close it, and a connection may be closed already.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            # Shutting down gloo's listening socket would abort the process in gloo's thread.
            is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if connection.family == socket.AF_UNIX or is_listening:
                continue
            if number in numbers_of_gloo or connection.getpeername()[1] == store_port:
                connection.shutdown(socket.SHUT_RDWR)


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # Another thread has closed it.
        return False


def _polled_by_gloo(fact_file: Path) -> list[int]:
    """Return the descriptors that an epoll instance watches if it is gloo's; else none.

    gloo opens its instance without the flag O_CLOEXEC, which that of Python's `selectors` has.
    """
    try:
        text = fact_file.read_text()
    except OSError:
        return []
    flags = re.search(r"flags:\s*(\d+)", text)
    if flags is None or int(flags[1], 8) & os.O_CLOEXEC:
        return []
    return [int(number) for number in re.findall(r"tfd:\s*(\d+)", text)]
