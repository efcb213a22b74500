"""The default launcher: starts a process per device by a fork server that has imported torch.

caller ── pickles the call ──> nodes meet ──> Workers ──> outcomes, or a failure: end all, then the error or a restart
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from parallelize.call.returned import restore
from parallelize.call.settings import LogSettings, Settings
from parallelize.call.task import Outcome, Task
from parallelize.cluster.devices import MASKS, compose_visible_devices
from parallelize.cluster.network import gloo_interface, resolvable_address
from parallelize.cluster.world import Node, World
from parallelize.config.layout import Layout
from parallelize.errors import ConfigError, LaunchError
from parallelize.launchers.failures import caller_exception
from parallelize.launchers.local.nodes import Nodes, OneNode, Report
from parallelize.launchers.local.output import OutputTail, RankFiles, RecordTail, forwarded, open_standard_streams
from parallelize.launchers.local.workers import STOP_GRACE_S, Workers
from parallelize.plugins.base import Launcher
from parallelize.runtime.startup_summary import announced
from parallelize.worker.main import WorkerSetup, task_path

__all__ = ["LocalLauncher", "worker_environ"]

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FOLDERS = "parallelize-call-"

_log = logging.getLogger("parallelize")


@dataclass(frozen=True, kw_only=True)
class LocalLauncher(Launcher):
    """Starts one process per device (or the requested number) and waits for them.

    With several nodes the same script runs on each, and each starts its own processes.

    Args:
        start_method: "forkserver", or "spawn" for processes in which nothing was imported before; None: "forkserver".
            The fork server imports torch once, and what the caller has imported of NumPy, SciPy, scikit-learn, pandas,
            transformers, torchvision, ...; with PARALLELIZE_PRELOAD=0 only torch.
        heartbeat_timeout: seconds after which a node without a heartbeat is lost, and the call fails on all nodes; a
            process that is stopped for less, as by the migration of its virtual machine, continues.
    """

    name = "local"
    start_method: str | None = None
    heartbeat_timeout: float = 60.0

    def __post_init__(self) -> None:
        if not self.heartbeat_timeout > 0:
            raise ConfigError(
                f"heartbeat_timeout={self.heartbeat_timeout!r}",
                why="every node would be lost at once",
                fix="use a positive number of seconds",
            )

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Run the task in every process of its layout.

        Args:
            task: the call.
            node: with several nodes, the address of node 0 and this node's rank.
            environ: the caller's variables, passed on to the workers.

        Returns:
            The outcomes in rank order, on every node: of all ranks or of rank 0 only, as `task.all_ranks` specifies.

        Raises:
            BaseException: the exception of the first rank to fail, with rank, host and traceback as notes.
            WorkerError: a worker ended without an exception.
            LaunchError: a node did not join, or is lost.
        """
        open_standard_streams()
        # The folder is removed before a stop signal is delivered to the caller's handler, which may end this process.
        with _StopSignals().handled() as signals, _run_folder() as folder:
            task.write(task_path(folder))
            with contextlib.closing(self._nodes(task, node, environ)) as nodes:
                interface = None if node is None else gloo_interface(nodes.address)
                setup = WorkerSetup(
                    folder=str(folder),
                    environ=worker_environ(environ, task.layout, cores=_available_cores(), interface=interface),
                    devices=tuple(driven[0] for driven in task.layout.renumbered().devices),
                    start_method=multiprocessing.get_start_method(allow_none=True) or "fork",  # which keeps __main__
                    logs=LogSettings.capture(),
                    settings=Settings.capture(),
                )
                outcomes = _Run(self, setup, task, nodes).outcomes(signals)
            if signals.is_interrupted:  # the KeyboardInterrupt goes on, and what was trained comes back
                restore(task.stateful, outcomes[0].states)
            return outcomes

    def _nodes(self, task: Task, node: Node | None, environ: Mapping[str, str]) -> OneNode:
        if task.layout.num_nodes == 1:
            return OneNode(task)
        if node is None:
            raise ConfigError(
                f"num_nodes={task.layout.num_nodes} without MASTER_ADDR and MASTER_PORT",
                why="the same script runs on every node, and the nodes connect to node 0 at this address",
                fix="on every node: MASTER_ADDR=<address of node 0> MASTER_PORT=29400 NODE_RANK=<0, 1, ...> python ...",
            )
        node = replace(node, master_addr=resolvable_address(node.master_addr))
        return Nodes(node, task, patience_s=self.heartbeat_timeout, key=environ.get("PARALLELIZE_KEY", ""))


