"""The sbatch script of a job, the wrapper that srun starts on each node, and the formats of sbatch's options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from parallelize.config.options import duration
from parallelize.errors import ConfigError, Fault

__all__ = ["WRAPPER", "JobScript", "format_memory", "format_time_limit"]

_OPTION_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
# minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)

_WAIT_FOR_STEP = """\
# A trapped signal interrupts wait: wait again until the step has ended.
while true; do
    wait "$step"; code=$?
    kill -0 "$step" 2>/dev/null || exit "$code"
done"""

WRAPPER = f"""\
#!/bin/bash
# srun's task on each node: runs a command. Slurm sends TERM some time before KILL. If the job is still RUNNING, it is
# being preempted: ask the training to stop. Otherwise it was cancelled: terminate the command.
on_term() {{
    state="$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")"
    if [ "$state" = RUNNING ]; then touch "$stop"; else kill "$step"; fi
}}
trap on_term TERM
"$@" &
step=$!
{_WAIT_FOR_STEP}
"""


@dataclass(frozen=True, kw_only=True)
class JobScript:
    """A script for sbatch; `str()` is its text.

    Args:
        options: options of sbatch, by long name and in order; True: a flag without a value; False: omitted.
        modules: environment modules to load, after a purge.
        env: environment variables to export.
        setup: shell lines, copied unchanged.
        step: the command that srun starts once on every node.
        srun: options of srun.
        folder: the job's folder.
    """

    options: Mapping[str, str | int | bool]
    modules: Sequence[str]
    env: Mapping[str, str]
    setup: Sequence[str]
    step: Sequence[str]
    srun: Sequence[str]
    folder: Path

    def __str__(self) -> str:
        """Return the script's text; raise ConfigError if an option of sbatch contains a line break."""
        return "\n".join(["#!/bin/bash", *self._directives(), *self._preparation(), "", *self._run(), ""])

    def _directives(self) -> Iterator[str]:
        for name, value in self.options.items():
            if _OPTION_NAME.fullmatch(name) is None or set(str(value)) & {"\n", "\r"}:
                raise ConfigError(
                    f"sbatch option {name}={value!r}",
                    why="it would end its line in the job script, and what follows would be a command",
                    fix="use the long name of an option, and a value without line breaks",
                )
            if value is not False:
                # sbatch parses quotes as a shell does.
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
        yield f"""{shlex.join(["srun", *self.srun])} bash "$folder/wrapper.sh" \\"""
        yield f"    {shlex.join(self.step)} \\"
        yield """    "$folder" --job "$job" --attempt "$attempt" --index "${SLURM_ARRAY_TASK_ID:-0}" &"""
        yield "step=$!"
        yield _WAIT_FOR_STEP


def format_time_limit(value: object) -> str | Fault:
    """Return `value` in the format of sbatch's --time, or a Fault if `value` is invalid.

    Args:
        value: Slurm's text ("4:00:00", "1-02:00:00"; "15:00" is minutes and seconds, "15" is minutes), minutes as int,
            a text such as "4h", or a timedelta, rounded up to a second.

    Source: https://slurm.schedmd.com/sbatch.html#OPT_time
    """
    value = duration(value) or value
    if isinstance(value, timedelta) and value > timedelta(0):
        seconds = -(-value // timedelta(seconds=1))
        return f"{seconds // 86400}-{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return str(value)
    if isinstance(value, str) and _TIME.fullmatch(value.strip()):
        return value.strip()
    return Fault(
        f"time={value!r}",
        "it is not a time limit of Slurm",
        "use '4:00:00', '1-02:00:00', '4h', minutes, or a timedelta",
    )


def format_memory(value: object) -> str | Fault:
    """Return `value` in the format of sbatch's --mem (per node), or a Fault if `value` is invalid.

    Args:
        value: Slurm's text ("64G", "2000M"), or megabytes as int.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    if isinstance(value, str) and _MEMORY.fullmatch(value.strip()):
        return value.strip()
    return Fault(f"mem={value!r}", "it is not a memory size of Slurm", "use '64G', or megabytes as a number")
