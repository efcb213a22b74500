"""What the Slurm launcher writes and refuses, on a machine without Slurm."""

from __future__ import annotations

import subprocess
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from parallelize import ConfigError, LaunchError, SlurmLauncher, distributed
from parallelize.config.config import Config
from parallelize.launchers.slurm import value_formats
from parallelize.launchers.slurm.commands import outer_environ
from parallelize.launchers.slurm.job_folder import JobFolder
from parallelize.launchers.slurm.job_state import State, look_up

# The cluster of the seeds: 12 nodes of 8 GPUs, NCCL's own module and variables, a mail at the end.
SEEDS = """\
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

srun --kill-on-bad-exit=1 --cpus-per-task=32 bash "$folder/guard.sh" \\
    python3 -X 'a b' -u -m parallelize.launchers.slurm.step --max-requeues 3 \\
    "$folder" --job "$job" --attempt "$attempt" --index "${{SLURM_ARRAY_TASK_ID:-0}}" &
step=$!
# A signal ends a wait, not the step.
while true; do
    wait "$step"; code=$?
    kill -0 "$step" 2>/dev/null || exit "$code"
done
"""


def train() -> None:
    """What the jobs of these tests would run."""


def test_the_seeds_cluster_as_a_script(tmp_path: Path) -> None:
    """Every setting of the seeds has its line, in order, and every value is quoted."""
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
    assert path.read_text() == SEEDS.format(folder=path.resolve().with_name("train.sh.job"))
    for script in (path, path.with_name("train.sh.job") / "guard.sh"):
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_a_plain_script_asks_for_nothing_else(tmp_path: Path) -> None:
    """Without options there are the counts, the signal, and where output goes."""
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
        (timedelta(days=1, hours=2, minutes=3, seconds=4), "1-02:03:04"),
        (timedelta(seconds=0.5), "0-00:00:01"),
    ],
)
def test_times_are_slurms(value: Any, text: str) -> None:
    """Slurm's own text, minutes, or a timedelta rounded up."""
    assert value_formats.time_limit(value) == text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"time": "4 hours"}, "time='4 hours'"),
        ({"time": True}, "time=True"),
        ({"time": timedelta(0)}, "time=datetime.timedelta(0)"),
        ({"mem": "64 gigs"}, "mem='64 gigs'"),
        ({"mem": -1}, "mem=-1"),
        ({"cpus_per_task": 0}, "cpus_per_task=0"),
        ({"max_requeues": -1}, "max_requeues=-1"),
        ({"stop_before": 300}, "stop_before=300"),
        ({"modules": "cuda"}, r"modules='cuda'"),
        ({"setup": "source env.sh"}, "setup='source env.sh'"),
        ({"env": {"A B": "1"}}, "'A B'"),
        ({"sbatch": {"nodes": 2}}, "'nodes'"),
        ({"sbatch": {"ntasks_per_node": 8}}, "'ntasks_per_node'"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], named: str) -> None:
    """Where the launcher is made, by name and value."""
    with pytest.raises(ConfigError) as refused:
        SlurmLauncher(**options)
    assert named in str(refused.value)


def test_all_faults_come_at_once() -> None:
    """A wrong time and a wrong size are two faults of one error."""
    with pytest.raises(ConfigError, match="2 faults"):
        SlurmLauncher(time="soon", mem="much")


@pytest.mark.parametrize(
    ("asked", "named"),
    [({}, "processes="), ({"gpus": "auto"}, "gpus='auto'"), ({"gpus": [0, 2]}, "use gpus=2")],
)
def test_a_queue_must_be_told_numbers(asked: dict[str, Any], named: str, tmp_path: Path) -> None:
    """All GPUs of a node that nobody has seen, or certain ones, cannot be asked for."""
    with pytest.raises(ConfigError, match="Slurm") as refused:
        distributed(launcher="slurm", **asked)(train).sbatch_script(tmp_path / "job.sh")
    assert named in str(refused.value)


def test_the_plan_has_the_requests_gpus() -> None:
    """Processes are planned for GPUs that this machine need not have; dp's node rules hold."""
    layout = SlurmLauncher().plan(Config.parse(gpus=4, num_nodes=2, launcher="slurm"))
    assert (layout.world_size, layout.device_type, layout.config.launcher) == (8, "cuda", None)
    assert SlurmLauncher().plan(Config.parse(backend="dp", gpus=4)).local_world_size == 1


