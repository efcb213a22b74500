"""Waits for a job in the caller's terminal: shows the job's state while it is queued, then its output."""

from __future__ import annotations

import codecs
import sys
import time
from typing import Any, TextIO

from parallelize.call.task import Outcome
from parallelize.launchers.slurm.job import Job
from parallelize.launchers.slurm.job_state import JobState

__all__ = ["follow"]


def follow(job: Job[Any], *, out: TextIO | None = None, err: TextIO | None = None) -> list[Outcome]:
    """Wait for a job while showing its state and output; return its outcomes.

    The first Ctrl-C prints how to cancel the job and keeps waiting; the second cancels it.

    Args:
        job: the job.
        out: stream for the job's output; None: sys.stdout.
        err: stream for the job's state; None: sys.stderr.

    Raises:
        BaseException: as `Job.result` does.
        KeyboardInterrupt: at the second Ctrl-C; the job is cancelled.
    """
    display = _JobDisplay(job, out or sys.stdout, err or sys.stderr)
    try:
        try:
            return job.outcomes(watch=display.show)
        except KeyboardInterrupt:  # from here on, a second Ctrl-C cancels the job
            how = f"`scancel {job.id}` or Ctrl-C again cancels it"
            display.write_line(f"job {job.id} continues without this process; {how}")
            return job.outcomes(watch=display.show)
    except KeyboardInterrupt:
        job.cancel()
        display.write_line(f"cancelled job {job.id}")
        raise
    finally:
        display.forward()


class _JobDisplay:
    """Shows a job's output and state; the state is one overwritten line on a terminal, else a line per change."""

    def __init__(self, job: Job[Any], out: TextIO, err: TextIO) -> None:
        self._job, self._out, self._err = job, out, err
        self._started = time.monotonic()
        self._last_line = ""
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character

    def show(self, state: JobState | None) -> None:
        """Show the last known state and the new output."""
        text = f"slurm job {self._job.id}: {state or 'submitted'}"
        if self._err.isatty() and (state is None or state.name == "PENDING"):
            self._err.write(f"\r{text}, {time.monotonic() - self._started:.0f} s\x1b[K")
            self._err.flush()
            self._last_line = ""
        elif text != self._last_line:
            self.write_line(text)
            self._last_line = text
        self.forward()

    def write_line(self, text: str) -> None:
        """Write a message on its own line."""
        self._err.write(("\r\x1b[K" if self._err.isatty() else "") + text + "\n")
        self._err.flush()

    def forward(self) -> None:
        """Copy the job's new output to the output stream."""
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
