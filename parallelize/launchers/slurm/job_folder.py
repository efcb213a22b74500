"""The folder of a submission, on a file system shared by the login node and the job's nodes.

<folder>/train-k3x9/          one submission
    job.sh                    the script
    wrapper.sh                runs the step on each node
    call.json                 sys.path of the caller
    settings                  torch settings of the caller
    task.0, task.1, ...       the calls: one, or one per element of a job array
    12_0.log                  output of job 12_0, of all attempts
    result.12_0               outcomes of that job
    rendezvous.12_0.1         address of node 0 in its second attempt
    stop.12_0.1               asks that attempt to stop
    stop.12_0.1.acknowledged  should_stop() has returned True
<folder>/12                   link to the submission, by job ID
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

from parallelize.call.serialization import dump, load
from parallelize.call.task import Outcome, Task
from parallelize.call.torch_settings import TorchSettings
from parallelize.errors import LaunchError

__all__ = ["JobFolder"]


@dataclass(frozen=True)
class JobFolder:
    """The folder of one submission, at `path`."""

    path: Path

    @classmethod
    def make(cls, parent: Path, name: str) -> JobFolder:
        """Create a folder that only this user can access, since its files are unpickled."""
        parent.mkdir(parents=True, exist_ok=True)
        return cls(Path(tempfile.mkdtemp(prefix=f"{_safe_name(name)}-", dir=parent.resolve())))

    @classmethod
    def find(cls, job_id: str, parent: Path) -> JobFolder:
        """Return the folder of a job.

        Args:
            job_id: "12", or "12_3" for an element of an array.
            parent: the launcher's folder, or the submission's.

        Raises:
            LaunchError: `parent` contains no such job.
        """
        for path in (parent / job_id.partition("_")[0], parent):
            if (path / "call.json").exists():
                return cls(path.resolve())
        raise LaunchError(
            f"no job {job_id} in {parent}",
            why="the launcher's folder contains a link for each submitted job, named by its ID",
            fix="pass the folder= of the launcher that submitted it, or the folder beside the job script",
        )

    @property
    def script(self) -> Path:
        """Path of the job script."""
        return self.path / "job.sh"

    def write_calls(self, tasks: Sequence[Task], *, wrapper: str) -> None:
        """Write the calls, and this process's sys.path and torch settings, which a job needs to unpickle the calls.

        Args:
            tasks: the calls.
            wrapper: text of wrapper.sh.

        Raises:
            ConfigError: an argument cannot be pickled.
        """
        for index, task in enumerate(tasks):
            task.write(self.task_file(index))
        dump(TorchSettings.capture(), self.path / "settings", parts={})
        (self.path / "wrapper.sh").write_text(wrapper)
        started = {"sys_path": [str(Path(entry).resolve()) for entry in sys.path], "name": tasks[0].name}
        (self.path / "call.json").write_text(json.dumps(started))

    def sys_path(self) -> list[str]:
        """Return the caller's sys.path as absolute paths."""
        return [str(entry) for entry in json.loads((self.path / "call.json").read_text())["sys_path"]]

    def settings(self) -> TorchSettings:
        """Return the caller's torch settings."""
        found: TorchSettings = load(self.path / "settings", device=torch.device("cpu"))
        return found

    def task_file(self, index: int) -> Path:
        """Return the file of a call."""
        return self.path / f"task.{index}"

    def log_file(self, job_id: str) -> Path:
        """Return the file of a job's output."""
        return self.path / f"{job_id}.log"

    def rendezvous_file(self, job_id: str, attempt: int) -> Path:
        """Return the file in which node 0 of an attempt publishes its address."""
        return self.path / f"rendezvous.{job_id}.{attempt}"

    def stop_file(self, job_id: str, attempt: int) -> Path:
        """Return the file whose existence asks an attempt to stop."""
        return self.path / f"stop.{job_id}.{attempt}"

    def acknowledged_file(self, job_id: str, attempt: int) -> Path:
        """Return the file that should_stop() creates when it returns True."""
        return self.path / f"stop.{job_id}.{attempt}.acknowledged"

    def link(self, job_id: str) -> None:
        """Create the link that is named by the job ID; replace the link of an older job with the same ID."""
        link = self.path / "link"
        link.symlink_to(self.path.name)
        link.replace(self.path.parent / job_id)

    def write_outcomes(self, job_id: str, outcomes: Sequence[Outcome]) -> None:
        """Write the outcomes of a job."""
        dump(list(outcomes), self._result(job_id), parts={"the returned value": [each.value for each in outcomes]})

    def write_failure(self, job_id: str, failure: Outcome) -> None:
        """Write the outcome of a failed job."""
        failure.write(self._result(job_id))

    def outcomes(self, job_id: str) -> list[Outcome] | None:
        """Return the outcomes of a job, or None if they are not written yet.

        Raises:
            WorkerError: the outcomes cannot be unpickled in this process.
        """
        with contextlib.suppress(OSError):
            list(self.path.iterdir())  # refreshes the directory cache of a network file system
        path = self._result(job_id)
        if not path.exists():
            return None
        found = Outcome.read(path)
        return found if isinstance(found, list) else [found]

    def _result(self, job_id: str) -> Path:
        return self.path / f"result.{job_id}"


def _safe_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "job"
