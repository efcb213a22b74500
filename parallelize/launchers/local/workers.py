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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from parallelize.call.task import Outcome
from parallelize.cluster.world import World
from parallelize.errors import LaunchError
from parallelize.hang_detection.stack_frames import call_site_in
from parallelize.launchers.failures import ended
from parallelize.launchers.local.fork_server import connect, kill_group
from parallelize.launchers.output import rank_file, read_output
from parallelize.worker.main import LEAVE_GRACE_S, WorkerSetup, outcome_paths, run

__all__ = ["STOP_GRACE_S", "Workers"]

_LOOK_EVERY_S = 0.05  # at other nodes, at signals, and at the outcomes of workers that do not end
STOP_GRACE_S = 3.0  # between SIGTERM and SIGKILL: time for the `finally` blocks of the other workers
INTERRUPT_GRACE_S = 30.0  # after Ctrl-C: time for what the function does with a KeyboardInterrupt, such as to save
_LEAVE_TIMEOUT_S = 2 * LEAVE_GRACE_S  # after the last outcome
_KILL_TIMEOUT_S = 15.0  # a driver takes seconds to free the memory of a process
_SIGTERM_EXIT_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM)

_log = logging.getLogger("parallelize")


class Workers:
    """The workers of a call on this node.

    They wait until `start` gives them what they run, so that they are made while the caller pickles it.

    Args:
        number: how many.
        environ: their environment variables.
        is_preloaded: whether they are forked from a process that has imported torch.
    """

    def __init__(self, number: int, environ: Mapping[str, str], *, is_preloaded: bool) -> None:
        self._ranks = list[int]()
        self._pids, self._exitcodes = list[int](), list[int | None]()  # in the order of the ranks
        self._is_ending = self._is_over = False
        self._give_up_at = float("inf")
        self._ended: list[Outcome] = []
        self._connection = connect(environ, is_preloaded=is_preloaded)
        with suppress(OSError):  # the server has ended, as `start` will say
            self._connection.send(number)

    def start(self, setup: WorkerSetup, worlds: Sequence[World], output: Path) -> None:
        """Give the workers what they run.

        Args:
            setup: what each process is set up with; its folder gets their outcomes.
            worlds: rank and world size of each.
            output: folder for the files of the workers' output.

        Raises:
            LaunchError: the fork server has ended, or the current folder does not exist.
        """
        self._folder, self._output = Path(setup.folder), output
        self._ranks = [world.rank for world in worlds]
        paths = [self._folder / f"setup.{rank}" for rank in self._ranks]
        for world, path in zip(worlds, paths, strict=True):
            files = tuple(str(rank_file(output, world.rank, stream)) for stream in ("out", "err"))
            path.write_bytes(pickle.dumps((run, setup, world, files)))
        try:
            cwd = str(Path.cwd())
        except FileNotFoundError as exc:
            what, why = "the current folder does not exist", "processes start in the folder of their caller"
            raise LaunchError(what, why=why, fix="change to one that does: os.chdir(...)") from exc
        try:
            with suppress(OSError):
                self._connection.send((setup.folder, cwd, list(map(str, paths))))
            while not self._pids:
                self._look(_LOOK_EVERY_S)
        except BaseException:
            self.close()  # do not wait for a server that may still import
            raise

    def close(self) -> None:
        """Leave the workers to the fork server, which ends those that live."""
        with suppress(OSError):  # a child that was forked meanwhile may keep the connection open
            self._connection.send(0.0)
        self._is_ending = True
        self._connection.close()

    def watch(self, is_stopped: Callable[[], bool]) -> bool:
        """Wait until all workers have returned (True), or one has failed, or others have (False).

        Raises:
            LaunchError: the fork server has ended.
        """
        leave_by: float | None = None
        while True:
            self._look(_LOOK_EVERY_S)
            self._ended = self._failed()
            if self._ended or is_stopped() or time.monotonic() > self._give_up_at:
                return False
            if not all(self._has_returned(rank) for rank in self._ranks):
                continue
            leave_by = leave_by or time.monotonic() + _LEAVE_TIMEOUT_S
            if None not in self._exitcodes or time.monotonic() > leave_by:
                self._report_ends()
                return True

    def interrupt(self) -> None:
        """Send SIGINT to the workers, which then have some time to return."""
        self._give_up_at = time.monotonic() + INTERRUPT_GRACE_S
        for pid in self._living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def outcomes(self) -> dict[int, Path | Outcome]:
        """Return the outcome of each rank that has written one, as a file, or has ended without one."""
        paths = {rank: next(filter(Path.exists, outcome_paths(self._folder, rank)), None) for rank in self._ranks}
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
        with suppress(OSError):
            self._connection.send(grace_s)
        while not self._is_over and time.monotonic() < end:
            self._look(_LOOK_EVERY_S)
        if not self._is_over:  # as in the driver of a GPU that hangs
            pids = ", ".join(map(str, self._living()))
            _log.error("worker %s does not end, %g s after SIGKILL: its GPU may hang", pids, _KILL_TIMEOUT_S)

    def _look(self, timeout_s: float) -> None:
        """Wait until a worker has ended, or the timeout; read which have."""
        try:
            while self._connection.poll(timeout_s):
                timeout_s = 0
                found = self._connection.recv()
                if isinstance(found, str):
                    fix = "end others, or raise the limit: of `ulimit -u`, the container's of processes, or of memory"
                    raise LaunchError("the worker processes cannot be started", why=found, fix=fix)
                self._pids, self._exitcodes = found
        except (EOFError, OSError):
            self._is_over = True
            if self._is_ending:
                return
            for pid in self._pids:
                kill_group(pid)
            raise LaunchError(
                "the fork server, which starts the worker processes, has ended",
                why="it was killed, or ran out of memory while it imported modules",
                fix="see the kernel's log, or use LocalLauncher(start_method='spawn')",
            ) from None

    def _living(self) -> list[int]:
        return [pid for pid, exitcode in zip(self._pids, self._exitcodes, strict=True) if exitcode is None]

    def _has_returned(self, rank: int) -> bool:
        return outcome_paths(self._folder, rank)[0].exists()

    def _failed(self, ignored: Sequence[int] = ()) -> list[Outcome]:
        """Return outcomes of the workers that have ended without returning, if not with one of these exit codes."""
        host, now = socket.gethostname(), time.time()
        return [
            ended(rank, host, pid, exitcode, seen_at=now, output=read_output(self._output, rank))
            for rank, pid, exitcode in zip(self._ranks, self._pids, self._exitcodes, strict=True)
            if exitcode is not None and exitcode not in ignored and not self._has_returned(rank)
        ]

    def _report_ends(self) -> None:
        """Log what ended processes after their outcomes were written."""
        text = "the process of rank %d ended with code %s after the call had its values: %s"
        for rank, exitcode in zip(self._ranks, self._exitcodes, strict=True):
            err = read_output(self._output, rank)[1].strip()
            last = err.rpartition("\n")[2]
            if exitcode != 0:
                _log.warning(text, rank, exitcode, call_site_in(err) if "(most recent call first)" in err else last)