def test_explain_tells_of_the_job() -> None:
    """On a machine without GPUs: the processes of the job, nothing of this machine."""
    text = distributed(launcher="slurm", gpus=4, num_nodes=2)(train).explain()
    assert "2 node(s) x 4 = 8" in text
    assert "a job of 2 node(s), by slurm" in text


@pytest.mark.parametrize("method", ["submit", "submit_many", "sbatch_script"])
def test_only_a_queue_takes_submissions(method: str, tmp_path: Path) -> None:
    """On the launcher of this machine the methods say what to use."""
    argument = {"submit": (), "submit_many": ([{}],), "sbatch_script": (tmp_path / "job.sh",)}[method]
    with pytest.raises(ConfigError, match="SlurmLauncher"):
        getattr(distributed(processes=2)(train), method)(*argument)


def test_a_machine_without_slurm_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No sbatch: says to go to a login node, or to write the script."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"no 'sbatch'.*\n.*\n.*sbatch_script"):
        distributed(launcher=SlurmLauncher(folder=tmp_path), processes=1)(train).submit()


def test_what_cannot_travel_is_refused_before_the_queue(tmp_path: Path) -> None:
    """A lock among the arguments is named, and nothing is submitted."""
    with pytest.raises(ConfigError, match="argument 'lock'"):
        distributed(launcher=SlurmLauncher(folder=tmp_path), processes=1)(lambda lock: lock).submit(
            lock=threading.Lock()
        )


def test_a_job_does_not_inherit_the_job_around_it() -> None:
    """Task counts and options of an outer job are not those of the inner one; Slurm's configuration is."""
    environ = {"SLURM_CONF": "c", "SLURM_NTASKS": "4", "SBATCH_PARTITION": "p", "SRUN_CPUS": "1", "HOME": "/h"}
    assert outer_environ(environ) == {"SLURM_CONF": "c", "HOME": "/h"}


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a command that prints a text, or fails; no other command is there."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(command: str, text: str | None) -> None:
        path = tmp_path / command
        path.write_text("#!/bin/sh\n" + ("exit 1\n" if text is None else f"echo '{text}'\n"))
        path.chmod(0o755)

    return make


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"squeue": "PENDING|Resources"}, State("PENDING", "Resources")),
        ({"squeue": "RUNNING|None", "sacct": "CANCELLED by 0"}, State("RUNNING")),
        ({"squeue": None, "sacct": "CANCELLED by 1000"}, State("CANCELLED", "by 1000")),
        ({"squeue": "", "sacct": "TIMEOUT"}, State("TIMEOUT")),
        ({"squeue": None, "sacct": None, "scontrol": "JobId=1 JobState=FAILED Reason=NonZeroExitCode x=y"},
         State("FAILED", "NonZeroExitCode")),
        ({"squeue": None, "sacct": None, "scontrol": None}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_state_is_asked_of_whoever_knows(says: Any, answers: dict[str, str | None], expected: State | None) -> None:
    """Queue, controller, accounting, in this order; none of them: nobody knows."""
    for command, text in answers.items():
        says(command, text)
    assert look_up("1") == expected


def test_a_folder_is_found_by_number_and_by_itself(tmp_path: Path) -> None:
    """Through the link that a submission leaves, array elements included."""
    folder = JobFolder.make(tmp_path, "<lambda> x/y")
    assert folder.path.name.startswith("lambda-x-y-")
    assert folder.path.stat().st_mode & 0o077 == 0
    (folder.path / "call.json").write_text("{}")
    folder.link("12")
    for number, parent in (("12", tmp_path), ("12_3", tmp_path), ("99", folder.path)):
        assert JobFolder.of(number, parent).path == folder.path


def test_a_number_leads_to_its_latest_job(tmp_path: Path) -> None:
    """Numbers begin again with a cluster, and two clusters may share a home folder."""
    first, second = JobFolder.make(tmp_path, "first"), JobFolder.make(tmp_path, "second")
    for folder in (first, second):
        (folder.path / "call.json").write_text("{}")
        folder.link("12")
    assert JobFolder.of("12", tmp_path).path == second.path
