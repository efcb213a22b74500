"""examples/10_slurm on a real cluster, run as its README says."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "10_slurm"


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    """A copy of the example, for its job folders."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "example"))


def python_first(cluster: Cluster) -> Mapping[str, str]:
    return {"PATH": f"{Path(sys.executable).parent}:{cluster.environ['PATH']}"}


def accuracy(text: str, errors: str = "") -> float:
    found = re.search(r"accuracy on 360 unseen images (\d\.\d+)\s*$", text)
    assert found, f"{text}\n{errors}"
    return float(found[1])


def test_the_single_device_script(cluster: Cluster, folder: Path) -> None:
    """It runs without a launcher and without a job."""
    done = cluster.run(sys.executable, "single.py", cwd=folder)
    assert accuracy(done.stdout, done.stderr) >= 0.93


@pytest.mark.soak
def test_the_job_script(cluster: Cluster, folder: Path) -> None:
    """It runs two nodes x two tasks on CPUs, requested by the environment only."""
    environ = {**python_first(cluster), "PARALLELIZE_PROCESSES": "2"}
    state = cluster.sbatch("multi.sbatch", cwd=folder, env=environ)
    (log,) = folder.glob("digits-*.log")
    assert state == "COMPLETED"
    assert accuracy(log.read_text()) >= 0.93


@pytest.mark.soak
def test_the_submitted_call(cluster: Cluster, folder: Path) -> None:
    """Without a job script, the value is printed on the login node."""
    environ = {**python_first(cluster), "PARALLELIZE_PROCESSES": "2"}
    done = cluster.run("python", "submit.py", cwd=folder, env=environ)
    assert accuracy(done.stdout, done.stderr) >= 0.93


@pytest.mark.soak
def test_the_search(cluster: Cluster, folder: Path) -> None:
    """Four calls run as one array; the best accuracy is printed last."""
    environ = {**python_first(cluster), "PARALLELIZE_PROCESSES": "1"}
    done = cluster.run("python", "search.py", cwd=folder, env=environ)
    assert len(re.findall(r"^\d\.\d{3}  \{", done.stdout, re.MULTILINE)) == 4, done.stderr
    assert accuracy(done.stdout, done.stderr) >= 0.93
