"""`parallelize replay`: one step of a run of many processes, in one process, with the same bits."""

from __future__ import annotations

import runpy
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from parallelize.checkpoint.checkpoints import Replay, StepReplayed
from parallelize.cluster.devices import probe
from parallelize.run.surroundings import replaying

_GPUS = "PARALLELIZE_GPUS"
_PROCESSES = "PARALLELIZE_PROCESSES"


def replay(
    environ: MutableMapping[str, str],
    checkpoint: str,
    step: int,
    words: Sequence[str],
    *,
    debugs: bool,
) -> int:
    """Run a script in this process from a checkpoint to a step, and stop after it.

    Nothing is saved meanwhile.

    Args:
        environ: environment variables of this process; they get options for one process and device.
        checkpoint: a file or folder that `checkpoints` of the script has written.
        step: number of the step, from 1.
        words: the script and its arguments.
        debugs: whether pdb stops before the step.

    Returns:
        The exit code: 1 if the script has ended before the step.
    """
    if _GPUS not in environ and _PROCESSES not in environ:
        variable = _GPUS if probe().count else _PROCESSES
        environ[variable] = "1"
    environ["PARALLELIZE_NUM_NODES"] = "1"
    script = words[0]
    # The script sees what it would see if Python had started it: its arguments, and its own folder
    # as the first place of modules.
    sys.argv[:] = words
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with replaying(Replay(Path(checkpoint).absolute(), step, debugs=debugs)):
            runpy.run_path(script, run_name="__main__")
    except StepReplayed:
        return 0
    sys.stderr.write(
        f"{script} has ended before step {step}: does it enter checkpoints() of this folder?\n"
    )
    return 1
