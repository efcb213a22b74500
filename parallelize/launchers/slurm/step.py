"""The program of one rank, which srun starts: `python -m parallelize.launchers.slurm.step FOLDER ATTEMPT`.

FOLDER/task, setup                  the call                                  write_call
FOLDER/outcome.<rank>.<attempt>     its value, or what it has raised          worker.main
FOLDER/returned.<rank>.<attempt>    the function has returned: whatever ends the process later loses nothing
FOLDER/rank<rank>.<attempt>.out     output of a rank that is not shown, and .err
"""

from __future__ import annotations

import dataclasses
import faulthandler
import multiprocessing
import os
import sys
import types
from pathlib import Path

import torch

from parallelize.call.pickling import dump, load
from parallelize.call.settings import LogSettings, Settings
from parallelize.call.task import Task
from parallelize.cluster.environment import detect
from parallelize.cluster.world import World
from parallelize.worker.main import WorkerSetup, run, task_path

__all__ = ["write_call"]

_LEAVE_GRACE_S = 5.0  # after the function has returned: time for threads and `atexit` functions


def write_call(task: Task, folder: Path) -> None:
    """Write what ranks need to make the call to a folder that only this user can access, since they unpickle it.

    Raises:
        ConfigError: an argument cannot be pickled.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    task.write(task_path(folder))
    setup = WorkerSetup(
        folder="",
        environ={},
        devices=tuple(driven[0] for driven in task.layout.devices),
        start_method=multiprocessing.get_start_method(allow_none=True) or "fork",
        logs=LogSettings.capture(),
        settings=Settings.capture(),
    )
    sys_path = [str(Path(entry).resolve()) for entry in sys.path]
    dump((setup, sys_path), folder / "setup", parts={})


def _main(folder: Path, attempt: int) -> None:
    setup, sys.path[:] = load(folder / "setup", device=torch.device("cpu"))
    sys.modules["__main__"] = types.ModuleType("__main__")  # gets the names of the caller's script
    world = detect(os.environ) or World()
    setup = dataclasses.replace(setup, folder=str(folder), environ=dict(os.environ))
    run(setup, world, attempt, files=None)
    (folder / f"returned.{world.rank}.{attempt}").touch()
    faulthandler.dump_traceback_later(_LEAVE_GRACE_S, exit=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
