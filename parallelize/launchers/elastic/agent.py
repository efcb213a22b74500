"""torch elastic's agent, which starts, monitors and stops the workers of one node.

caller ── Agent.run ──> rendezvous ──> fork server ──> worker (own process group) ──> its children
│  until a worker has exited or all have returned, here and on the other nodes
└─ one failed: SIGTERM to the other workers, SIGKILL to every process group, then FAILED or a restart

What it overrides, and why:
    _start_workers     signals are deferred: an interrupted start would leave orphans; the workers of a past attempt are
                       released; a fork server that imports modules once
    _monitor_workers   torch elastic looks every 0.1 s, waits forever for a worker that exits with code 0 before its
                       function returns, for 30 s for the others if one is killed, and knows nothing of other nodes
    _exit_barrier      the control plane has waited for the other nodes
    _shutdown          SIGTERM leaves time for `finally` blocks; SIGKILL goes to workers' child processes, too, and a
                       process that it cannot end is not waited for
    run                files and the store are released before it returns
    Rendezvous         a store of its own for each attempt, without a delay (rendezvous.py)
    RankFiles          files by rank, which are known before the workers start (worker_output.py)
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch.distributed.elastic.multiprocessing.api as torch_api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from parallelize.errors import LaunchError
from parallelize.launchers.elastic.control_plane import SingleNode
from parallelize.launchers.elastic.failures import WorkerExit
from parallelize.launchers.elastic.fork_server import starting_processes
from parallelize.launchers.elastic.signals import StopSignals
from parallelize.launchers.elastic.worker_output import RankFiles
from parallelize.runtime.startup_summary import announced
from parallelize.torch_patches.private import self_test

__all__ = ["STOP_GRACE_S", "Agent"]

_ASK_NODES_EVERY_S = 0.02
STOP_GRACE_S = 3.0  # between SIGTERM and SIGKILL: time for the `finally` blocks of the other workers
_KILL_TIMEOUT_S = 15.0  # a driver takes seconds to free the memory of a process
_SIGTERM_EXIT_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM)

_log = logging.getLogger("parallelize")


@self_test("the elastic launcher", instead="start the script by torchrun or srun")
def _require_overridable_agent() -> bool:
    """Torch elastic calls the methods that `Agent` overrides, and the handler that is replaced while workers start."""
    functions = [
        inspect.unwrap(each)
        for kind in (LocalElasticAgent, *LocalElasticAgent.__bases__, torch_api.PContext)
        for each in vars(kind).values()
        if inspect.isfunction(each)
    ]
    called = {name for each in functions for name in each.__code__.co_names}
    names = ("_start_workers", "_monitor_workers", "_exit_barrier", "_shutdown", "_terminate_process_handler")
    return called.issuperset(names)


class Agent(LocalElasticAgent):
    """Runs the workers of one node.

    Args:
        spec: torch elastic's description of the workers: role, number, entry point, rendezvous.
        files: files for the workers' stdout and stderr.
        environ: the workers' variables.
        start_method: "forkserver", or "spawn" on systems without it.
        signals: handlers of stop signals, installed again after each start.
        after_start: called with the attempt number after the workers of that attempt were started.
        control_plane: exchange with the other nodes.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        files: RankFiles,
        *,
        environ: Mapping[str, str],
        start_method: str,
        signals: StopSignals,
        after_start: Callable[[int], None],
        control_plane: SingleNode,
    ) -> None:
        _require_overridable_agent()
        super().__init__(spec, files, start_method=start_method)
        self._uses_fork_server = start_method == "forkserver"
        self._signals, self._after_start = signals, after_start
        self._environ, self._files, self._control_plane = environ, files, control_plane
        self._success: RunResult | None = None

    def run(self, *args: Any, **kwargs: Any) -> RunResult:
        """Run the workers until they end; before returning, release the store, its thread and all files.

        The agent is in a reference cycle: without the release, each call would keep four files per rank open until the
        garbage collector runs. A process forked before that (a DataLoader worker) would lack the store's thread and
        crash when freeing the store.
        """
        try:
            result: RunResult = super().run(*args, **kwargs)
            return result
        finally:
            self._store = self.get_worker_group().store = None
            self._close_files()

    @property
    def attempt(self) -> int:
        """Number of restarts so far."""
        return self.get_worker_group().spec.max_restarts - self._remaining_restarts

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._success = None
        self._close_files()  # of the previous attempt
        with (
            announced(
                f"starting {worker_group.spec.local_world_size} processes of {worker_group.spec.role}, "
                "which import torch and what this program has imported"
            ),
            starting_processes(self._environ, by_fork_server=self._uses_fork_server),
            _deferred_signals(self._signals),
        ):
            started: dict[int, Any] = super()._start_workers(worker_group)
            # Starting any process, in any thread, asks all that multiprocessing knows whether they have ended. Of two
            # threads that ask at once, only one gets the fork server's answer; the other reads exit code 255.
            multiprocessing.process._children.difference_update(self._processes())  # type: ignore[attr-defined]  # private
        self._after_start(self.attempt)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wait_for_a_worker()
        exits = self._find_early_exits(worker_group)
        has_failed = bool(exits) or self._control_plane.has_failed(self.attempt)
        if not has_failed and self._success is None and all(map(self._has_returned, range(len(self._processes())))):
            # Only after all have returned: if a worker died, torch elastic would wait 30 s for the other workers.
            result = super()._monitor_workers(worker_group)
            # A worker may have failed while it exited; torch elastic has stopped the others then.
            exits = [each for each in self._find_early_exits(worker_group) if each.rank in result.failures]
            has_failed = bool(exits)
            self._success = None if has_failed else result
        if has_failed:
            self._control_plane.fail(self.attempt)
            self._terminate_workers()
            # Look again: peers fail on the closed connections of a killed worker before its exit is visible here.
            late = [each for each in self._find_early_exits(worker_group) if each.exitcode not in _SIGTERM_EXIT_CODES]
            exits = list({each.rank: each for each in [*late, *exits]}.values())
            self._kill_worker_groups()
            self._control_plane.report(self.attempt, exits)
            return RunResult(state=WorkerState.FAILED)
        if self._success is not None and self._control_plane.all_done(self.attempt):
            return self._success
        return RunResult(state=WorkerState.HEALTHY)

    def _wait_for_a_worker(self) -> None:
        """Wait until a worker returns or exits, or until it is time to ask the other nodes again."""
        context: Any = self._pcontext
        running = [local for local in context._ret_vals if not self._has_returned(local)]
        watched = [(self._processes()[local].sentinel, context._ret_vals[local]._reader) for local in running]
        connection.wait([each for pair in watched for each in pair], _ASK_NODES_EVERY_S)

    def _exit_barrier(self) -> None:
        """Skip torch elastic's barrier: `control_plane.all_done` has already waited for the other nodes."""

    def _find_early_exits(self, worker_group: WorkerGroup) -> list[WorkerExit]:
        """Return the workers that exited without a return value, for which torch elastic would wait forever."""
        host, now, ranks = socket.gethostname(), time.time(), [each.global_rank for each in worker_group.workers]
        return [
            WorkerExit(
                rank := ranks[local],
                host,
                each.pid or 0,
                each.exitcode or 0,
                now,
                self._files.read_output(rank, self.attempt),
            )
            for local, each in enumerate(self._processes())
            if each.exitcode or (each.exitcode == 0 and not self._has_returned(local))
        ]

    def _has_returned(self, local_rank: int) -> bool:
        context: Any = self._pcontext
        return local_rank in context._return_values or not context._ret_vals[local_rank].empty()

    def _processes(self) -> list[BaseProcess]:
        context: Any = self._pcontext
        return list(context._pc.processes) if context and context._pc else []

    def _close_files(self) -> None:
        """Close the pipes and sentinels of exited workers, and the queues of their return values."""
        context: Any = self._pcontext
        for queue in getattr(context, "_ret_vals", {}).values():
            queue.close()
        for process in self._processes():
            if process.exitcode is not None:
                process.close()
        self._pcontext = None

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:  # torch 2.11 has no timeout
        self._terminate_workers()
        self._kill_worker_groups()
        self._abandon_living_workers()
        super()._shutdown(*args, **kwargs)

    def _terminate_workers(self) -> None:
        """Send SIGTERM to every worker and wait for their `finally` blocks."""
        for process in self._processes():
            _send_signal(process.pid, signal.SIGTERM, of_group=False)
        self._join_workers(STOP_GRACE_S)

    def _kill_worker_groups(self) -> None:
        """Send SIGKILL to the process group of every worker: the worker and its child processes."""
        for process in self._processes():
            _send_signal(process.pid, signal.SIGKILL, of_group=True)
        self._join_workers(_KILL_TIMEOUT_S)

    def _join_workers(self, timeout_s: float) -> None:
        """Wait until all workers have ended, at most this time."""
        end = time.monotonic() + timeout_s
        for process in self._processes():
            process.join(max(0.0, end - time.monotonic()))

    def _abandon_living_workers(self) -> None:
        """Give up waiting for workers that SIGKILL has not ended; neither torch elastic nor Python's exit waits then.

        The kernel ends a process only after its uninterruptible waits, as in the driver of a GPU that hangs.
        """
        context: Any = self._pcontext
        for process in self._processes():
            if process.exitcode is None:
                _log.error("worker %s does not end, %g s after SIGKILL: its GPU may hang", process.pid, _KILL_TIMEOUT_S)
                context._pc.processes.remove(process)


