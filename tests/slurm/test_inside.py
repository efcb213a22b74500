"""Calls inside jobs of a real cluster whose host names do not resolve: srun, sbatch, salloc, a shell, torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import ADDRESSES, Cluster
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from parallelize.cluster.slurm_step import first_host

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from parallelize import distributed, rank

@distributed(**{"timeout": 200, **json.loads(sys.argv[1])})
def where():
    total = torch.ones(1) * rank()
    dist.all_reduce(total)
    return [total.item(), dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", 0)), os.uname().nodename]

try:
    result = where()
except Exception as error:
    result = [type(error).__name__, str(error)]
print(json.dumps(result), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A user's script; its argument is the options of its call."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def command(script: str, **options: Any) -> list[str]:
    return [sys.executable, script, json.dumps(options)]


def values(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """Return the JSON lines that the processes printed."""
    lines = [line.removeprefix("^@") for line in done.stdout.splitlines()]  # a terminal's echo
    found = [json.loads(line) for line in lines if line.startswith("[")]
    assert found, done.stderr
    return found


def test_one_task_per_process_is_a_rank(cluster: Cluster, script: str) -> None:
    """Two nodes x two tasks join one world, and each has rank 0's value."""
    done = cluster.run("srun", "-N2", "--ntasks-per-node=2", *command(script))
    assert [value[:2] for value in values(done)] == [[6.0, 4]] * 4


def test_one_task_per_node_starts_the_nodes_processes(cluster: Cluster, script: str) -> None:
    """Each of two tasks starts two processes on its node."""
    done = cluster.run("srun", "-N2", "--ntasks-per-node=1", *command(script, processes=2))
    assert values(done) == [[6.0, 4, 2, "n1"]] * 2


CALL_IN_A_WORKER = """
import json, os, subprocess, sys
from parallelize import distributed, rank

@distributed(processes=2, timeout=200)
def outer():
    if rank() == 0:
        options = json.dumps({"processes": 2})
        return subprocess.run([sys.executable, sys.argv[1], options], capture_output=True, text=True).stdout

if __name__ == "__main__":
    text = outer()
    if os.environ["SLURM_PROCID"] == "0":
        print(text, flush=True)
"""


def test_a_program_that_a_worker_starts_makes_its_own_call(cluster: Cluster, script: str, tmp_path: Path) -> None:
    """It is no task of the worker's step, and its processes are on the worker's node."""
    (tmp_path / "outer.py").write_text(CALL_IN_A_WORKER)
    done = cluster.run("srun", "-N2", "--ntasks-per-node=1", sys.executable, str(tmp_path / "outer.py"), script)
    assert values(done) == [[1.0, 2, 2, "n1"]]


def test_cyclic_task_distribution(cluster: Cluster, script: str) -> None:
    """Under salloc, `srun -m cyclic` puts rank 1 on the second node, and all ranks join one world."""
    inside = ["srun", "-m", "cyclic", "--ntasks-per-node=2", *command(script)]
    done = cluster.run("salloc", "-N2", "--ntasks-per-node=2", *inside)
    assert [value[:2] for value in values(done)] == [[6.0, 4]] * 4


@pytest.mark.soak
def test_a_job_script(cluster: Cluster, script: str, tmp_path: Path) -> None:
    """One job of two nodes runs without srun, with `--ntasks` only, with a wrong num_nodes, and with torchrun."""
    quoted = " ".join(f"'{part}'" for part in command(script))
    alone_on_node = " ".join(f"'{part}'" for part in command(script, processes=2, num_nodes=1))
    too_many = " ".join(f"'{part}'" for part in command(script, processes=1, num_nodes=3))
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --nproc-per-node=2 --master-addr=127.0.0.1 --master-port=29611"
    )
    lines = [
        "#!/bin/bash",
        "#SBATCH --nodes=2 --ntasks=2",
        quoted,
        alone_on_node,
        f"srun {quoted}",
        f"srun {too_many} | tail -n 1",
        f"{torchrun} {script} '{{}}'",
    ]
    (tmp_path / "job.sh").write_text("\n".join(lines))
    state = cluster.sbatch(f"--output={tmp_path}/log", str(tmp_path / "job.sh"))
    text = (tmp_path / "log").read_text()
    result = [json.loads(line) for line in text.splitlines() if line.startswith(('["', "[1.0"))]
    assert len(result) == 7, text
    refused, local, first, second, mismatch, *launched = result
    assert state == "COMPLETED"
    assert refused[0] == "ConfigError"
    assert "start it as srun --nodes=2" in refused[1]
    assert local == [1.0, 2, 2, "n1"]
    assert [each[:2] for each in (first, second)] == [[1.0, 2]] * 2
    assert "nodes: 3 asked for, 2 started" in mismatch[1]
    assert "--nodes=3" in mismatch[1]
    assert launched == [[1.0, 2, 2, "n1"]] * 2


def test_a_heterogeneous_job(cluster: Cluster, script: str, tmp_path: Path) -> None:
    """The tasks of two components join one world; rank 0 is on the node that comes last in the list of the step."""
    quoted = " ".join(f"'{part}'" for part in command(script))
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\nsrun --het-group=0,1 {quoted}\n")
    components = ["-N1", "-n2", "--exclude=n1", ":", "-N1", "-n1", "--exclude=n2"]
    state = cluster.sbatch(f"--output={tmp_path}/log", *components, str(tmp_path / "job.sh"))
    text = (tmp_path / "log").read_text()
    results = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
    assert state == "COMPLETED", text
    assert [(total, size, node) for total, size, _, node in results] == [(3.0, 3, "n2")] * 3, text


def test_the_components_of_a_step(cluster: Cluster, script: str) -> None:
    """The components of a step in an ordinary job, of which Slurm lists rank 0's node last, meet at MASTER_ADDR."""
    step = ["srun", "-N1", "-n1", "-w", "n2", *command(script), ":", "-N1", "-n1", "-w", "n1", *command(script)]
    done = cluster.run("salloc", "-N2", "-n2", *step, env={"MASTER_ADDR": ADDRESSES["n2"]})
    assert [value[:2] for value in values(done)] == [[1.0, 2]] * 2


def test_a_shell_on_a_compute_node(cluster: Cluster, script: str) -> None:
    """With `srun --pty` on a compute node, a call starts its processes there."""
    inside = " ".join(f"'{part}'" for part in ["srun", "-N1", "-n1", "--pty", *command(script, processes=2)])
    done = cluster.run("script", "--quiet", "--return", "--command", inside, "/dev/null")
    assert values(done) == [[1.0, 2, 2, "n1"]]


HOSTS = st.lists(
    st.sampled_from(["n1", "n[1-2]", "rack[1-2]-node[3-4]", "a[01-03,7]b", "gpu-a100-[005-010]", "x", "r1n[9-11]"]),
    min_size=1,
    max_size=3,
).map(",".join)


@given(nodelist=HOSTS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_the_first_host_is_slurms(cluster: Cluster, nodelist: str) -> None:
    """It is the first host that `scontrol show hostnames` lists."""
    expanded = cluster.run("scontrol", "show", "hostnames", nodelist).stdout.split()
    assume(expanded)  # Slurm refuses a suffix after a single bracket
    assert first_host(nodelist) == expanded[0]
