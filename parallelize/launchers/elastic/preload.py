"""Imports that the fork server makes once, before it forks the first worker, so that no worker pays for them.

First torch, then the modules that the caller has imported. A forked process lacks the threads, connections and GPUs of
its parent: if an import of the caller's modules starts one of them, the fork server starts again without these modules.
(Threads of BLAS and OpenMP do no harm: they are started again in a forked process by the libraries' own handlers.)

The fork server is started with SIGINT blocked, so that Ctrl-C does not interrupt these imports. This module unblocks it
at the end: the fork server ignores SIGINT. In the processes that it starts, SIGINT is blocked until they know what they
run: a worker unblocks it once it has its own process group, a process that the caller starts itself does so at once.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import multiprocessing.util
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = []

_REQUEST = "--parallelize-preload="  # as in server_imports, which imports torch
_TORCH = (
    "torch._dynamo",  # DistributedDataParallel imports it, which takes a second per rank
    "torch.distributed.fsdp",
    "torch.distributed.elastic.multiprocessing",  # every worker starts in a function of torch's module
    "torch.utils.serialization",  # torch.load imports it
    "parallelize.worker.main",
)
_OPEN_FILES = Path("/proc/self/fd")
_FORKABLE = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/shm/")  # noqa: S108 - a path to compare with


def _preload(request: dict[str, Any]) -> None:
    """Import torch and the requested modules, with the requested environment variables."""
    before = os.environ.copy()
    os.environ.update(request["environ"])
    for name in _TORCH:
        import_module(name)
    _write_through()
    threads, files = threading.active_count(), _unforkable_files()  # sitecustomize or a debugger may start threads
    modules, generators = set(sys.modules), _generators()
    with _without_console_handlers():
        _import_silently(request["modules"])
    safe = [name for name in request["modules"] if name.partition(".")[0] == "parallelize"]
    if safe != request["modules"] and (
        threading.active_count() > threads
        or _unforkable_files() - files
        or _generators() - generators
        or _user_modules(modules)
    ):
        _start_again({"environ": request["environ"], "modules": safe})
    os.environ.clear()
    os.environ.update(before)
    gc.collect()
    gc.freeze()  # so that collections in workers do not copy the pages of these modules


def _import_silently(modules: Sequence[str]) -> None:
    """Import modules whose output and errors the caller's own import has shown, or a worker's will show."""
    with _silenced():
        for name in modules:
            with contextlib.suppress(BaseException):
                import_module(name)


def _write_through() -> None:
    """Replace sys.stdout and sys.stderr, which imported modules may keep, by ones that lose no text in a worker."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "wb", closefd=False), "utf-8", "backslashreplace", write_through=True)
        for number in (1, 2)
    )


@contextlib.contextmanager
def _without_console_handlers() -> Iterator[None]:
    """Remove the root logger's handlers that a module adds, as by basicConfig: workers get those of the caller."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = [
        each
        for each in root.handlers
        if each in handlers or getattr(each, "stream", None) not in (sys.stdout, sys.stderr)
    ]
    root.setLevel(level)


def _generators() -> set[int]:
    """Return the ids of the modules' own random generators: every rank of every call would draw the same numbers."""
    numpy: Any = sys.modules.get("numpy")
    kinds = (random.Random, *(() if numpy is None else (numpy.random.Generator, numpy.random.RandomState)))
    namespace = import_module("parallelize.call.reachable").namespace
    values = (value for module in list(sys.modules.values()) for value in list(namespace(module).values()))
    return {id(each) for each in values if issubclass(type(each), kinds) and type(each) is not random.SystemRandom}


def _user_modules(known: AbstractSet[str]) -> bool:
    """Whether an installed module has imported one of the user's own, which may change between calls."""
    reachable = import_module("parallelize.call.reachable")
    new = {name: module for name, module in list(sys.modules.items()) if name not in known}
    return any(reachable.namespace(each).get("__file__") and reachable.is_user_code(name) for name, each in new.items())


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    streams = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, stream in zip((1, 2), streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        os.close(nowhere)


def _unforkable_files() -> set[str]:
    """Return what this process has open and must not share with forked ones: sockets, pipes, devices such as GPUs."""
    found = set()
    for each in _OPEN_FILES.iterdir() if _OPEN_FILES.exists() else ():
        with contextlib.suppress(OSError):
            found.add(str(each.readlink()))
    return {each for each in found if not each.startswith(_FORKABLE) and (":" in each or each.startswith("/dev/"))}


def _start_again(request: object) -> None:
    number, written = os.pipe()
    os.set_inheritable(number, True)  # noqa: FBT003 - set_inheritable takes no keyword
    with os.fdopen(written, "w") as file:
        json.dump(request, file)
    command = [*sys.orig_argv[:-1], f"{_REQUEST}{number}"]
    os.execv(sys.executable, command)  # noqa: S606 - the same program


def _block_sigint_in_children() -> None:
    """Block SIGINT in processes that this one forks, whose default handler would interrupt them half-started."""
    server, setup = os.getpid(), import_module("parallelize.worker.main").WorkerSetup

    def block() -> None:
        if os.getppid() == server:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def unblock(_: object) -> None:
        """Unblock it once the process has unpickled what it runs, unless that is a worker's function."""
        if os.getppid() == server and not setup.was_unpickled:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    os.register_at_fork(after_in_child=block)
    util: Any = multiprocessing.util
    util.register_after_fork(sys.modules[__name__], unblock)


if sys.argv[-1].startswith(_REQUEST):
    with os.fdopen(int(sys.argv[-1].removeprefix(_REQUEST))) as opened:
        _preload(json.load(opened))
_block_sigint_in_children()
import_module("parallelize.worker.shutdown").unblock_sigint()
