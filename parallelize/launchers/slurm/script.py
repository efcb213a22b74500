"""The sbatch script of a job, and the script that srun starts for each rank.

    job.sh                    on the first node: begins a run, waits for its step, and decides
      │                       whether Slurm is to requeue the job
      │ srun
      ├── rank.sh of rank 0   redirects the output, starts the rank, and writes how it has ended
      │     └── step.py       the rank: makes the call, and writes its outcome
      └── rank.sh of rank 1
            └── step.py

What ends a run:

    all ranks return                  exit code 0: the job ends, or is requeued if the function has
                                      returned since should_stop() was true
    a rank raises, or dies            rank.sh exits with 1, and srun ends the other ranks
    USR2, before the time limit       goes to job.sh, which makes the stop file: should_stop()
                                      becomes true
    TERM, since the job is preempted  goes to each rank.sh, which makes the stop file
    TERM, since the job is cancelled  goes to each rank.sh, which passes it on to its rank
      or another rank has failed
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from parallelize.cluster.slurm_allocation import STOP_FILE_VARIABLE
from parallelize.errors import ConfigError

_OPTION_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")

RANK_SCRIPT = f"""\
#!/bin/bash
# srun starts this script for each rank, with the folder of the run, logs=, and the command of a
# rank.
run="$1" logs="$2"
shift 2
if [ "$logs" = all ]; then
    exec > >(sed -u "s/^/[rank $SLURM_PROCID] /") 2>&1
    trap 'sleep 0.2' EXIT  # sed may be ended with the step
elif [ "$SLURM_PROCID" != 0 ]; then
    if [ "$logs" = rank0 ]; then
        logs="$run"
    else
        logs="$logs/$SLURM_JOB_ID.$TORCHELASTIC_RESTART_COUNT"
    fi
    mkdir -p "$logs"
    exec > "$logs/rank$SLURM_PROCID.out" 2> "$logs/rank$SLURM_PROCID.err"
fi
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}}"
# Slurm sends TERM some time before KILL. If the job is still RUNNING and no rank has failed, it is
# being preempted: ask the function to stop. Otherwise the job was cancelled, or srun ends it
# because a rank has failed.
on_term() {{
    state="$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")"
    if [ "$state" = RUNNING ] && ! compgen -G "$run/exit.*" > /dev/null; then
        touch "${STOP_FILE_VARIABLE}"
    else
        kill "$rank" 2> /dev/null
    fi
}}
trap on_term TERM
trap '' USR1 USR2  # some clusters send them to every process of a job
"$@" "$run" &
rank=$!
# A trapped signal interrupts wait.
while kill -0 "$rank" 2> /dev/null; do wait "$rank" 2> /dev/null; done
wait "$rank" 2> /dev/null
code=$?
if [ ! -e "$run/outcome.$SLURM_PROCID" ]; then
    if [ "$code" -gt 128 ]; then code=$((128 - code)); fi  # of a signal, as Python shows it
    printf '{{"rank": %s, "host": "%s", "pid": %s, "exitcode": %s, "seen_at": %s}}' \\
        "$SLURM_PROCID" "$SLURMD_NODENAME" "$rank" "$code" "$(date +%s.%N)" \\
        > "$run/exit.$SLURM_PROCID"
    exit 1  # ends the other ranks, by --kill-on-bad-exit
fi
"""

_RUN = f"""\
job="${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
run="$folder/$job.${{SLURM_RESTART_COUNT:-0}}"
# The cores of each rank: as requested, else its part of the job's cores on the smallest node.
cores="$(tr , '\\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | head -n 1)"
cores="${{SLURM_CPUS_PER_TASK:-$((cores / tasks))}}"
if [ "$cores" -lt 1 ]; then cores=1; fi  # with --overcommit, ranks share a core

# Slurm signals this script (B:) before the time limit and on preemption; should_stop() sees the
# file.
export {STOP_FILE_VARIABLE}="$run/stop"
trap 'touch "$run/stop"' USR2
export TORCHELASTIC_RESTART_COUNT="${{SLURM_RESTART_COUNT:-0}}"
mkdir -p "$run"
ln -sf "$folder/call.${{SLURM_ARRAY_TASK_ID:-0}}/"* "$run/"
srun --kill-on-bad-exit=1 --cpus-per-task="$cores" \\
    bash "$folder/rank.sh" "$run" "$logs" "${{command[@]}}" &
step=$!
# A trapped signal interrupts wait.
while kill -0 "$step" 2> /dev/null; do wait "$step"; done
wait "$step"
code=$?

most=0
if [ "$code" -ne 0 ]; then
    most="$max_restarts"
elif [ -e "$run/stop.acknowledged" ]; then
    most="$max_requeues"
fi
if [ "$TORCHELASTIC_RESTART_COUNT" -lt "$most" ]; then
    echo "requeue $((TORCHELASTIC_RESTART_COUNT + 1)) of $most after exit code $code" >&2
    # Sleeps until Slurm kills this process: an earlier end, also by USR2, would end the job.
    # With exec, the script becomes the sleep: there is no child that Slurm could leave behind.
    trap '' USR2
    scontrol requeue "$job" && exec sleep 60
fi
echo "[$code, $SLURM_NTASKS, \\"$job.$TORCHELASTIC_RESTART_COUNT\\"]" > "$run/result"
mv "$run/result" "$folder/result.$job"
exit "$code"
"""


def job_script(options: Mapping[str, object], lines: Sequence[str]) -> str:
    """Return the text of a script for sbatch.

    Args:
        options: options of sbatch, by long name and in order; True: a flag without a value; False
            and None: omitted.
        lines: shell lines, copied unchanged. They set what follows uses: folder of the submission,
            tasks of each node, max_restarts after failures, max_requeues after a stop, logs, and
            the array command, which runs a rank.

    Raises:
        ConfigError: an option contains a line break.
    """
    directives = []
    for name, value in options.items():
        if _OPTION_NAME.fullmatch(name) is None or set(str(value)) & {"\n", "\r"}:
            raise ConfigError(
                f"sbatch option {name}={value!r}",
                why="it would end its line in the job script, and what follows would be a command",
                fix="use the long name of an option, and a value without line breaks",
            )
        if value is True:
            directives.append(f"#SBATCH --{name}")
        elif value is not None and value is not False:  # 0 is a value
            # sbatch parses quotes as a shell does.
            directives.append(f"#SBATCH --{name}={shlex.quote(str(value))}")
    return "\n".join(["#!/bin/bash", *directives, "", *lines, "", _RUN])
