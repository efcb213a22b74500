"""The command line on a real cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "parallelize"]


def documents(text: str) -> list[dict[str, object]]:
    """Parse JSON documents that follow each other."""
    found, decoder = [], json.JSONDecoder()
    while text.strip():
        document, end = decoder.raw_decode(text.strip())
        found.append(document)
        text = text.strip()[end:]
    return found


@pytest.mark.soak
def test_the_doctor_in_a_job(cluster: Cluster) -> None:
    """In a job, doctor reports the job and runs an all-reduce of two ranks; in salloc's shell it warns."""
    done = cluster.run("srun", "-N1", "-n1", *COMMAND, "doctor", "--json", timeout_s=100)
    (task,) = documents(done.stdout)
    checks = {check["name"]: check for check in task["checks"]}
    assert checks["cluster"]["findings"] == []
    assert "in Slurm job" in checks["cluster"]["summary"]
    assert checks["all_reduce"]["status"] == "ok"
    assert checks["network"]["facts"]["name_is_reachable"] is False  # names do not resolve in this cluster

    done = cluster.run("salloc", "-N2", *COMMAND, "doctor", "--json", timeout_s=100)
    (shell,) = documents(done.stdout)
    (found,) = (check["findings"] for check in shell["checks"] if check["name"] == "cluster")
    assert [each["id"] for each in found] == ["slurm-one-of-several-nodes"]


def test_a_script_that_decorates_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """srun starts the command once on each node, and it starts two processes there: one world of four."""
    script = tmp_path / "s.py"
    script.write_text(
        "from parallelize import all_gather, is_main, rank\nranks = all_gather(rank())\nif is_main(): print(ranks)\n"
    )
    run = [*COMMAND, "run", "--processes", "2", "--timeout", "60", str(script)]
    done = cluster.run("srun", "-N2", "--ntasks-per-node=1", *run, cwd=tmp_path, timeout_s=100)
    assert (done.stdout, done.returncode) == ("[0, 1, 2, 3]\n", 0), done.stderr
