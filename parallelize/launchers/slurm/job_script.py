"""The job script: what a person reads, keeps and hands to sbatch, and what `submit` queues."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelize.errors import ConfigError

__all__ = ["GUARD", "Script"]

_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9-]*")

_TO_ITS_END = """\
# A signal ends a wait, not the step.
while true; do
    wait "$step"; code=$?
    kill -0 "$step" 2>/dev/null || exit "$code"
done"""

GUARD = f"""\
#!/bin/bash
# srun's task on each node: runs a command. Slurm asks tasks to end (TERM) some time before it ends them; while the job
# runs, it is being preempted, and the training is told to stop; else it was cancelled, and the command ends at once.
asked_to_end() {{
    state="$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")"
    if [ "$state" = RUNNING ]; then touch "$stop"; else kill "$step"; fi
}}
trap asked_to_end TERM
"$@" &
step=$!
{_TO_ITS_END}
"""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A job script.

    Args:
        flags: options of sbatch by name, in order; True: a flag without a value.
        modules: environment modules to load, after a purge.
        env: variables to export.
        setup: shell lines, run as they are.
        step: the command that srun starts once on every node.
        srun: options of srun.
        folder: the job's folder.
    """

    flags: Mapping[str, str | int | bool]
    modules: Sequence[str]
    env: Mapping[str, str]
    setup: Sequence[str]
    step: Sequence[str]
    srun: Sequence[str]
    folder: Path

    def __str__(self) -> str:
        """The script's text.

        Raises:
            ConfigError: an option of sbatch that would not stay on its line.
        """
        return "\n".join(["#!/bin/bash", *self._directives(), *self._preparation(), "", *self._run(), ""])

    def _directives(self) -> Iterator[str]:
        for name, value in self.flags.items():
            if _FLAG.fullmatch(name) is None or set(str(value)) & {"\n", "\r"}:
                raise ConfigError(
                    f"sbatch option {name}={value!r}",
                    why="it would end its line in the job script, and what follows would be a command",
                    fix="use the long name of an option, and a value without line breaks",
                )
            if value is not False:
                # sbatch takes quotes as a shell does.
                yield f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"

    def _preparation(self) -> Iterator[str]:
        if self.modules:
            yield from ("", "module purge")
            yield from (f"module load {shlex.quote(module)}" for module in self.modules)
        if self.env:
            yield ""
            yield from (f"export {name}={shlex.quote(value)}" for name, value in self.env.items())
        if self.setup:
            yield from ("", *self.setup)

    def _run(self) -> Iterator[str]:
        yield f"folder={shlex.quote(str(self.folder))}"
        yield 'job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"'
        yield 'attempt="${SLURM_RESTART_COUNT:-0}"'
        yield ""
        yield "# Slurm signals this script (B:) before the time limit and on preemption; should_stop() sees the file."
        yield 'export stop="$folder/stop.$job.$attempt"'
        yield """trap 'touch "$stop"' USR2"""
        yield ""
        yield f"""{shlex.join(["srun", *self.srun])} bash "$folder/guard.sh" \\"""
        yield f"    {shlex.join(self.step)} \\"
        yield """    "$folder" --job "$job" --attempt "$attempt" --index "${SLURM_ARRAY_TASK_ID:-0}" &"""
        yield "step=$!"
        yield _TO_ITS_END
