"""torch elastic's agent, taught what a function call needs: prompt ends, whole process trees, silent deaths.

caller ── Agent.run ──> rendezvous ──> fork server ──> worker (own process group) ──> its children
│  every 20 ms: has any worker ended?
└─ one failed: SIGTERM to the others, SIGKILL to what is left of each group, FAILED (or a restart)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Protocol

import torch.distributed.elastic.multiprocessing.api as torch_api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["MONITOR_INTERVAL_S", "Agent", "Death", "Peers"]

MONITOR_INTERVAL_S = 0.02
STOP_GRACE_S = 3.0  # what `finally` blocks of the other workers get after a failure
_STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)

_PRELOAD = ["parallelize.launchers.elastic.preload"]
_starting = threading.Lock()


@dataclass(frozen=True)
class Death:
    """A worker that ended by itself before all were done.

    Args:
        rank: its global rank.
        host: its host's name.
        pid: its process.
        exitcode: as in multiprocessing: negative is minus the signal's number.
        seen_at: when the agent noticed, seconds since the epoch.
    """

    rank: int
    host: str
    pid: int
    exitcode: int
    seen_at: float


class Peers(Protocol):
    """The other nodes of a run, as the agent of one needs them; `Alone` where there are none."""

    def has_failed(self, attempt: int) -> bool:
        """Whether a worker of another node has ended early in this attempt, or a node is gone."""

    def all_done(self, attempt: int) -> bool:
        """Whether the workers of every node have returned, those of this one having done so."""

    def report(self, attempt: int, deaths: Sequence[Death]) -> None:
        """The workers of this node have been stopped, after a failure here (`deaths`) or on another node."""


class Agent(LocalElasticAgent):
    """Runs the workers of one node.

    Args:
        spec: role, processes, entry point, rendezvous.
        logs_specs: where their output goes.
        start_method: "forkserver", or "spawn" where there is none.
        after_start: called with the number of the attempt when its workers have been started.
        peers: the other nodes.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        start_method: str,
        after_start: Callable[[int], None],
        peers: Peers,
    ) -> None:
        super().__init__(spec, logs_specs, start_method=start_method)
        self._after_start = after_start
        self._peers = peers
        self._returned: RunResult | None = None

    def run(self, *args: Any, **kwargs: Any) -> RunResult:
        """As torch elastic's, and neither a store nor files are kept: its thread ends with the run.

        This object is one that only the garbage collector frees: until then every rank of every call would keep four
        files open. And in a process forked by then (a DataLoader's worker), where that thread never was, freeing the
        store ends in a crash.
        """
        try:
            result: RunResult = super().run(*args, **kwargs)
            return result
        finally:
            self._store = self._worker_group.store = None
            self._close_files()

    @property
    def attempt(self) -> int:
        """How often the group has been restarted."""
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._returned = None
        self._close_files()  # of the attempt before
        with _undisturbed():
            with _starting, _hidden_main(), _spared():
                if self._start_method == "forkserver":
                    multiprocessing.set_forkserver_preload(_PRELOAD)
                    _ensure_own_server()
                started: dict[int, Any] = super()._start_workers(worker_group)
            self._after_start(self.attempt)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        deaths = self._find_deaths(worker_group)
        if deaths or self._peers.has_failed(self.attempt):
            self._ask_to_end(STOP_GRACE_S)
            # Once more: the connections of a worker that was killed close well before it is seen to be gone.
            known = {death.rank for death in deaths}
            late = [each for each in self._find_deaths(worker_group) if each.exitcode not in _STOPPED]
            deaths += [each for each in late if each.rank not in known]
            self._end()
            self._peers.report(self.attempt, deaths)
            return RunResult(state=WorkerState.FAILED, failures=self._as_failures(worker_group, deaths))
        if self._returned is None and all(map(self._has_returned, range(len(self._processes())))):
            # Not asked before: when a worker dies under its eyes, it waits 30 s for the others and logs at length.
            self._returned = super()._monitor_workers(worker_group)
        if self._returned is not None and self._peers.all_done(self.attempt):
            return self._returned
        return RunResult(state=WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        """Nothing to wait for: a call has succeeded when the workers of all nodes have returned."""

    def _find_deaths(self, worker_group: WorkerGroup) -> list[Death]:
        """Workers that ended without the value that torch elastic waits for: it would wait for ever."""
        ended = [(local, each) for local, each in enumerate(self._processes()) if each.exitcode is not None]
        host = socket.gethostname()
        return [
            Death(worker_group.workers[local].global_rank, host, each.pid or 0, each.exitcode or 0, time.time())
            for local, each in ended
            if each.exitcode != 0 or not self._has_returned(local)
        ]

    def _has_returned(self, local_rank: int) -> bool:
        context: Any = self._pcontext
        return local_rank in context._return_values or not context._ret_vals[local_rank].empty()

    def _as_failures(self, worker_group: WorkerGroup, deaths: Sequence[Death]) -> dict[int, ProcessFailure]:
        ranks = [(worker.global_rank, local) for local, worker in enumerate(worker_group.workers)]
        exits = {death.rank: death.exitcode for death in deaths}
        processes = self._processes()
        return {
            rank: ProcessFailure(local, processes[local].pid or 0, exits.get(rank, -signal.SIGTERM), error_file="")
            for rank, local in ranks
        }

    def _processes(self) -> list[BaseProcess]:
        context: Any = getattr(self._pcontext, "_pc", None)
        return [] if context is None else list(context.processes)

    def _close_files(self) -> None:
        """Close the pipes to workers that have ended, and those of their values."""
        context: Any = self._pcontext
        for queue in getattr(context, "_ret_vals", {}).values():
            queue.close()
        for process in self._processes():
            if process.exitcode is not None:
                process.close()
        self._pcontext = None

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:  # torch 2.11 has no timeout
        self._ask_to_end(STOP_GRACE_S)
        self._end()
        super()._shutdown(*args, **kwargs)

    def _ask_to_end(self, grace_s: float) -> None:
        """SIGTERM to every worker, and time for its `finally` blocks."""
        processes = self._processes()
        for process in processes:
            _signal(process.pid, signal.SIGTERM, of_group=False)
        end = time.monotonic() + grace_s
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))

    def _end(self) -> None:
        """SIGKILL for every worker that is left, and for all that any of them started."""
        for process in self._processes():
            _signal(process.pid, signal.SIGKILL, of_group=True)
            process.join()


