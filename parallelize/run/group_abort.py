"""Abort of process groups, so that neither a collective nor the end of a group waits for a rank.

torch aborts NCCL's communicators only. A gloo collective waits until its timeout, or until a
connection closes, and destroying its group waits for the collective. This file shuts down gloo's
connections, so that the collective raises "Connection closed".
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
    """Note that Ctrl-C has interrupted the ranks; the handler of signals calls this.

    It has interrupted each rank at another line, so that this process works alone from here on.
    """
    surroundings().script.interrupted.set()


def is_interrupted() -> bool:
    """Return whether Ctrl-C has interrupted the ranks.

    Ask this before a collective or a comparison at the end of a block: if it is true, the other
    ranks would not answer.
    """
    return surroundings().script.interrupted.is_set()


def interrupt_collectives(*, store: int | Path | None = None) -> None:
    """Make the collectives and store requests in which other threads wait raise an error.

    A thread calls this after a signal, when the main thread does not come to handle the signal. It
    returns at once. The groups keep their ranks and names, but are of no more use: the process must
    be about to end.

    Args:
        store: port of the TCPStore, or this rank's link to the FileStore, whose requests are to
            fail; None: requests to the store go on.
    """
    if isinstance(store, Path):
        _cut_off(store)
        _shut_down_connections(store_port=None)
    else:
        _shut_down_connections(store_port=store)
    groups: Any = list(dist.distributed_c10d._world.pg_names)
    # All at the same time: the abort of one communicator may wait for the abort of another.
    for group in groups:
        threading.Thread(target=group.abort, name="parallelize-abort", daemon=True).start()


def abort_and_destroy() -> None:
    """Abort and remove all process groups of this process, without waiting for other ranks.

    This is the end of a run that ends by an error.
    """
    if dist.get_world_size() > 1:
        _shut_down_connections(store_port=None)
    # NCCL's abort may hang. This process does not wait for a daemon thread when it ends.
    abort_all = dist.distributed_c10d._abort_process_group
    abort = threading.Thread(target=abort_all, name="parallelize-abort", daemon=True)
    abort.start()
    abort.join(_ABORT_TIMEOUT_S)
    if abort.is_alive():
        _log.error("the process groups could not be aborted within %g s", _ABORT_TIMEOUT_S)


def _cut_off(link: Path) -> None:
    """Make all requests to the FileStore that is opened by this link fail.

    The link is replaced by one that leads to itself, which cannot be opened (ELOOP). FileStore
    opens its file for each request, and again whenever it looks whether a key has come
    (FileStore.cpp). Without any link, FileStore would wait until the file exists.
    """
    link_to_itself = link.with_name(f"{link.name}.lost")
    # The folder may be removed already.
    with contextlib.suppress(OSError):
        link_to_itself.symlink_to(link.name)
        link_to_itself.replace(link)


def _shut_down_connections(*, store_port: int | None) -> None:
    """Shut down gloo's connections, and those to the store; on a system without /proc, do nothing.

    Args:
        store_port: port of the store; None: the connections to the store stay.
    """
    # Linux has a file of facts for each descriptor of this process; its name is the descriptor.
    fact_files = list(Path("/proc/self/fdinfo").glob("*"))
    descriptors_of_gloo: set[int] = set()
    for fact_file in fact_files:
        descriptors_of_gloo.update(_polled_by_gloo(fact_file))
    descriptors = [int(fact_file.name) for fact_file in fact_files]
    for descriptor in filter(_is_socket, descriptors):
        # Another thread may close the descriptor, and the connection may be closed already. The
        # end of `with` closes a duplicate, and leaves gloo its descriptor.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            # Shutting down gloo's listening socket would abort the process in gloo's thread.
            is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            # A socket of AF_UNIX is neither gloo's nor the store's, and its peer has no port.
            if connection.family == socket.AF_UNIX or is_listening:
                continue
            if descriptor in descriptors_of_gloo or connection.getpeername()[1] == store_port:
                connection.shutdown(socket.SHUT_RDWR)


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        # Another thread has closed the descriptor.
        return False


def _polled_by_gloo(fact_file: Path) -> list[int]:
    """Return the descriptors whose events gloo waits for, if the file is of gloo's epoll instance.

    The file of an epoll instance lists such descriptors, as "tfd". gloo opens its instance without
    the flag O_CLOEXEC, which the instances of Python's `selectors` have.

    Args:
        fact_file: the facts of any descriptor of this process.

    Returns:
        The descriptors; empty: the file is of something else.
    """
    try:
        text = fact_file.read_text()
    except OSError:
        return []
    flags = re.search(r"flags:\s*(\d+)", text)
    if flags is None or int(flags[1], 8) & os.O_CLOEXEC:
        return []
    return [int(descriptor) for descriptor in re.findall(r"tfd:\s*(\d+)", text)]
