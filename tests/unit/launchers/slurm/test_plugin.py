"""The Slurm launcher's job scripts and errors, on a machine without Slurm."""

from __future__ import annotations

import subprocess
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from parallelize import ConfigError, LaunchError, SlurmLauncher, distributed
from parallelize.config.config import Config
from parallelize.launchers.slurm.commands import without_job_variables
from parallelize.launchers.slurm.job_folder import JobFolder
from parallelize.launchers.slurm.job_script import format_memory, format_time_limit
from parallelize.launchers.slurm.job_state import JobState, query_state

# A job on 12 nodes of 8 GPUs, with a module and variables for NCCL, and a mail at the end.
FULL_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --partition=gpu
#SBATCH --nodes=12
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gres=gpu:v100:8
#SBATCH --mem=200G
#SBATCH --time=1-02:00:00
#SBATCH --signal=B:USR2@300
#SBATCH --mail-user=me@example.org
#SBATCH --mail-type=END,FAIL
#SBATCH --requeue
#SBATCH --exclusive
#SBATCH --comment='two words'
#SBATCH --output='{folder}/%j.log'
#SBATCH --open-mode=append

module purge
module load NCCL/2.4.7-1-cuda.10.0

export NCCL_SOCKET_IFNAME='^docker0,lo'
export NCCL_DEBUG=INFO
export MASTER_PORT=12910

source env.sh

folder='{folder}'
job="${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
attempt="${{SLURM_RESTART_COUNT:-0}}"

# Slurm signals this script (B:) before the time limit and on preemption; should_stop() sees the file.
export stop="$folder/stop.$job.$attempt"
trap 'touch "$stop"' USR2

srun --kill-on-bad-exit=1 --cpus-per-task=32 bash "$folder/wrapper.sh" \\
    python3 -X 'a b' -u -m parallelize.launchers.slurm.step --max-requeues 3 \\
    "$folder" --job "$job" --attempt "$attempt" --index "${{SLURM_ARRAY_TASK_ID:-0}}" &
step=$!
# A trapped signal interrupts wait: wait again until the step has ended.
while true; do
    wait "$step"; code=$?
    kill -0 "$step" 2>/dev/null || exit "$code"
done
"""


def train() -> None:
    """Do nothing; submitted by these tests."""


def test_a_script_with_all_options(tmp_path: Path) -> None:
    """Every option has its line, in order, and every value is quoted."""
    path = tmp_path / "a folder" / "train.sh"
    path.parent.mkdir()
    launcher = SlurmLauncher(
        partition="gpu",
        time="1-02:00:00",
        mem="200G",
        cpus_per_task=4,
        gpu_type="v100",
        modules=["NCCL/2.4.7-1-cuda.10.0"],
        env={"NCCL_SOCKET_IFNAME": "^docker0,lo", "NCCL_DEBUG": "INFO", "MASTER_PORT": "12910"},
        setup=["source env.sh"],
        sbatch={"exclusive": True, "--comment": "two words", "overcommit": False},
        mail_user="me@example.org",
        max_requeues=3,
        python=["python3", "-X", "a b"],
    )
    distributed(launcher=launcher, gpus=8, num_nodes=12)(train).sbatch_script(path)
    assert path.read_text() == FULL_SCRIPT.format(folder=path.resolve().with_name("train.sh.job"))
    for script in (path, path.with_name("train.sh.job") / "wrapper.sh"):
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_a_script_without_options(tmp_path: Path) -> None:
    """It requests nodes, tasks, the signal and requeueing, and sets the output file."""
    distributed(launcher="slurm", processes=2)(train).sbatch_script(tmp_path / "job.sh")
    names = [line.split("--")[1].split("=")[0] for line in (tmp_path / "job.sh").read_text().splitlines()
             if line.startswith("#SBATCH")]  # fmt: skip
    assert names == ["job-name", "nodes", "ntasks-per-node", "signal", "requeue", "output", "open-mode"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("4:00:00", "4:00:00"),
        ("15:00", "15:00"),
        (" 1-02 ", "1-02"),
        ("1-02:00:00", "1-02:00:00"),
        (90, "90"),
        (1, "1"),
        (timedelta(hours=23, minutes=59, seconds=59), "0-23:59:59"),
        (timedelta(hours=23, minutes=59, seconds=60), "1-00:00:00"),
        (timedelta(days=1, hours=2, minutes=3, seconds=4), "1-02:03:04"),
        (timedelta(seconds=0.5), "0-00:00:01"),
    ],
)
def test_times_are_formatted_for_slurm(value: Any, text: str) -> None:
    """A time limit is Slurm's text, minutes, or a timedelta rounded up."""
    assert format_time_limit(value) == text


