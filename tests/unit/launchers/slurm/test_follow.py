"""Waiting for a job: what Ctrl-C does to it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from parallelize.launchers.slurm.follow import follow


class InterruptedJob:
    """A job that is interrupted while its outcomes are awaited."""

    id = "7"

    def __init__(self, folder: Path) -> None:
        self.log = folder / "7.log"
        self.is_cancelled = False

    def outcomes(self, *, watch: Any) -> None:
        raise KeyboardInterrupt

    def cancel(self) -> None:
        self.is_cancelled = True


class InterruptedTerminal(io.StringIO):
    """A terminal on which the user presses Ctrl-C while the answer to the first one is printed."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if "Ctrl-C again" in text:
            raise KeyboardInterrupt
        return written


@pytest.mark.parametrize("terminal", [io.StringIO, InterruptedTerminal])
def test_a_second_ctrl_c_cancels_whenever_it_comes(terminal: type[io.StringIO], tmp_path: Path) -> None:
    """Two Ctrl-C cancel the job, also where the second one interrupts the answer to the first."""
    job: Any = InterruptedJob(tmp_path)
    err = terminal()
    with pytest.raises(KeyboardInterrupt):
        follow(job, out=io.StringIO(), err=err)
    assert job.is_cancelled
    assert "`scancel 7` or Ctrl-C again" in err.getvalue()
    assert err.getvalue().endswith("cancelled job 7\n")
