"""Time limits and preemption on a real cluster: jobs stop at a step and resume from it."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, wait_for

from parallelize import SlurmLauncher, distributed, is_main, rank, should_stop

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def count(folder: str, steps: int, pause_s: float = 0.05) -> dict[str, Any]:
    """Count to `steps` across attempts; save the step when asked to stop, which is the same on every rank."""
    saved = Path(folder) / "saved.pt"
    state = torch.load(saved) if saved.exists() else {"step": 0, "starts": []}
    state["starts"].append(state["step"])
    for step in range(state["step"], steps):
        if is_main():
            (Path(folder) / "step").write_text(f"{os.environ.get('SLURM_RESTART_COUNT', '0')} {step}")
        if should_stop():
            stopped = [None] * dist.get_world_size()
            dist.all_gather_object(stopped, step)
            assert len(set(stopped)) == 1, stopped
            if is_main():
                torch.save({**state, "step": step}, saved)
            return {"stopped": step, "rank": rank()}
        time.sleep(pause_s)
    return {"starts": state["starts"], "attempt": os.environ.get("SLURM_RESTART_COUNT", "0")}


def counting(folder: Path, *, num_nodes: int = 1, processes: int = 2, **options: Any) -> Any:
    launcher = SlurmLauncher(folder=folder / "jobs", **{"time": "10:00", **options})
    return distributed(launcher=launcher, num_nodes=num_nodes, processes=processes, timeout=200)(count)


def has_begun(folder: Path) -> Any:
    return (folder / "step").exists


def restarts(cluster: Cluster, job_id: str) -> str:
    shown = cluster.run("scontrol", "show", "job", job_id, "--oneliner").stdout
    return shown.partition("Restarts=")[2].split()[0]


@pytest.mark.soak
def test_a_signalled_job_of_an_array_resumes(cluster: Cluster, tmp_path: Path) -> None:
    """One of two jobs is asked to stop: only it is requeued, and it resumes at the step where its ranks stopped."""
    folders = [tmp_path / name for name in ("left", "right")]
    for folder in folders:
        folder.mkdir()
    jobs = counting(tmp_path, processes=2).submit_many([{"folder": str(each), "steps": 100} for each in folders],
                                                       at_most=1)  # fmt: skip
    wait_for(has_begun(folders[0]), 200, jobs[0].logs)
    cluster.run("scancel", "--signal=USR2", "--batch", jobs[0].id)
    first, second = (job.result(timeout_s=250) for job in jobs)
    assert first["attempt"] == "1"
    assert first["starts"][0] == 0
    assert 0 < first["starts"][1] < 100
    assert second == {"starts": [0], "attempt": "0"}
    abandoned = jobs[0].log.parent / f"{jobs[0].id}.0"
    assert (abandoned / "stop.acknowledged").exists()
    assert not (abandoned / "result").exists()


@pytest.mark.soak
def test_a_preempted_job_resumes(cluster: Cluster, tmp_path: Path) -> None:
    """A job of higher priority gets both nodes; the first stops on both at one step, waits, and resumes."""
    job = counting(tmp_path, num_nodes=2, processes=1, partition="main", sbatch={"exclusive": True}).submit(
        str(tmp_path), steps=100
    )
    wait_for(has_begun(tmp_path), 200, job.logs)
    done = cluster.run("sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "--wrap", "sleep 1")
    assert done.returncode == 0, done.stderr
    value = job.result(timeout_s=250)
    assert value["attempt"] == "1", job.logs()
    assert 0 < value["starts"][1] < 100
    assert restarts(cluster, job.id) == "1"


@pytest.mark.soak
def test_a_job_whose_tasks_get_sigterm_resumes(cluster: Cluster, tmp_path: Path) -> None:
    """A cluster with control groups sends TERM only to srun's task on preemption, while the job is still RUNNING."""
    job = counting(tmp_path, processes=1).submit(str(tmp_path), steps=100)
    wait_for(has_begun(tmp_path), 200, job.logs)
    rank_script = [str(job.log.parent / "rank.sh")]
    (task,) = (each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [])[1:2] == rank_script)
    task.send_signal(signal.SIGTERM)
    assert job.result(timeout_s=250)["attempt"] == "1"


@pytest.mark.soak
def test_no_more_requeues_than_asked_for(cluster: Cluster, tmp_path: Path) -> None:
    """With max_requeues=0 the value returned after should_stop() is the result."""
    job = counting(tmp_path, processes=1, max_requeues=0).submit(str(tmp_path), steps=100_000)
    wait_for(has_begun(tmp_path), 200, job.logs)
    cluster.run("scancel", "--signal=USR2", "--batch", job.id)
    assert job.result(timeout_s=250)["stopped"] > 0


SCRIPT = """
import os, pathlib, signal, sys, time
import torch.distributed as dist
from parallelize import distributed, rank, should_stop

@distributed(timeout=200, processes=int(sys.argv[2]))
def train():
    step = 0
    while not should_stop():
        pathlib.Path(sys.argv[1], "step").touch()
        step += 1
        time.sleep(0.02)
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    return len(set(steps))

print(train(), signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_should_stop_in_a_users_own_job_script(cluster: Cluster, tmp_path: Path, processes: int) -> None:
    """`sbatch --signal` reaches srun's tasks: all ranks stop at one step, and the handlers are removed."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = f"srun {sys.executable} {script} {tmp_path} {processes}"
    done = cluster.run("sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "-o", f"{tmp_path}/log", "--wrap", command)
    wait_for(has_begun(tmp_path), 200, "the tasks start")
    cluster.run("scancel", "--signal=USR1", done.stdout.strip())
    wait_for(lambda: not cluster.run("squeue", "-h").stdout, 200, "the job ends")
    assert sorted((tmp_path / "log").read_text().splitlines())[:2] == ["1 True", "1 True"]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_job_resumes_after_its_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """With a limit of one minute and a signal before it, the job is requeued until the final step."""
    options = {"time": 1, "stop_before": timedelta(seconds=20)}
    job = counting(tmp_path, processes=2, **options).submit(str(tmp_path), steps=90, pause_s=1.0)
    value = job.result(timeout_s=500)
    assert int(value["attempt"]) >= 1
    # On a busy machine, an attempt may be stopped before its first step.
    assert value["starts"] == sorted(value["starts"])
    assert value["starts"][-1] > 0