class _Run:
    """One call on this node: its attempts, their output and their errors."""

    def __init__(self, launcher: LocalLauncher, setup: WorkerSetup, task: Task, nodes: OneNode) -> None:
        self._setup, self._task, self._layout, self._nodes = setup, task, task.layout, nodes
        self._start_method = launcher.start_method or "forkserver"
        self._tails: list[OutputTail] = []
        self._earlier: list[BaseException] = []

    def outcomes(self, signals: _StopSignals) -> list[Outcome]:
        """Run the workers, again after failures; return the outcomes that the call returns."""
        attempt, port, config = 0, self._nodes.start(0), self._layout.config
        is_temporary = config.logs in ("rank0", "all")
        folder = Path(self._setup.folder, "logs") if is_temporary else Path(config.logs, self._nodes.stamp)
        self._files = RankFiles(folder, keeps_all=not is_temporary)
        with forwarded(self._tails, self._files):
            while True:
                workers = self._start(attempt, port)
                try:
                    reports = self._finish(workers, signals)
                finally:
                    workers.end(0.0 if signals.is_interrupted else STOP_GRACE_S)
                have_returned = all(each.has_returned for each in reports)
                have_reported = len(reports) == self._layout.num_nodes  # a node may leave after its report
                sources = {rank: source for report in reports for rank, source in report.outcomes.items()}
                wanted = (rank for rank in sources if rank == 0 or self._task.all_ranks or not have_returned)
                outcomes = [Outcome.read(sources[rank]) for rank in sorted(wanted)]
                exits = [each for report in reports for each in report.exits]
                if have_returned and have_reported:
                    return outcomes
                size, has_failed = self._layout.world_size, exits or any(each.error for each in outcomes)
                error = (
                    caller_exception(outcomes, exits, world_size=size, earlier=self._earlier) if has_failed else None
                )
                if error is None or not have_reported:
                    raise self._nodes.lost_error() from error
                if attempt == config.max_restarts:
                    raise error
                attempt += 1
                self._earlier.append(error)
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                _log.warning("restart %d of %d after %s", attempt, config.max_restarts, text)
                port = self._nodes.start(attempt)

    def _start(self, attempt: int, port: int) -> Workers:
        """Start the workers of an attempt, and show their output."""
        layout, node_rank = self._layout, self._nodes.node_rank
        size = layout.local_world_size
        worlds = [
            World(
                rank=node_rank * size + local_rank,
                local_rank=local_rank,
                node_rank=node_rank,
                world_size=layout.world_size,
                local_world_size=size,
                master_addr=self._nodes.address,
                master_port=port,
                has_store=True,
            )
            for local_rank in range(size)
        ]
        shows_all = layout.config.logs == "all"
        for rank in (each.rank for each in worlds if each.is_main or shows_all):
            for stream, to in (("out", sys.stdout), ("err", sys.stderr)):
                path, prefix = self._files.path(rank, attempt, stream), f"[rank {rank}] " if shows_all else ""
                self._tails.append(OutputTail(path, to, prefix))
        for rank in (each.rank for each in worlds):
            at_least = logging.NOTSET if rank == 0 or shows_all else logging.WARNING
            self._tails.append(RecordTail(self._files.path(rank, attempt, "log"), None, f"[rank {rank}] ", at_least))
        what = f"starting {size} processes of {self._task.name}, which import torch and what this program has imported"
        with announced(what):
            return Workers(self._setup, worlds, attempt, self._files, start_method=self._start_method)

    def _finish(self, workers: Workers, signals: _StopSignals) -> list[Report]:
        """Wait for the end of the workers on all nodes; return how they have ended."""
        with signals.interrupting(workers.interrupt):
            has_returned = workers.watch(self._nodes.is_stopped)
        exits = []
        if not has_returned:
            self._nodes.stop()
            exits = workers.stop()
            signals.raise_if_interrupted()
        found = workers.outcomes()
        wanted = {rank: path for rank, path in found.items() if rank == 0 or self._task.all_ranks or not has_returned}
        return self._nodes.exchange(Report(has_returned, wanted, exits))


