"""The Slurm launcher's job scripts and errors, on a machine without Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from parallelize import ConfigError, Job, LaunchError, SlurmLauncher, distributed
from parallelize.call.outcome import Outcome
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.launchers.slurm.job import query_state, without_job_variables

# A job on 12 nodes of 8 GPUs, with a module and variables for NCCL, and a mail at the end.
FULL_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --partition=gpu
#SBATCH --nodes=12
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
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
folder='{folder}' logs=rank0
tasks=8 max_restarts=0
max_requeues=3
command=(python3 -X 'a b' -m parallelize.launchers.slurm.step)
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
    assert path.read_text().startswith(FULL_SCRIPT.format(folder=path.resolve().with_name("train.sh.job")))
    for script in (path, path.with_name("train.sh.job") / "rank.sh"):
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_a_script_without_options(tmp_path: Path) -> None:
    """It requests nodes, tasks, the signal and requeueing, and sets the output file."""
    distributed(launcher="slurm", processes=2)(train).sbatch_script(tmp_path / "job.sh")
    names = re.findall(r"^#SBATCH --([\w-]+)", (tmp_path / "job.sh").read_text(), re.MULTILINE)
    assert names == ["job-name", "nodes", "ntasks-per-node", "signal", "requeue", "output", "open-mode"]


def test_a_warning_about_a_script_is_at_the_users_line(tmp_path: Path) -> None:
    """It names the file that calls `sbatch_script`, and not the caller of that file."""
    wide = distributed(launcher="slurm", backend="dp", gpus=1, num_nodes=2)(train)
    with pytest.warns(UserWarning, match="at most 1 node") as shown:
        wide.sbatch_script(tmp_path / "job.sh")
    assert shown[0].filename == __file__


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("4:00:00", "4:00:00"),
        ("15:00", "15:00"),
        ("1-02", "1-02"),
        (90, "90"),
        ("4h", "240"),
        (timedelta(days=1, minutes=3, seconds=4), "1444"),
        (timedelta(seconds=0.5), "1"),
    ],
)
def test_times_are_formatted_for_slurm(value: Any, text: str, tmp_path: Path) -> None:
    """A time limit is Slurm's text, minutes, a text such as "4h", or a timedelta rounded up to minutes."""
    distributed(launcher=SlurmLauncher(time=value), processes=2)(train).sbatch_script(tmp_path / "job.sh")
    assert f"#SBATCH --time={text}\n" in (tmp_path / "job.sh").read_text()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stop_before": 300}, "stop_before=300"),
        ({"stop_before": "soon"}, "stop_before='soon'"),
        ({"modules": "cuda"}, r"modules='cuda'"),
        ({"setup": "source env.sh"}, "setup='source env.sh'"),
        ({"sbatch": {"nodes": 2}}, "'nodes'"),
        ({"sbatch": {"ntasks_per_node": 8}}, "'ntasks_per_node'"),
        ({"sbatch": {"gpus-per-task": 1}}, "'gpus-per-task'"),
        ({"stop_before": "soon", "modules": "cuda"}, "2 faults"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], named: str) -> None:
    """The constructor's error names the option and its value, and all faults at once."""
    with pytest.raises(ConfigError, match=named):
        SlurmLauncher(**options)


@pytest.mark.parametrize(
    ("asked", "named"),
    [({}, "processes="), ({"gpus": "auto"}, "gpus='auto'"), ({"gpus": [0, 2]}, "use gpus=2")],
)
def test_a_job_needs_numbers_of_gpus_or_processes(asked: dict[str, Any], named: str, tmp_path: Path) -> None:
    """A job cannot request all GPUs of an unknown node, or certain ones."""
    with pytest.raises(ConfigError, match=f"(?s)launcher='slurm'.*{named}|{named}.*launcher='slurm'"):
        distributed(launcher="slurm", **asked)(train).sbatch_script(tmp_path / "job.sh")