def test_sizes_are_formatted_for_slurm() -> None:
    """A memory size is Slurm's text or megabytes; 0 is all memory of a node."""
    assert [format_memory(value) for value in (0, 1, " 64G ")] == ["0", "1", "64G"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"time": "4 hours"}, "time='4 hours'"),
        ({"time": True}, "time=True"),
        ({"time": 0}, "time=0"),
        ({"time": timedelta(0)}, "time=datetime.timedelta(0)"),
        ({"mem": "64 gigs"}, "mem='64 gigs'"),
        ({"mem": -1}, "mem=-1"),
        ({"cpus_per_task": 0}, "cpus_per_task=0"),
        ({"max_requeues": -1}, "max_requeues=-1"),
        ({"stop_before": 300}, "stop_before=300"),
        ({"stop_before": "soon"}, "stop_before='soon'"),
        ({"time": "999999999d"}, "time='999999999d'"),
        ({"modules": "cuda"}, r"modules='cuda'"),
        ({"setup": "source env.sh"}, "setup='source env.sh'"),
        ({"env": {"A B": "1"}}, "'A B'"),
        ({"sbatch": {"nodes": 2}}, "'nodes'"),
        ({"sbatch": {"ntasks_per_node": 8}}, "'ntasks_per_node'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], named: str) -> None:
    """The constructor's error names the option and its value."""
    with pytest.raises(ConfigError) as refused:
        SlurmLauncher(**options)
    assert named in str(refused.value)


def test_all_faults_come_at_once() -> None:
    """A wrong time and a wrong size are two faults in one error."""
    with pytest.raises(ConfigError, match="2 faults"):
        SlurmLauncher(time="soon", mem="much")


@pytest.mark.parametrize(
    ("asked", "named"),
    [({}, "processes="), ({"gpus": "auto"}, "gpus='auto'"), ({"gpus": [0, 2]}, "use gpus=2")],
)
def test_a_job_needs_numbers_of_gpus_or_processes(asked: dict[str, Any], named: str, tmp_path: Path) -> None:
    """A job cannot request all GPUs of an unknown node, or certain ones."""
    with pytest.raises(ConfigError, match="launcher='slurm'") as refused:
        distributed(launcher="slurm", **asked)(train).sbatch_script(tmp_path / "job.sh")
    assert named in str(refused.value)


def test_the_plan_has_the_requests_gpus() -> None:
    """The layout uses the requested GPUs, which this machine need not have; dp has one process per node."""
    layout = SlurmLauncher().plan(Config.parse(gpus=4, num_nodes=2, launcher="slurm"))
    assert (layout.world_size, layout.device_type, layout.config.launcher) == (8, "cuda", None)
    assert SlurmLauncher().plan(Config.parse(backend="dp", gpus=4)).local_world_size == 1


def test_explain_describes_the_job() -> None:
    """explain() shows the processes of the job, and not the hardware of this machine."""
    text = distributed(launcher="slurm", gpus=4, num_nodes=2)(train).explain()
    assert "2 node(s) x 4 = 8" in text
    assert "a job of 2 node(s), by slurm" in text


@pytest.mark.parametrize("method", ["submit", "submit_many", "sbatch_script"])
def test_only_batch_launchers_submit(method: str, tmp_path: Path) -> None:
    """With the default launcher the submit methods raise an error that names SlurmLauncher."""
    argument = {"submit": (), "submit_many": ([{}],), "sbatch_script": (tmp_path / "job.sh",)}[method]
    with pytest.raises(ConfigError, match="SlurmLauncher"):
        getattr(distributed(processes=2)(train), method)(*argument)


def test_a_machine_without_slurm_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without sbatch the error says to use a login node or to write the script."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"no 'sbatch'.*\n.*\n.*sbatch_script"):
        distributed(launcher=SlurmLauncher(folder=tmp_path), processes=1)(train).submit()


def test_an_argument_that_cannot_be_pickled_is_refused_before_submission(tmp_path: Path) -> None:
    """The error names the argument, and nothing is submitted."""
    with pytest.raises(ConfigError, match="argument 'lock'"):
        distributed(launcher=SlurmLauncher(folder=tmp_path), processes=1)(lambda lock: lock).submit(
            lock=threading.Lock()
        )


def test_a_job_does_not_inherit_the_job_around_it() -> None:
    """Variables of the outer job are removed, except Slurm's configuration."""
    environ = {"SLURM_CONF": "c", "SLURM_NTASKS": "4", "SBATCH_PARTITION": "p", "SRUN_CPUS": "1", "HOME": "/h"}
    assert without_job_variables(environ) == {"SLURM_CONF": "c", "HOME": "/h"}


@pytest.fixture
def stub_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Creates a command that prints a text, or fails; PATH contains no other command."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(command: str, text: str | None) -> None:
        path = tmp_path / command
        path.write_text("#!/bin/sh\n" + ("exit 1\n" if text is None else f"echo '{text}'\n"))
        path.chmod(0o755)

    return make


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"squeue": "PENDING|Resources"}, JobState("PENDING", "Resources")),
        ({"squeue": "RUNNING|None", "sacct": "CANCELLED by 0"}, JobState("RUNNING")),
        ({"squeue": None, "sacct": "CANCELLED by 1000"}, JobState("CANCELLED", "by 1000")),
        ({"squeue": "", "sacct": "TIMEOUT"}, JobState("TIMEOUT")),
        ({"squeue": None, "sacct": None, "scontrol": "JobId=1 JobState=FAILED Reason=NonZeroExitCode x=y"},
         JobState("FAILED", "NonZeroExitCode")),
        ({"squeue": None, "sacct": None, "scontrol": None}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_state_comes_from_the_first_command_that_answers(
    stub_command: Any, answers: dict[str, str | None], expected: JobState | None
) -> None:
    """squeue, scontrol and sacct are asked in this order; the state is None if none answers."""
    for command, text in answers.items():
        stub_command(command, text)
    assert query_state("1") == expected


def test_a_folder_is_found_by_job_id_and_by_path(tmp_path: Path) -> None:
    """The link of a submission is found by job ID, also for an array element."""
    folder = JobFolder.make(tmp_path, "<lambda> x/y")
    assert folder.path.name.startswith("lambda-x-y-")
    assert folder.path.stat().st_mode & 0o077 == 0
    (folder.path / "call.json").write_text("{}")
    folder.link("12")
    for number, parent in (("12", tmp_path), ("12_3", tmp_path), ("99", folder.path)):
        assert JobFolder.find(number, parent).path == folder.path


def test_a_job_id_leads_to_its_latest_job(tmp_path: Path) -> None:
    """A new cluster counts from 1 again, and two clusters may share a home folder."""
    first, second = JobFolder.make(tmp_path, "first"), JobFolder.make(tmp_path, "second")
    for folder in (first, second):
        (folder.path / "call.json").write_text("{}")
        folder.link("12")
    assert JobFolder.find("12", tmp_path).path == second.path


def test_durations_may_be_written() -> None:
    """Texts such as "5min" are the same as a timedelta."""
    written = SlurmLauncher(time="4h", stop_before="5min")
    assert written == SlurmLauncher(time="4h", stop_before=timedelta(minutes=5))
    assert format_time_limit("4h") == format_time_limit(timedelta(hours=4)) == "0-04:00:00"