class _StopRequested(BaseException):
    """Raised by our handler in the caller, which then ends the workers."""


class _StopSignals:
    """Handles SIGTERM, Ctrl-C etc. while workers run: the workers are ended first, then the caller's handler runs.

    Python allows signal handlers in the main thread only: in another thread this class does nothing.

    Attributes:
        is_interrupted: whether Ctrl-C has interrupted the workers.
    """

    def __init__(self) -> None:
        self.is_interrupted = False
        self._interrupt: Callable[[], None] | None = None
        self._callers_handlers: dict[int, Any] = {}
        self._stopped_by: int | None = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[_StopSignals]:
        """Install our handlers for the block; then restore the caller's handlers and deliver a signal that arrived.

        Raises:
            LaunchError: a stop signal arrived, and the caller's handler returned instead of raising.
        """
        if threading.current_thread() is threading.main_thread():
            self._callers_handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
            for number, handler in self._callers_handlers.items():
                signal.signal(number, handler if handler == signal.SIG_IGN else self._stop)  # SIG_IGN: by nohup
        try:
            yield self
        except BaseException:
            if self._stopped_by is None:
                raise
        finally:
            for number, handler in self._callers_handlers.items():
                signal.signal(number, handler)
        if self._stopped_by is not None:
            self._deliver(self._stopped_by)

    @contextlib.contextmanager
    def interrupting(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Let the first Ctrl-C in the block interrupt the workers, which may then return; the next one ends them."""
        self._interrupt = interrupt
        try:
            yield
        finally:
            self._interrupt = None

    def raise_if_interrupted(self) -> None:
        """Raise for Ctrl-C, after which the function has not returned."""
        if self.is_interrupted:
            raise _StopRequested

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._stopped_by = number
        if number == signal.SIGINT and self._interrupt is not None and not self.is_interrupted:
            self.is_interrupted = True
            self._interrupt()
            return
        for each in self._callers_handlers:
            signal.signal(each, signal.SIG_IGN)  # ignore further signals while the workers are ended
        raise _StopRequested

    def _deliver(self, number: int) -> None:
        try:
            signal.raise_signal(number)
        except BaseException as raised:
            raised.__suppress_context__ = True  # our frames
            raise
        raise LaunchError(
            f"stopped by {signal.Signals(number).name}",
            why="this process's own handler of the signal returned, after the workers had been stopped",
            fix="raise an exception in that handler to end the program, or call the function again",
        )


@contextlib.contextmanager
def _run_folder() -> Iterator[Path]:
    """Make a folder for the call, which it locks; remove those whose callers are gone."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with contextlib.suppress(OSError):  # another user's
            if _is_left(left):
                shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDERS))  # with mode 0700
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Whether the call of a folder is gone: nobody holds its lock, which is taken when the folder is made."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - folder.stat().st_mtime > 60
    finally:
        os.close(lock)


def worker_environ(
    environ: Mapping[str, str], layout: Layout, *, cores: int, interface: str | None = None
) -> dict[str, str]:
    """Return the environment variables for all workers of this node; rank variables are not included.

    Args:
        environ: the caller's variables; only CUDA_VISIBLE_DEVICES is overwritten.
        layout: the processes of the node.
        cores: processor cores that this node's processes may use.
        interface: network interface to the other nodes; None: gloo chooses one.
    """
    changed = dict(environ)
    mask = MASKS.get(layout.device_type)
    if mask is not None:
        changed[mask] = compose_visible_devices(environ.get(mask), layout.indices)
    changed["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS") or str(max(1, cores // layout.local_world_size))
    if sys.stderr is not None and sys.stderr.isatty():  # for progress bars
        changed.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    if interface is not None:
        changed.setdefault("GLOO_SOCKET_IFNAME", interface)
    return changed


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
