"""From the login node of a real cluster to a returned value."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, wait_for

from parallelize import ConfigError, Job, LaunchError, SlurmLauncher, WorkerError, distributed, parallel_model, rank

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


class BoomError(Exception):
    def __init__(self, number: int, word: str) -> None:
        super().__init__(f"{word} {number}")
        self.number = number


def work(what: str = "return", factor: int = 1, started: str = "") -> dict[str, Any]:
    total = torch.ones(1) * rank()
    dist.all_reduce(total)
    print(f"rank {rank()} is here")
    if started:
        Path(started).touch()
    if what != "return":
        if rank() == dist.get_world_size() - 1:
            if what == "raise":
                raise BoomError(3, "boom")
            if what == "killed":
                os.write(2, b"last words\n")
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "leave":
                os._exit(0)
        time.sleep(300)
    return {
        "total": total.item() * factor,
        "host": os.uname().nodename,
        "variables": [os.environ.get("GREETING"), os.environ.get("SUM")],
        "job": os.environ["SLURM_JOB_ID"],
    }


def submittable(folder: Path, *, num_nodes: int = 1, processes: int = 1, **options: Any) -> Any:
    launcher = SlurmLauncher(folder=folder / "jobs", **{"time": "10:00", **options})
    return distributed(launcher=launcher, num_nodes=num_nodes, processes=processes, timeout=200)(work)


def test_two_nodes_return_rank_0s_value(cluster: Cluster, tmp_path: Path) -> None:
    """Four processes connect by address; value, state, output and an attached Job are correct."""
    options = {"env": {"GREETING": "it's $HOME"}, "setup": ["export SUM=$((1 + 1))"], "sbatch": {"gres": "gpu:2"}}
    job = submittable(tmp_path, num_nodes=2, processes=2, **options).submit(factor=2)
    value = job.result(timeout_s=250)
    assert value == {"total": 12.0, "host": "n1", "variables": ["it's $HOME", "2"], "job": job.id}
    assert job.done()
    wait_for(lambda: job.state == "COMPLETED", 200, lambda: job.state)
    assert "rank 0 is here" in job.logs()
    again = Job.attach(job.id, tmp_path / "jobs")
    assert (again.result(), again.log) == (value, job.log)


class Trainer:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def fit(self) -> torch.Tensor:
        with parallel_model(self.model):
            self.model(torch.full((1, 2), 1.0 + rank())).sum().backward()
            self.optimizer.step()
        return self.model.weight.detach().clone()


def test_a_plain_call_brings_back_what_it_trained(cluster: Cluster, tmp_path: Path) -> None:
    """The weights and the optimizer's state are those of the job's rank 0, through two processes that pickle them."""
    launcher = SlurmLauncher(folder=tmp_path / "jobs", time="10:00")
    trainer = Trainer()
    weight = distributed(launcher=launcher, num_nodes=2, processes=1, timeout=200)(Trainer.fit)(trainer)
    assert torch.equal(trainer.model.weight, weight)
    assert trainer.optimizer.state[trainer.model.weight]["step"].item() == 1


def test_an_exception_of_rank_3_is_raised_in_the_caller(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While ranks 0 to 2 sleep, the exception arrives with its type, its rank and the job's output."""
    with pytest.raises(BoomError) as raised:
        submittable(tmp_path, num_nodes=2, processes=2)("raise")
    assert raised.value.number == 3
    notes = "\n".join(getattr(raised.value, "__notes__", []))
    assert "rank 3 of 4 on n2" in notes
    assert "rank 0 is here" in notes
    shown = capsys.readouterr()
    assert "rank 0 is here" in shown.out
    assert "RUNNING" in shown.err


def test_a_rank_that_is_killed_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """The others sleep; the error has its signal, its host and its last lines."""
    call = submittable(tmp_path, num_nodes=2, processes=1)
    with pytest.raises(WorkerError, match="rank 1 on n2 was ended by SIGKILL") as raised:
        call.submit("killed").result(timeout_s=250)
    assert (raised.value.rank, raised.value.signal_name) == (1, "SIGKILL")
    assert "last words" in "\n".join(raised.value.__notes__)
    with pytest.raises(WorkerError, match="rank 1 on n2 ended with exit code 0"):
        call.submit("leave").result(timeout_s=250)


