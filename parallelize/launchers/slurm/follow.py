"""A caller waits for its job: the queue's words until it runs, its output from then on."""

from __future__ import annotations

import codecs
import sys
import time
from typing import Any, TextIO

from parallelize.call.task import Outcome
from parallelize.launchers.slurm.job import Job
from parallelize.launchers.slurm.job_state import State

__all__ = ["watched"]


def watched(job: Job[Any], *, out: TextIO | None = None, err: TextIO | None = None) -> list[Outcome]:
    """What came of a job, waited for in sight of the user; Ctrl-C says how to go on without it, a second one ends it.

    Args:
        job: the job.
        out: gets its output; None: this process's.
        err: gets what the queue says; None: this process's.

    Raises:
        BaseException: as `Job.result` does.
        KeyboardInterrupt: the second Ctrl-C; the job is cancelled.
    """
    screen = _Screen(job, out or sys.stdout, err or sys.stderr)
    is_warned = False
    while True:
        try:
            return job.outcomes(watch=screen.show)
        except KeyboardInterrupt:
            if is_warned:
                job.cancel()
                screen.say(f"cancelled job {job.id}")
                raise
            is_warned = True
            screen.say(f"job {job.id} goes on without this process; `scancel {job.id}` or Ctrl-C again ends it")
        finally:
            screen.forward()


class _Screen:
    """Shows a job: one line that changes on a terminal, a line for every change elsewhere."""

    def __init__(self, job: Job[Any], out: TextIO, err: TextIO) -> None:
        self._job, self._out, self._err = job, out, err
        self._started = time.monotonic()
        self._said = ""
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may arrive in two parts

    def show(self, state: State | None) -> None:
        """The state as last known, and what is new of the output."""
        text = f"slurm job {self._job.id}: {state or 'submitted'}"
        if self._err.isatty() and (state is None or state.name == "PENDING"):
            self._err.write(f"\r{text}, {time.monotonic() - self._started:.0f} s\x1b[K")
            self._err.flush()
            self._said = ""
        elif text != self._said:
            self.say(text)
            self._said = text
        self.forward()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._err.write(("\r\x1b[K" if self._err.isatty() else "") + text + "\n")
        self._err.flush()

    def forward(self) -> None:
        """Pass on what the job has printed since."""
        try:
            with self._job.log.open("rb") as log:
                log.seek(self._offset)
                new = log.read()
        except FileNotFoundError:
            return
        self._offset += len(new)
        if new:
            self._out.write(self._decoder.decode(new))
            self._out.flush()
