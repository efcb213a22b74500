"""The worker processes of a call on this node: started, watched and ended.

A worker has returned once its outcome is written: what ends its process after that is logged, and loses nothing.
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
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

from parallelize.call.outcome import Outcome
from parallelize.cluster.world import World
from parallelize.errors import LaunchError
from parallelize.hang_detection.stack_frames import call_site_in
from parallelize.launchers.failures import outcome_of_dead_worker
from parallelize.launchers.local.fork_server import (
    EndWorkers,
    InterruptWorkers,
    RequestsOfWorkers,
    StartWorkers,
    WorkersEnded,
    WorkersRefused,
    WorkersReport,
)
from parallelize.launchers.local.server_calls import ServerCall
from parallelize.launchers.output import rank_file, read_output
from parallelize.run.startup_summary import announce
from parallelize.worker.leaving import LEAVE_GRACE_S
from parallelize.worker.main import run
from parallelize.worker.setup import WorkerSetup, outcome_paths

_LOOK_EVERY_S = 0.05  # at other nodes, at signals, and at the outcomes of workers that do not end
STOP_GRACE_S = (
    3.0  # between SIGTERM and SIGKILL: time for the `finally` blocks of the other workers
)
INTERRUPT_GRACE_S = (
    30.0  # after Ctrl-C: time for what the function does with a KeyboardInterrupt, such as to save
)
_LEAVE_TIMEOUT_S = 2 * LEAVE_GRACE_S  # after the last outcome
_KILL_TIMEOUT_S = 15.0  # a driver takes seconds to free the memory of a process
_ANNOUNCED_AFTER_S = 30.0  # what is waited for, while the fork server does not answer
# PIDFD_SIGNAL_PROCESS_GROUP of <linux/pidfd.h>, since Linux 6.9.
_TO_GROUP = 4
_SIGTERM_EXIT_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM)

_log = logging.getLogger("parallelize")


class Workers:
    """The workers of a call on this node.

    They wait until `start` gives them what they run, so that they are made while the caller pickles it.

    If the fork server is lost, that is the outcome of a rank that has not returned: it ends the call
    on all nodes, and counts as a failure for `max_restarts=`.

    Args:
        call: the call at the fork server.
        number: how many.
        folder: the call's folder, which the fork server removes if this process is killed.
    """

    def __init__(self, call: ServerCall, number: int, folder: Path) -> None:
        self._call, self._folder = call, folder
        self._ranks = list[int]()
        self._pids, self._exitcodes = list[int](), list[int | None]()  # in the order of the ranks
        self._pidfds = list[int]()
        self._server_error: LaunchError | None = None
        self._is_ending = self._is_over = False
        self._give_up_at = float("inf")
        self._ended: list[Outcome] = []
        self._tell(StartWorkers(number, str(folder)))

    def start(
        self, setup: WorkerSetup, worlds: Sequence[World], output: Path, timeout: timedelta
    ) -> None:
        """Give the workers what they run; wait until the fork server has forked them, or is lost.

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
        paths = [self._folder / f"setup.{rank}" for rank in self._ranks]
        for world, path in zip(worlds, paths, strict=True):
            files = tuple(str(rank_file(output, world.rank, stream)) for stream in ("out", "err"))
            path.write_bytes(pickle.dumps((run, setup, world, files)))
        try:
            cwd = str(Path.cwd())
        except FileNotFoundError as exc:
            what, why = (
                "the current folder does not exist",
                "processes start in the folder of their caller",
            )
            raise LaunchError(what, why=why, fix="change to one that does: os.chdir(...)") from exc
        try:
            self._tell(RequestsOfWorkers(cwd, list(map(str, paths))))
            self._await_server(timeout.total_seconds())
        except BaseException:
            self.close()  # do not wait for a server that may still import
            raise

    def _await_server(self, timeout_s: float) -> None:
        """Wait until the fork server has forked the workers, or is lost."""
        asked_at = time.monotonic()
        is_announced = False
        while not self._pids and not self._is_over:
            self._look(_LOOK_EVERY_S)
            waited_s = time.monotonic() - asked_at
            if waited_s > timeout_s and not self._pids:
                doing = self._call.describe_server()
                self._call.kill_server()
                self._lose_server(
                    LaunchError(
                        "the fork server, which starts the worker processes, did not answer within "
                        f"timeout={timeout_s:g} s",
                        why=f"on {socket.gethostname()}: {doing}; it was killed",
                        fix="increase timeout= if imports are slow; PARALLELIZE_PRELOAD=0 leaves all "
                        "but torch's to the workers, whose lines are shown if one hangs",
                    )
                )
            elif waited_s > _ANNOUNCED_AFTER_S and not is_announced:
                is_announced = True
                doing = self._call.describe_server()
                announce(f"waiting for {doing}, for {waited_s:.0f} s of timeout={timeout_s:g} s")

    def close(self) -> None:
        """Leave the workers to the fork server, which ends those that live."""
        self._tell(EndWorkers(0.0))
        self._is_ending = True
        while self._pidfds:
            os.close(self._pidfds.pop())

    def watch(self, is_stopped: Callable[[], bool]) -> bool:
        """Wait until all workers have returned (True), or one has failed, or others have (False)."""
        leave_by: float | None = None
        while True:
            self._look(_LOOK_EVERY_S)
            self._ended = self._failed()
            if self._ended or is_stopped() or time.monotonic() > self._give_up_at:
                return False
            if not all(self._has_returned(rank) for rank in self._ranks):
                continue
            leave_by = leave_by or time.monotonic() + _LEAVE_TIMEOUT_S
            if self._is_over or None not in self._exitcodes or time.monotonic() > leave_by:
                self._report_ends()
                return True

    def interrupt(self) -> None:
        """Send SIGINT to the workers, which then have some time to return."""
        self._give_up_at = time.monotonic() + INTERRUPT_GRACE_S
        self._tell(InterruptWorkers())

    def outcomes(self) -> dict[int, Path | Outcome]:
        """Return the outcome of each rank that has written one, as a file, or has ended without one."""
        paths = {
            rank: next(filter(Path.exists, outcome_paths(self._folder, rank)), None)
            for rank in self._ranks
        }
        ended = {each.rank: each for each in self._ended}
        return {**ended, **{rank: path for rank, path in paths.items() if path is not None}}

    def stop(self) -> None:
        """End the workers after a failure."""
        self.end(STOP_GRACE_S)
        # Look again: peers fail on the closed connections of a killed worker before its exit is visible here.
        self._ended = [*self._failed(_SIGTERM_EXIT_CODES), *self._ended]

    def end(self, grace_s: float = 0.0) -> None:
        """End all workers, with time for their `finally` blocks, and what they have started; once."""
        if self._is_ending:
            return
        self._is_ending = True
        end = time.monotonic() + grace_s + _KILL_TIMEOUT_S
        self._tell(EndWorkers(grace_s))
        while not self._is_over and time.monotonic() < end:
            self._look(_LOOK_EVERY_S)
        if not self._is_over:  # as in the driver of a GPU that hangs
            pids = ", ".join(map(str, self._living()))
            _log.error(
                "worker %s does not end, %g s after SIGKILL: its GPU may hang",
                pids,
                _KILL_TIMEOUT_S,
            )

    def _tell(self, message: object) -> None:
        with suppress(OSError):  # the server has ended, as `_look` will find
            self._call.connection.send(message)

    def _look(self, timeout_s: float) -> None:
        """Wait for what the fork server says, or the timeout."""
        try:
            while not self._is_over and self._call.connection.poll(timeout_s):
                timeout_s = 0
                self._hear(self._call.connection.recv())
        except (EOFError, OSError):
            self._lose_server(
                LaunchError(
                    "the fork server, which starts the worker processes, has ended",
                    why=f"it was killed on {socket.gethostname()}, or lacked memory for its imports",
                    fix="see the kernel's log, or use LocalLauncher(start_method='spawn')",
                )
            )

    def _hear(self, message: object) -> None:
        if isinstance(message, WorkersRefused):
            fix = "end others, or raise the limit: of `ulimit -u`, the container's of processes, or of memory"
            raise LaunchError("the worker processes cannot be started", why=message.reason, fix=fix)
        if isinstance(message, WorkersEnded):
            self._is_over = True
        elif isinstance(message, WorkersReport):
            if not self._pids:
                self._pidfds = self._open_pidfds(message.pids)
            self._pids, self._exitcodes = list(message.pids), list(message.exitcodes)

    def _open_pidfds(self, pids: Sequence[int]) -> list[int]:
        """Open the workers; none on systems without pidfds, and in a sandbox that refuses them."""
        pidfds = list[int]()
        with suppress(OSError, AttributeError):
            for pid in pids:
                pidfds.append(os.pidfd_open(pid))
        # The server reaps no worker before it is told to. If it was killed, init reaps them, and
        # other processes may have their numbers by now.
        if not self._call.is_server_running():
            while pidfds:
                os.close(pidfds.pop())
        return pidfds

    def _lose_server(self, error: LaunchError) -> None:
        """End the workers of a server that has ended; wait, since they may hold memory of a GPU.

        Linux kills the workers with the server. What they have started is killed where a signal to
        a pidfd can reach the process group. A number is no substitute: it may be in use again.
        """
        self._is_over = True
        if not self._is_ending:
            self._server_error = error
        for pidfd in self._pidfds:
            for flags in (_TO_GROUP, 0):
                with suppress(OSError):  # it has ended; an older kernel
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL, None, flags)
        end = time.monotonic() + _KILL_TIMEOUT_S
        living = set(self._pidfds)
        while living and time.monotonic() < end:
            living -= set(wait(living, _LOOK_EVERY_S))

    def _living(self) -> list[int]:
        return [
            pid
            for pid, exitcode in zip(self._pids, self._exitcodes, strict=True)
            if exitcode is None
        ]

    def _has_returned(self, rank: int) -> bool:
        return outcome_paths(self._folder, rank)[0].exists()

    def _failed(self, ignored: Sequence[int] = ()) -> list[Outcome]:
        """Return outcomes of the workers that have ended without returning, if not with one of these exit codes."""
        host, now = socket.gethostname(), time.time()
        failed = [
            outcome_of_dead_worker(
                rank, host, pid, exitcode, seen_at=now, output=read_output(self._output, rank)
            )
            for rank, pid, exitcode in zip(self._ranks, self._pids, self._exitcodes, strict=False)
            if exitcode is not None and exitcode not in ignored and not self._has_returned(rank)
        ]
        if self._server_error is None:
            return failed
        ranks = {outcome.rank for outcome in failed}
        for rank in self._ranks:
            if rank not in ranks and not self._has_returned(rank):
                return [
                    *failed,
                    Outcome(rank, host, os.getpid(), error=self._server_error, failed_at=now),
                ]
        return failed

    def _report_ends(self) -> None:
        """Log what ended processes after their outcomes were written."""
        text = "the process of rank %d ended with code %s after the call had its values: %s"
        # Of the workers of a lost server, no exit codes are known.
        exitcodes = self._exitcodes if self._server_error is None else []
        for rank, exitcode in zip(self._ranks, exitcodes, strict=False):
            err = read_output(self._output, rank)[1].strip()
            last = err.rpartition("\n")[2]
            if exitcode != 0:
                _log.warning(
                    text,
                    rank,
                    exitcode,
                    call_site_in(err) if "(most recent call first)" in err else last,
                )
