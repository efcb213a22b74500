"""The command line on a real cluster."""

from __future__ import annotations

import json
import sys

import pytest
from cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "parallelize"]


@pytest.mark.soak
def test_the_doctor_in_a_job(cluster: Cluster) -> None:
    """In a job, doctor reports the job and runs an all-reduce of two ranks; in salloc's shell it warns."""
    done = cluster.run("srun", "-N1", "-n1", *COMMAND, "doctor", "--json")
    found = json.loads(done.stdout)
    assert {each["status"] for each in found} == {"ok"}
    assert any("in Slurm job" in each["what"] for each in found)

    done = cluster.run("salloc", "-N2", *COMMAND, "doctor", "--json")
    problems = [each["what"] for each in json.loads(done.stdout) if each["status"] != "ok"]
    assert problems == ["srun did not start this process"]
