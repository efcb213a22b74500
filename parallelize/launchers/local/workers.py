"""The worker processes of a call on this node: started, watched and ended.

A worker has returned once its outcome is written: what ends its process after that is logged, and
loses nothing.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from multiprocessing.connection import wait
from pathlib import Path

from parallelize.call.outcome import Outcome
from parallelize.cluster.world import World
from parallelize.errors import LaunchError
from parallelize.hang_detection.stack_frames import call_site_in
from parallelize.launchers.failures import outcome_of_dead_worker
from parallelize.launchers.local.server_calls import ServerCall
from parallelize.launchers.local.server_messages import (
    EndWorkers,
    Reply,
    RunWorkers,
    SignalWorkers,
    StartWorkers,
    WorkerCall,
    WorkerRequest,
    WorkersEnded,
    WorkersRefused,
    WorkersReport,
)
from parallelize.launchers.output import rank_file, read_output
from parallelize.launchers.stop_signals import has_handler
from parallelize.run.startup_summary import announce
from parallelize.worker.leaving import LEAVE_GRACE_S
from parallelize.worker.main import run
from parallelize.worker.setup import WorkerSetup, outcome_paths

# How often this process looks at other nodes, at signals, and at the outcomes of workers that do
# not end.
_LOOK_EVERY_S = 0.05
# Between SIGTERM and SIGKILL: time for the `finally` blocks of the other workers.
STOP_GRACE_S = 3.0
# After Ctrl-C: time for what the function does with a KeyboardInterrupt, such as to save.
INTERRUPT_GRACE_S = 30.0
# After the last outcome.
_LEAVE_TIMEOUT_S = 2 * LEAVE_GRACE_S
# A driver takes seconds to free the memory of a process.
_KILL_TIMEOUT_S = 15.0
# When a line says what is waited for, while the fork server does not answer.
_ANNOUNCED_AFTER_S = 30.0
# PIDFD_SIGNAL_PROCESS_GROUP of <linux/pidfd.h>, since Linux 6.9.
_TO_GROUP = 4
_SIGTERM_EXIT_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM)

_log = logging.getLogger("parallelize")


class _State(Enum):
    """The life of the workers, as this process knows it.

    FORKING ─────────────┐
      │ the first report │
    RUNNING              │
      │                  │ `end` or `close`: EndWorkers
    ENDING <─────────────┘
      │ WorkersEnded
    OVER <── the fork server is lost, in any state
    """

    FORKING = auto()
    RUNNING = auto()
    ENDING = auto()
    OVER = auto()


@dataclass(eq=False)
class _Worker:
    """A forked worker.

    Args:
        pid: its number.
        rank: its rank.
        pidfd: by which it gets signals if the fork server is lost; None: this system has none.
        exitcode: as in multiprocessing; None: it has not ended, as far as the server has said.
    """

    pid: int
    rank: int
    pidfd: int | None
    exitcode: int | None = None


class Workers:
    """The workers of a call on this node.

    They wait until `start` gives them what they run, so that they are made while the caller pickles
    it.

    If the fork server is lost, that is the outcome of a rank that has not returned: it ends the
    call on all nodes, and counts as a failure for `max_restarts=`.

    Args:
        call: the call at the fork server.
        number: how many.
        folder: the call's folder, which the fork server removes if this process is killed.
    """

    def __init__(self, call: ServerCall, number: int, folder: Path) -> None:
        self._call = call
        self._folder = folder
        # Where the files of the workers' output are, and their ranks, once `start` is called.
        self._output = folder
        self._ranks: list[int] = []
        # In the order of the ranks; empty until the fork server has forked them.
        self._workers: list[_Worker] = []
        self._state = _State.FORKING
        # Why the fork server is lost, unless the workers were ending anyway.
        self._server_error: LaunchError | None = None
        # When workers that were interrupted are ended.
        self._give_up_at = float("inf")
        # Outcomes of workers that have ended without writing one.
        self._failures: list[Outcome] = []
        self._call.send(StartWorkers(number, str(folder)))

    def start(
        self, setup: WorkerSetup, worlds: Sequence[World], output: Path, timeout: timedelta
    ) -> None:
        """Give the workers what they run; wait until they are forked, or the server is lost.

        Args:
            setup: what each process is set up with; its folder gets their outcomes.
            worlds: rank and world size of each.
            output: folder for the files of the workers' output.
            timeout: when a fork server that does not answer is lost.

        Raises:
            LaunchError: the processes cannot be forked, or the current folder does not exist.
        """
        self._output = output
        self._ranks = [world.rank for world in worlds]
        try:
            current_folder = str(Path.cwd())
        except FileNotFoundError as exc:
            raise LaunchError(
                "the current folder does not exist",
                why="processes start in the folder of their caller",
                fix="change to one that does: os.chdir(...)",
            ) from exc
        requests = []
        for world in worlds:
            path = self._folder / f"setup.{world.rank}"
            streams = [str(rank_file(output, world.rank, stream)) for stream in ("out", "err")]
            path.write_bytes(pickle.dumps(WorkerCall(run, (setup, world, tuple(streams)))))
            requests.append(WorkerRequest(current_folder, str(path)))
        try:
            self._call.send(RunWorkers(requests))
            self._await_server(timeout.total_seconds())
        except BaseException:
            # Do not wait for a server that may still import.
            self.close()
            raise

    def _await_server(self, timeout_s: float) -> None:
        """Wait until the fork server has forked the workers, or is lost."""
        asked_at = time.monotonic()
        is_announced = False
        while self._state is _State.FORKING:
            self._receive(_LOOK_EVERY_S)
            waited_s = time.monotonic() - asked_at
            if waited_s > timeout_s and self._state is _State.FORKING:
                description = self._call.describe_server()
                self._call.kill_server()
                self._lose_server(
                    LaunchError(
                        "the fork server, which starts the worker processes, did not answer within "
                        f"timeout={timeout_s:g} s",
                        why=f"on {socket.gethostname()}: {description}; it was killed",
                        fix="increase timeout= if imports are slow; PARALLELIZE_PRELOAD=0 leaves "
                        "all but torch's to the workers, whose lines are shown if one hangs",
                    )
                )
            elif waited_s > _ANNOUNCED_AFTER_S and not is_announced:
                is_announced = True
                announce(
                    f"waiting for {self._call.describe_server()}, "
                    f"for {waited_s:.0f} s of timeout={timeout_s:g} s"
                )

    def close(self) -> None:
        """Leave the workers to the fork server, which ends those that live."""
        self._call.send(EndWorkers(0.0))
        if self._state is not _State.OVER:
            self._state = _State.ENDING
        for worker in self._workers:
            if worker.pidfd is not None:
                os.close(worker.pidfd)
                worker.pidfd = None

    def watch(self, is_stopped: Callable[[], bool]) -> bool:
        """Wait until all workers have returned (True), or one has failed, or others have (False).

        Args:
            is_stopped: whether another node has ended the call.
        """
        leave_by: float | None = None
        while True:
            self._receive(_LOOK_EVERY_S)
            self._failures = self._find_failures()
            if self._failures or is_stopped() or time.monotonic() > self._give_up_at:
                return False
            if not all(self._has_returned(rank) for rank in self._ranks):
                continue
            if leave_by is None:
                leave_by = time.monotonic() + _LEAVE_TIMEOUT_S
            have_left = self._state is _State.OVER or not self._living()
            if have_left or time.monotonic() > leave_by:
                self._report_ends()
                return True

    def interrupt(self) -> None:
        """Send SIGINT to the workers, which then have some time to return."""
        self._give_up_at = time.monotonic() + INTERRUPT_GRACE_S
        pids = [worker.pid for worker in self._living()]
        self._call.send(SignalWorkers(signal.SIGINT, pids))

    def pass_on(self, number: int) -> bool:
        """Send a signal to the workers that have a handler of it; return whether there are any.

        It would end the others.
        """
        pids = [worker.pid for worker in self._living() if has_handler(worker.pid, number)]
        if pids:
            self._call.send(SignalWorkers(number, pids))
        return bool(pids)

    def outcomes(self) -> dict[int, Path | Outcome]:
        """Return, by rank, the file of its outcome, or the outcome of one that ended without."""
        outcomes: dict[int, Path | Outcome] = {}
        for failure in self._failures:
            outcomes[failure.rank] = failure
        for rank in self._ranks:
            for path in outcome_paths(self._folder, rank):
                if path.exists():
                    outcomes[rank] = path
                    break
        return outcomes

    def stop(self) -> None:
        """End the workers after a failure."""
        self.end(STOP_GRACE_S)
        # Again, because peers fail on the closed connections of a killed worker before its exit is
        # visible here.
        self._failures = [*self._find_failures(_SIGTERM_EXIT_CODES), *self._failures]

    def end(self, grace_s: float = 0.0) -> None:
        """End all workers and what they have started, once.

        Args:
            grace_s: time for their `finally` blocks.
        """
        if self._state in (_State.ENDING, _State.OVER):
            return
        self._state = _State.ENDING
        give_up_at = time.monotonic() + grace_s + _KILL_TIMEOUT_S
        self._call.send(EndWorkers(grace_s))
        # The state changes while replies are received, which mypy does not see.
        while not self._is_over() and time.monotonic() < give_up_at:
            self._receive(_LOOK_EVERY_S)
        if not self._is_over():
            # As in the driver of a GPU that hangs.
            pids = ", ".join(str(worker.pid) for worker in self._living())
            _log.error(
                "worker %s does not end, %g s after SIGKILL: its GPU may hang",
                pids,
                _KILL_TIMEOUT_S,
            )

    def _is_over(self) -> bool:
        return self._state is _State.OVER

    def _receive(self, timeout_s: float) -> None:
        """Handle the replies of the fork server; wait for the first one until the timeout."""
        try:
            while not self._is_over():
                reply = self._call.receive(timeout_s)
                if reply is None:
                    return
                timeout_s = 0
                self._handle(reply)
        except (EOFError, OSError):
            self._lose_server(
                LaunchError(
                    "the fork server, which starts the worker processes, has ended",
                    why=f"it was killed on {socket.gethostname()}, or lacked memory for its "
                    "imports",
                    fix="see the kernel's log, or use LocalLauncher(start_method='spawn')",
                )
            )

    def _handle(self, reply: Reply) -> None:
        match reply:
            case WorkersReport():
                if not self._workers:
                    self._add_workers(reply.pids)
                for worker, exitcode in zip(self._workers, reply.exitcodes, strict=True):
                    worker.exitcode = exitcode
                if self._state is _State.FORKING:
                    self._state = _State.RUNNING
            case WorkersEnded():
                self._state = _State.OVER
            case WorkersRefused():
                raise LaunchError(
                    "the worker processes cannot be started",
                    why=reply.reason,
                    fix="end others, or raise the limit: of `ulimit -u`, the container's of "
                    "processes, or of memory",
                )

    def _add_workers(self, pids: Sequence[int]) -> None:
        """Note the workers, with pidfds where the system has them, and no sandbox refuses them."""
        for pid, rank in zip(pids, self._ranks, strict=True):
            worker = _Worker(pid, rank, pidfd=None)
            with suppress(OSError, AttributeError):
                worker.pidfd = os.pidfd_open(pid)
            self._workers.append(worker)
        # The server reaps no worker before it is told to. If it was killed, init reaps them, and
        # other processes may have their numbers by now.
        if not self._call.is_server_running():
            for worker in self._workers:
                if worker.pidfd is not None:
                    os.close(worker.pidfd)
                    worker.pidfd = None

    def _lose_server(self, error: LaunchError) -> None:
        """End the workers of a server that has ended; wait, since they may hold memory of a GPU.

        Linux kills the workers with the server. What they have started is killed where a signal to
        a pidfd can reach the process group. A number is no substitute: it may be in use again.
        """
        if self._state is not _State.ENDING:
            self._server_error = error
        self._state = _State.OVER
        living = set()
        for worker in self._workers:
            if worker.pidfd is None:
                continue
            living.add(worker.pidfd)
            for flags in (_TO_GROUP, 0):
                with suppress(OSError):  # It has ended; or the kernel is older.
                    signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL, None, flags)
        give_up_at = time.monotonic() + _KILL_TIMEOUT_S
        while living and time.monotonic() < give_up_at:
            living -= set(wait(living, _LOOK_EVERY_S))

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.exitcode is None]

    def _has_returned(self, rank: int) -> bool:
        path_of_value, _ = outcome_paths(self._folder, rank)
        return path_of_value.exists()

    def _find_failures(self, ignored_exitcodes: Sequence[int] = ()) -> list[Outcome]:
        """Return outcomes of the workers that have ended without returning.

        Args:
            ignored_exitcodes: those of workers that have not failed.
        """
        host = socket.gethostname()
        now = time.time()
        failures = []
        # In the order of the ranks; after a lost server, all that are missing are its victims.
        lost_ranks = []
        exitcode_of_rank = {worker.rank: worker.exitcode for worker in self._workers}
        pid_of_rank = {worker.rank: worker.pid for worker in self._workers}
        for rank in self._ranks:
            if self._has_returned(rank):
                continue
            exitcode = exitcode_of_rank.get(rank)
            if exitcode is None or exitcode in ignored_exitcodes:
                lost_ranks.append(rank)
                continue
            output = read_output(self._output, rank)
            failures.append(
                outcome_of_dead_worker(
                    rank, host, pid_of_rank[rank], exitcode, seen_at=now, output=output
                )
            )
        if self._server_error is not None and lost_ranks:
            failures.append(
                Outcome(lost_ranks[0], host, os.getpid(), error=self._server_error, failed_at=now)
            )
        return failures

    def _report_ends(self) -> None:
        """Log what ended processes after their outcomes were written."""
        if self._server_error is not None:
            # Of the workers of a lost server, no exit codes are known.
            return
        for worker in self._workers:
            if worker.exitcode == 0:
                continue
            stderr = read_output(self._output, worker.rank)[1].strip()
            cause = stderr.rpartition("\n")[2]
            if "(most recent call first)" in stderr:
                cause = call_site_in(stderr)
            _log.warning(
                "the process of rank %d ended with code %s after the call had its values: %s",
                worker.rank,
                worker.exitcode,
                cause,
            )
