"""The folder in which a job and its caller meet, on a file system that both see.

<folder>/train-k3x9/          one submission
    job.sh                    the script
    call.json                 how the interpreter was started
    settings                  what the caller has set in torch
    task.0, task.1, ...       the calls; one, or one for each job of an array
    12_0.log                  what that job printed, all attempts
    result.12_0               what came of it
    meeting.12_0.1            where the nodes of its second attempt meet
    stop.12_0.1               that attempt has been told to stop
    stop.12_0.1.heeded        and the function knows
<folder>/12                   a link to the submission, by the job's number
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parallelize.call.serialization import pack, unpack
from parallelize.call.task import Outcome, Task
from parallelize.call.torch_settings import Settings
from parallelize.errors import LaunchError

__all__ = ["JobFolder"]


@dataclass(frozen=True)
class JobFolder:
    """One submission's folder.

    Args:
        path: where it is.
    """

    path: Path

    @classmethod
    def make(cls, parent: Path, name: str) -> JobFolder:
        """A new one that only this user can read: what is in it is unpickled."""
        parent.mkdir(parents=True, exist_ok=True)
        return cls(Path(tempfile.mkdtemp(prefix=f"{_plain(name)}-", dir=parent.resolve())))

    @classmethod
    def of(cls, job_id: str, parent: Path) -> JobFolder:
        """The folder of a job.

        Args:
            job_id: "12", or "12_3" for one of an array.
            parent: the launcher's folder, or a job's own.

        Raises:
            LaunchError: there is no such job.
        """
        for path in (parent / job_id.partition("_")[0], parent):
            if (path / "call.json").exists():
                return cls(path.resolve())
        raise LaunchError(
            f"no job {job_id} in {parent}",
            why="a submitted job leaves a link of its number in the launcher's folder",
            fix="give the folder= of the launcher that submitted it, or the folder beside the job script",
        )

    @property
    def script(self) -> Path:
        """The job script."""
        return self.path / "job.sh"

    def write_calls(self, tasks: Sequence[Task], *, guard: str) -> None:
        """Put the calls into it, and how to start an interpreter that can read them.

        Args:
            tasks: the calls.
            guard: text of the script that runs it on each node.

        Raises:
            ConfigError: something in them cannot travel.
        """
        for index, task in enumerate(tasks):
            task.write(self.path / f"task.{index}")
        pack(Settings.here(), self.path / "settings", parts={})
        (self.path / "guard.sh").write_text(guard)
        started = {"sys_path": [str(Path(entry).resolve()) for entry in sys.path], "name": tasks[0].name}
        (self.path / "call.json").write_text(json.dumps(started))

    def sys_path(self) -> list[str]:
        """The caller's sys.path, absolute."""
        return [str(entry) for entry in json.loads((self.path / "call.json").read_text())["sys_path"]]

    def settings(self) -> Settings:
        """What the caller has set in torch."""
        found: Settings = unpack(self.path / "settings", device=torch.device("cpu"))
        return found

    def task(self, index: int) -> Path:
        """The file of a call."""
        return self.path / f"task.{index}"

    def log(self, job_id: str) -> Path:
        """What a job has printed."""
        return self.path / f"{job_id}.log"

    def meeting(self, job_id: str, attempt: int) -> Path:
        """Where node 0 of an attempt says how to reach it."""
        return self.path / f"meeting.{job_id}.{attempt}"

    def stop(self, job_id: str, attempt: int) -> Path:
        """The file that tells an attempt to stop by being there."""
        return self.path / f"stop.{job_id}.{attempt}"

    def link(self, job_id: str) -> None:
        """Let the job be found by its number, which may have been that of an earlier one, or of another cluster's."""
        link = self.path / "link"
        link.symlink_to(self.path.name)
        link.replace(self.path.parent / job_id)

    def write_outcomes(self, job_id: str, outcomes: Sequence[Outcome]) -> None:
        """Leave what came of a job."""
        pack(list(outcomes), self._result(job_id), parts={"the returned value": [each.value for each in outcomes]})

    def write_failure(self, job_id: str, failure: Outcome) -> None:
        """Leave what a job has raised."""
        failure.write(self._result(job_id))

    def outcomes(self, job_id: str) -> list[Outcome] | None:
        """What came of a job; None: nothing yet.

        Raises:
            WorkerError: what it left cannot be rebuilt in this process.
        """
        with contextlib.suppress(OSError):
            list(self.path.iterdir())  # a network file system is asked again what there is
        path = self._result(job_id)
        if not path.exists():
            return None
        found = Outcome.read(path)
        return found if isinstance(found, list) else [found]

    def _result(self, job_id: str) -> Path:
        return self.path / f"result.{job_id}"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "job"