def attempts(folder: str) -> list[str]:
    """Fail in the first attempt, on one rank only."""
    mark = Path(folder) / f"rank{rank()}"
    with mark.open("a") as file:
        file.write(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("is here")
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank() == 1 and mark.read_text() == "0":
        raise BoomError(1, "first")
    dist.all_reduce(total)
    return [(Path(folder) / f"rank{n}").read_text() for n in range(2)]


@pytest.mark.timeout(400)
def test_a_failed_job_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """After a failure Slurm starts the job again, as often as max_restarts; with logs="all", lines have their rank."""
    launcher = SlurmLauncher(folder=tmp_path / "jobs", time="10:00")
    call = distributed(launcher=launcher, processes=2, max_restarts=2, timeout=200, logs="all")(attempts)
    job = call.submit(str(tmp_path))
    assert job.result(timeout_s=300) == ["01", "01"]
    assert "requeue 1 of 2 after exit code 1" in job.logs()
    assert "[rank 1] is here" in job.logs()


def cores() -> list[Any]:
    return [torch.get_num_threads(), os.environ["SLURM_CPUS_PER_TASK"], os.environ["SLURM_STEP_TASKS_PER_NODE"]]


def test_ranks_share_the_cores_of_their_job(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a task of srun; of a whole node of 8 cores, each of two has 4; cpus_per_task= wins."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    for options, each in (({"sbatch": {"exclusive": True}}, 4), ({"cpus_per_task": 1}, 1)):
        launcher = SlurmLauncher(folder=tmp_path / "jobs", time="10:00", **options)
        found = distributed(launcher=launcher, processes=2, timeout=200)(cores).submit().result(timeout_s=250)
        assert found == [each, str(each), "2"]


def test_an_outage_of_the_controller_is_waited_out(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of which nothing is known is not done, and its result is awaited; one line says why."""
    job = submittable(tmp_path).submit()
    configuration = (cluster.folder / "slurm.conf").read_text()
    port = re.search(r"SlurmctldPort=(\d+)", configuration)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    assert port
    (tmp_path / "slurm.conf").write_text(configuration.replace(port[0], f"SlurmctldPort={nobody}"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    result = job.log.parent / f"result.{job.id}"
    hidden = Job.attach(job.id, tmp_path / "jobs")
    assert hidden.state == "UNREACHABLE"
    assert not hidden.done() or result.exists()
    assert hidden.result(timeout_s=250)["job"] == job.id
    assert capsys.readouterr().err.count("UNREACHABLE") <= 1


@pytest.mark.soak
def test_an_array_runs_every_call(cluster: Cluster, tmp_path: Path) -> None:
    """Four calls in one array, two at a time, return their values in order."""
    jobs = submittable(tmp_path).submit_many([{"started": str(tmp_path / f"{n}"), "factor": n} for n in range(4)],
                                             at_most=2)  # fmt: skip
    assert [job.id.partition("_")[2] for job in jobs] == ["0", "1", "2", "3"]
    assert len({job.id.partition("_")[0] for job in jobs}) == 1
    running = cluster.run("scontrol", "show", "job", jobs[0].id.partition("_")[0], "--oneliner").stdout
    assert "ArrayTaskThrottle=2" in running
    values = [job.result(timeout_s=250) for job in jobs]
    assert len({value["job"] for value in values}) == 4
    assert all((tmp_path / f"{n}").exists() for n in range(4))


@pytest.mark.soak
def test_a_running_job_is_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    """result() raises a WorkerError with the state CANCELLED."""
    job = submittable(tmp_path, processes=2).submit("sleep", started=str(tmp_path / "started"))
    wait_for((tmp_path / "started").exists, 200, job.logs)
    job.cancel()
    with pytest.raises(WorkerError, match=f"job {job.id} ended as CANCELLED") as raised:
        job.result(timeout_s=250)
    assert str(job.log) in "\n".join(getattr(raised.value, "__notes__", []))


@pytest.mark.soak
def test_a_job_killed_outright_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    """After SIGKILL to all of its processes, result() raises a WorkerError with Slurm's state."""
    job = submittable(tmp_path).submit("sleep", started=str(tmp_path / "started"))
    wait_for((tmp_path / "started").exists, 200, job.logs)
    cluster.run("scancel", "--signal=KILL", "--full", job.id)
    with pytest.raises(WorkerError, match=f"job {job.id} ended as (FAILED|CANCELLED)"):
        job.result(timeout_s=250)


def test_a_job_that_waits_has_no_result_yet(cluster: Cluster, tmp_path: Path) -> None:
    """A held job is PENDING, and result() times out; once cancelled, result() raises WorkerError."""
    job = submittable(tmp_path, sbatch={"hold": True}).submit()
    assert (job.state, job.done(), job.logs()) == ("PENDING", False, "")
    with pytest.raises(TimeoutError, match="PENDING"):
        job.result(timeout_s=0.5)
    job.cancel()
    with pytest.raises(WorkerError, match="CANCELLED"):
        job.result(timeout_s=250)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "nowhere"}, "invalid partition"),
        ({"sbatch": {"no-such-flag": 1}}, "unrecognized option"),
        ({"constraint": "a100"}, "[Ii]nvalid feature"),
        ({"mem": "64 gigs"}, "[Ii]nvalid --mem"),
    ],
)
def test_a_refusal_has_slurms_message(cluster: Cluster, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """An unknown partition, option or feature raises ConfigError with sbatch's message."""
    with pytest.raises(ConfigError, match=message):
        submittable(tmp_path, **options).submit()


@pytest.mark.soak
def test_a_script_does_what_submit_does(cluster: Cluster, tmp_path: Path) -> None:
    """A written script, passed to sbatch by hand, leaves its result in the folder beside it."""
    path = tmp_path / "my job.sh"
    submittable(tmp_path).sbatch_script(path, factor=5)
    done = cluster.run("sbatch", "--parsable", str(path), cwd=tmp_path)
    job_id = done.stdout.strip()
    assert job_id, done.stderr
    value = Job.attach(job_id, f"{path}.job").result(timeout_s=250)
    assert value["job"] == job_id


def test_ctrl_c_keeps_the_job_and_a_second_cancels_it(cluster: Cluster, tmp_path: Path) -> None:
    """The first Ctrl-C prints how to cancel the job, the second cancels it."""
    code = f"""
    from parallelize import SlurmLauncher, distributed
    launcher = SlurmLauncher(folder={str(tmp_path / "jobs")!r}, sbatch={{"hold": True}})
    distributed(launcher=launcher, processes=1)(lambda: 1)()
    """
    script = tmp_path / "script.py"
    script.write_text("\n".join(line.strip() for line in code.splitlines()))
    with subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = [process.stderr.readline()]
            assert "PENDING" in lines[0]
            job_id = lines[0].split()[2].rstrip(":")
            process.send_signal(signal.SIGINT)
            lines.append(process.stderr.readline())
            assert f"scancel {job_id}" in lines[-1]
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            process.wait(20)
            assert "KeyboardInterrupt" in process.stderr.read()
        finally:
            process.kill()

    def state() -> str:
        return cluster.run("scontrol", "show", "job", job_id).stdout

    wait_for(lambda: "CANCELLED" in state(), 200, state)  # the controller takes effect after scancel has returned


def test_an_unknown_job_is_refused(tmp_path: Path) -> None:
    """Job.attach raises LaunchError if the folder does not contain the job."""
    with pytest.raises(LaunchError, match="no job 4711"):
        Job.attach(4711, tmp_path)


def test_a_default_partition_of_the_user(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SBATCH_PARTITION is that of jobs whose launcher names none."""
    monkeypatch.setenv("SBATCH_PARTITION", "urgent")
    for options, partition in (({}, "urgent"), ({"partition": "main"}, "main")):
        job = submittable(tmp_path, **options).submit()
        assert f"Partition={partition} " in cluster.run("scontrol", "show", "job", job.id, "--oneliner").stdout
        job.cancel()


def test_a_folder_with_a_percent_sign(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm puts the user's name for %u in a path of an option, but the log is in the folder."""
    (tmp_path / "100%u").mkdir()
    job = submittable(tmp_path / "100%u").submit()
    assert job.result(timeout_s=250)["total"] == 0.0
    assert "rank 0 is here" in job.logs()


def test_an_overcommitted_job_runs(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm gives it one core for all of its ranks."""
    job = submittable(tmp_path, processes=2, sbatch={"overcommit": True}).submit()
    assert job.result(timeout_s=250)["total"] == 1.0