def _send_signal(pid: int | None, number: signal.Signals, *, of_group: bool) -> None:
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not of_group:
            os.kill(pid, number)
            return
        # A worker leads its own process group. Until setsid() it is in the fork server's, which must survive.
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) != pid:
                os.kill(pid, number)
        os.killpg(pid, number)


@contextlib.contextmanager
def _deferred_signals(signals: StopSignals) -> Iterator[None]:
    """Defer signals that arrive while processes start: an interrupted start would leave orphaned processes.

    At each start torch elastic installs a handler that raises an exception. When this block ends, our handlers are
    installed again, and receive the deferred signals.

    Raises:
        LaunchError: the fork server ended. A signal that a whole process group receives, as from `timeout`, ends it.
    """
    received: list[int] = []
    lost: LaunchError | None = None

    def defer(signum: int, frame: FrameType | None) -> None:
        del frame
        received.append(signum)

    original = torch_api._terminate_process_handler
    torch_api._terminate_process_handler = defer
    try:
        yield
    except (EOFError, ConnectionError) as exc:
        lost = LaunchError(
            "the fork server, which starts the worker processes, has ended",
            why=f"it was killed, or ran out of memory while it imported modules ({type(exc).__name__})",
            fix="see the kernel's log, or use ElasticLauncher(start_method='spawn')",
        )
    finally:
        torch_api._terminate_process_handler = original
        signals.install()
    for number in received:
        signal.raise_signal(number)
    if lost is not None:
        raise lost from None
