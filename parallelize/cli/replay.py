"""`parallelize replay`: one step of a run of many processes, again in one process, with the same bits."""

from __future__ import annotations

import runpy
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from parallelize.checkpoint.checkpoints import Replay, StepReplayed
from parallelize.cluster.devices import probe
from parallelize.run.surroundings import replaying

__all__ = ["replay"]


def replay(environ: MutableMapping[str, str], checkpoint: str, step: int, words: Sequence[str], *, debugs: bool) -> int:
    """Run a script in this process from a checkpoint to a step, and stop after it; nothing is saved.

    Args:
        environ: environment variables of this process; they get options for one process and device.
        checkpoint: a file or folder that `checkpoints` of the script has written.
        step: number of the step, from 1.
        words: the script and its arguments.
        debugs: whether pdb stops before the step.

    Returns:
        The exit code: 1 if the script has ended before the step.
    """
    device = "PARALLELIZE_GPUS" if probe().count else "PARALLELIZE_PROCESSES"
    if not environ.keys() & {"PARALLELIZE_GPUS", "PARALLELIZE_PROCESSES"}:
        environ[device] = "1"
    environ["PARALLELIZE_NUM_NODES"] = "1"
    sys.argv[:] = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    try:
        with replaying(Replay(Path(checkpoint).absolute(), step, debugs=debugs)):
            runpy.run_path(words[0], run_name="__main__")
    except StepReplayed:
        return 0
    sys.stderr.write(f"{words[0]} has ended before step {step}: does it enter checkpoints() of this folder?\n")
    return 1