def _ensure_own_server() -> None:
    """Forget a fork server that is not this process's, but that of the process it was forked by."""
    server: Any = forkserver._forkserver
    try:
        server.ensure_running()
    except ChildProcessError:
        os.close(server._forkserver_alive_fd)
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def _signal(pid: int | None, number: signal.Signals, *, of_group: bool) -> None:
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not of_group:
            os.kill(pid, number)
            return
        # A worker leads a group of its own; before it got that far it is in the fork server's, which must live.
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) != pid:
                os.kill(pid, number)
        os.killpg(pid, number)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep back a signal that comes while processes start: broken off in the middle, a start leaves them to nobody.

    torch elastic takes signals over at each start, with a handler that raises. The block ends when ours are in force
    again, and they get what came.
    """
    came: list[int] = []

    def keep(signum: int, frame: FrameType | None) -> None:
        del frame
        came.append(signum)

    original = torch_api._terminate_process_handler
    torch_api._terminate_process_handler = keep
    try:
        yield
    finally:
        torch_api._terminate_process_handler = original
    for number in came:
        signal.raise_signal(number)


@contextlib.contextmanager
def _spared() -> Iterator[None]:
    """Start processes that no signal to their whole group ends: they are not yet in one of their own.

    A terminal sends Ctrl-C to all of the caller's, and some clusters send a job's warning, USR1 or USR2, to every
    process of it. What is blocked here is blocked in the fork server too; it and a worker unblock what they can bear.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    try:
        resource_tracker.ensure_running()  # it ignores SIGINT, and its start ends with SIGINT unblocked in this thread
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Let no worker import the caller's __main__ again: a script without a guard would run once per rank.

    multiprocessing tells a child where __main__ came from, and the child executes it; what a worker needs of it comes
    with the task.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in hidden:
        del main.__file__
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)
        multiprocessing.set_start_method(chosen, force=True)  # which multiprocessing settles when it starts a child
