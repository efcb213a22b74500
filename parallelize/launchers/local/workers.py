"""The worker processes of one attempt of a call on this node: started, watched and ended.

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
from pathlib import Path

from parallelize.call.task import Outcome
from parallelize.cluster.world import World
from parallelize.launchers.failures import WorkerExit
from parallelize.launchers.local.fork_server import Forked
from parallelize.launchers.local.output import RankFiles
from parallelize.worker.main import WorkerSetup, outcome_path, run

__all__ = ["STOP_GRACE_S", "Workers"]

_LOOK_EVERY_S = 0.05  # at other nodes, at signals, and at the outcomes of workers that do not end
STOP_GRACE_S = 3.0  # between SIGTERM and SIGKILL: time for the `finally` blocks of the other workers
INTERRUPT_GRACE_S = 30.0  # after Ctrl-C: time for what the function does with a KeyboardInterrupt, such as to save
_LEAVE_GRACE_S = 5.0  # after the last outcome: time for threads and `atexit` functions
_KILL_TIMEOUT_S = 15.0  # a driver takes seconds to free the memory of a process
_SIGTERM_EXIT_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM)

_log = logging.getLogger("parallelize")


class Workers:
    """The workers of one attempt.

    Args:
        setup: what each process is set up with; its folder gets their outcomes.
        worlds: rank and world size of each.
        attempt: number of restarts so far.
        files: files for the workers' stdout and stderr.
        start_method: "forkserver", or "spawn" for processes in which nothing is imported before.
    """

    def __init__(
        self, setup: WorkerSetup, worlds: Sequence[World], attempt: int, files: RankFiles, *, start_method: str
    ) -> None:
        self._folder, self._attempt, self._files = Path(setup.folder), attempt, files
        self._ranks = [world.rank for world in worlds]
        self._returned: set[int] = set()  # ranks that have ended badly, but after they had returned
        self._has_ended = False
        self._give_up_at = float("inf")
        self._exits: list[WorkerExit] = []
        paths = {each: tuple(str(files.path(each.rank, attempt, name)) for name in ("out", "err")) for each in worlds}
        requests = [pickle.dumps((run, setup, world, attempt, names)) for world, names in paths.items()]
        self._forked = Forked(setup.environ, requests, setup.folder, is_preloaded=start_method == "forkserver")

    def watch(self, is_stopped: Callable[[], bool]) -> bool:
        """Wait until all workers have returned (True), or one has failed, or others have (False)."""
        leave_by: float | None = None
        while True:
            self._forked.look(_LOOK_EVERY_S)
            self._exits = self._failed_exits()
            if self._exits or is_stopped() or time.monotonic() > self._give_up_at:
                return False
            if not all(self._outcome_path(rank).exists() for rank in self._ranks):
                continue
            leave_by = leave_by or time.monotonic() + _LEAVE_GRACE_S
            if len(self._forked.exitcodes) == len(self._ranks) or time.monotonic() > leave_by:
                self._report_ends()
                return True

    def interrupt(self) -> None:
        """Send SIGINT to the workers, which then have some time to return."""
        self._give_up_at = time.monotonic() + INTERRUPT_GRACE_S
        for pid in self._forked.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def _outcome_path(self, rank: int) -> Path:
        return outcome_path(self._folder, rank, self._attempt)

    def _has_returned(self, rank: int, exitcode: int) -> bool:
        """Whether a worker that has ended has written a value, and not an error."""
        path = self._outcome_path(rank)
        if exitcode == 0 or not path.exists():
            return path.exists()
        if rank not in self._returned and Outcome.read(path).error is None:
            self._returned.add(rank)
        return rank in self._returned

    def _failed_exits(self) -> list[WorkerExit]:
        """Return the workers that have ended without returning."""
        ended = [(self._ranks[index], index, code) for index, code in self._forked.exitcodes.items()]
        host, now = socket.gethostname(), time.time()
        return [
            WorkerExit(rank, host, self._forked.pids[index], code, now, self._files.read_output(rank, self._attempt))
            for rank, index, code in ended
            if not self._has_returned(rank, code)
        ]

    def outcomes(self) -> dict[int, Path]:
        """Return the outcome files of the ranks that have written one."""
        paths = {rank: self._outcome_path(rank) for rank in self._ranks}
        return {rank: path for rank, path in paths.items() if path.exists()}

    def stop(self) -> list[WorkerExit]:
        """End the workers after a failure; return those that have ended by themselves without returning."""
        self.end(STOP_GRACE_S)
        # Look again: peers fail on the closed connections of a killed worker before its exit is visible here.
        late = [each for each in self._failed_exits() if each.exitcode not in _SIGTERM_EXIT_CODES]
        return list({each.rank: each for each in [*late, *self._exits]}.values())

    def end(self, grace_s: float = 0.0) -> None:
        """End all workers, with time for their `finally` blocks, and what they have started; once."""
        if self._has_ended:
            return
        self._has_ended = True
        if not self._forked.end(grace_s, _KILL_TIMEOUT_S):  # as in the driver of a GPU that hangs
            pids = ", ".join(map(str, self._forked.living()))
            _log.error("worker %s does not end, %g s after SIGKILL: its GPU may hang", pids, _KILL_TIMEOUT_S)

    def _report_ends(self) -> None:
        """Log what ended processes, or keeps them, after their outcomes were written."""
        for index, rank in enumerate(self._ranks):
            exitcode = self._forked.exitcodes.get(index)
            if exitcode != 0:
                living = exitcode is None
                how = f"is ended {_LEAVE_GRACE_S:g} s after" if living else f"ended with code {exitcode} after"
                text = self._files.read_output(rank, self._attempt)[1].strip().rpartition("\n")[2]
                _log.warning("the process of rank %d %s the call had its values: %s", rank, how, text)