@pytest.mark.parametrize("asked", [{"processes": 2}, {"gpus": 0}])
def test_a_type_of_gpus_needs_gpus(asked: dict[str, Any], tmp_path: Path) -> None:
    """A job that requests none would run on CPUs, and nothing would say that the type was not asked for."""
    call = distributed(launcher=SlurmLauncher(gpu_type="a100"), **asked)(train)
    with pytest.raises(ConfigError, match=r"(?s)gpu_type='a100'.*no GPU.*gpus="):
        call.sbatch_script(tmp_path / "job.sh")
    call.options(gpus=1, processes=None).sbatch_script(tmp_path / "job.sh")
    assert "#SBATCH --gres=gpu:a100:1" in (tmp_path / "job.sh").read_text()


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, []),
        ({"mail_user": "me@example.org"}, ["mail-user=me@example.org", "mail-type=END,FAIL"]),
        ({"mail_type": "ALL"}, ["mail-type=ALL"]),
        ({"mail_type": "ALL", "mail_user": "me"}, ["mail-user=me", "mail-type=ALL"]),
    ],
)
def test_who_gets_mail_of_what(options: dict[str, Any], lines: list[str], tmp_path: Path) -> None:
    """Without an address Slurm notifies the user who submits; events that are asked for are never dropped."""
    distributed(launcher=SlurmLauncher(**options), processes=2)(train).sbatch_script(tmp_path / "job.sh")
    assert re.findall(r"^#SBATCH --(mail.*)", (tmp_path / "job.sh").read_text(), re.MULTILINE) == lines


def test_the_plan_has_the_requests_gpus() -> None:
    """The layout uses the requested GPUs, which this machine need not have; explain() shows it; dp has one process."""
    layout = SlurmLauncher().plan(Config.parse(gpus=4, num_nodes=2, launcher="slurm"))
    assert (layout.world_size, layout.device_type, layout.config.launcher) == (8, "cuda", None)
    assert SlurmLauncher().plan(Config.parse(backend="dp", gpus=4)).local_world_size == 1
    text = distributed(launcher="slurm", gpus=4, num_nodes=2)(train).explain()
    assert "2 node(s) x 4 = 8" in text
    assert "2 node(s), by slurm" in text


@pytest.mark.parametrize("method", ["submit", "submit_many", "sbatch_script"])
def test_only_batch_launchers_submit(method: str, tmp_path: Path) -> None:
    """With the default launcher the submit methods raise an error that names SlurmLauncher."""
    argument = {"submit": (), "submit_many": ([{}],), "sbatch_script": (tmp_path / "job.sh",)}[method]
    with pytest.raises(ConfigError, match="SlurmLauncher"):
        getattr(distributed(processes=2)(train), method)(*argument)


def test_what_cannot_be_submitted_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without sbatch the error says to use a login node or to write the script; an argument is named before that."""
    monkeypatch.setenv("PATH", str(tmp_path))
    function = distributed(launcher=SlurmLauncher(folder=tmp_path), processes=1)(lambda lock=None: lock)
    with pytest.raises(LaunchError, match=r"no 'sbatch'.*\n.*\n.*sbatch_script"):
        function.submit()
    with pytest.raises(ConfigError, match="argument 'lock'"):
        function.submit(lock=threading.Lock())


def test_a_job_does_not_inherit_the_job_around_it() -> None:
    """Variables of the outer job are removed, except Slurm's configuration."""
    environ = {"SLURM_CONF": "c", "SLURM_NTASKS": "4", "SBATCH_SIGNAL": "9", "SRUN_CPUS": "1", "HOME": "/h"}
    assert without_job_variables(environ) == {"SLURM_CONF": "c", "HOME": "/h"}
    rendezvous = {"MASTER_ADDR": "n1", "MASTER_PORT": "29400"}
    assert without_job_variables(rendezvous) == rendezvous
    assert without_job_variables({"RANK": "0", "LOCAL_RANK": "0", **rendezvous}) == {}
    of_mpirun = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert without_job_variables({**rendezvous, **of_mpirun}) == rendezvous


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, []),
        ({"account": "a", "partition": "p"}, ["--account=a", "--partition=p"]),
        ({"qos": "q", "sbatch": {"reservation": "r"}}, ["--qos=q", "--reservation=r"]),
        ({"account": "a", "sbatch": {"account": False, "partition": None}}, []),
    ],
)
def test_the_users_defaults_of_sbatch_count_where_the_launcher_has_no_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], arguments: list[str]
) -> None:
    """Clusters tell users to export SBATCH_ACCOUNT; for sbatch, a variable wins over a line of the script."""
    for name, value in {
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_TIMELIMIT": "1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }.items():
        monkeypatch.setenv(name, value)
    executable(tmp_path / "sbatch", f'echo "$SBATCH_ACCOUNT$SBATCH_TIMELIMIT" "$@" > {tmp_path}/record; echo 12')
    launcher = SlurmLauncher(folder=tmp_path / "jobs", **options)
    distributed(launcher=launcher, processes=1)(train).submit()
    account, parsable, *others, _ = (tmp_path / "record").read_text().split()
    assert (account, parsable, others) == ("mine", "--parsable", arguments)


