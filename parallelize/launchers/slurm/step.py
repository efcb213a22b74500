"""The program of one rank, which srun starts: `python -m parallelize.launchers.slurm.step FOLDER`.

FOLDER/task, setup      the call, which the caller has written by `write_call`
FOLDER/outcome.<rank>   its value: whatever ends the process later loses nothing
FOLDER/error.<rank>     what it has raised
FOLDER/exit.<rank>      how its process has ended without either of them, by script.py
FOLDER/rank<rank>.out   output of a rank that is not shown, and .err
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import types
from pathlib import Path

from parallelize.call.task import Task
from parallelize.cluster.environment import detect
from parallelize.cluster.world import World
from parallelize.worker.main import run
from parallelize.worker.setup import WorkerSetup, task_path


def write_call(task: Task, folder: Path) -> None:
    """Write what ranks need to make the call to a folder that only this user can access.

    The ranks unpickle it: whoever could write there would run code as this user.

    Raises:
        ConfigError: an argument cannot be pickled.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    task.write(task_path(folder))
    setup = WorkerSetup.capture(task.layout, folder="", environ={})
    (folder / "setup").write_bytes(pickle.dumps(setup))


def _main(folder: Path) -> None:
    # A process group of its own, so that all processes started from here can be killed together.
    os.setsid()
    setup = pickle.loads((folder / "setup").read_bytes())
    # The module that gets the names of the caller's script.
    sys.modules["__main__"] = types.ModuleType("__main__")
    world = detect(os.environ) or World()
    setup = dataclasses.replace(setup, folder=str(folder), environ=dict(os.environ))
    run(setup, world, files=None)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