# command -> its output; None: it fails, and says that it cannot reach the controller
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"squeue": "PENDING (Resources)"}, "PENDING (Resources)"),
        ({"squeue": "RUNNING (None)", "sacct": "CANCELLED by 0"}, "RUNNING"),
        ({"squeue": "", "sacct": "CANCELLED by 1000"}, "CANCELLED by 1000"),
        ({"squeue": "", "sacct": None}, "UNKNOWN"),
        ({"squeue": ""}, "UNKNOWN"),
        ({"squeue": None, "sacct": "RUNNING"}, "UNREACHABLE (no controller)"),
        ({}, "UNREACHABLE (this machine has no 'squeue')"),
    ],
)
def test_an_unknown_job_is_not_an_unreachable_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, str | None], expected: str
) -> None:
    """squeue and sacct are asked in this order; only if squeue has answered, the job may be unknown."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for command, text in answers.items():
        executable(tmp_path / command, "echo no controller >&2; exit 1" if text is None else f"echo '{text}'")
    assert query_state("1") == expected


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_job_is_found_by_its_number_and_by_its_folder(tmp_path: Path) -> None:
    """An element of an array, too."""
    (tmp_path / "train-1" / "call.0").mkdir(parents=True)
    (tmp_path / "12").symlink_to("train-1")
    for number, parent in (("12", tmp_path), (12, tmp_path), ("12_3", tmp_path), ("99", tmp_path / "train-1")):
        assert Job.attach(number, parent).log == tmp_path / "train-1" / f"{number}.log"


def test_a_job_id_leads_to_its_latest_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new cluster counts from 1 again. Only the user can access a job's files, since they are unpickled."""
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "sbatch", "echo 12")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    function = distributed(launcher=SlurmLauncher(folder=tmp_path), processes=1)(lambda: 1)
    jobs = [function.submit() for _ in range(2)]
    assert all(job.log.parent.stat().st_mode & 0o077 == 0 for job in jobs)
    assert Job.attach(12, tmp_path).log == jobs[1].log != jobs[0].log


def test_an_outage_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long Slurm does not answer, a job without a result is not done; the outage is one line."""
    monkeypatch.setattr("parallelize.launchers.slurm.job._RESULT_DELAY_S", 0.0)
    monkeypatch.setattr("parallelize.launchers.slurm.job._QUERY_EVERY_S", 0.1)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "call.0").mkdir()
    job = Job.attach("12", tmp_path)

    def end() -> None:
        (tmp_path / "12.0").mkdir()
        Outcome.returned(World(), 42).write(tmp_path / "12.0" / "outcome.0")
        (tmp_path / "partial").write_text('[0, 1, "12.0"]')
        (tmp_path / "partial").replace(tmp_path / "result.12")

    assert (job.state, job.done()) == ("UNREACHABLE", False)
    threading.Timer(1.5, end).start()
    assert job.result() == 42
    assert capsys.readouterr().err == "slurm job 12: UNREACHABLE (this machine has no 'squeue')\n"
    assert job.done()
