"""examples/16_kubernetes: each pod's process runs the example with the variables that Kubeflow sets, on loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from ranks import free_port

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "16_kubernetes"


@pytest.fixture
def port() -> str:
    """A free port for the first pod."""
    return str(free_port())


def number(manifest: str, name: str) -> int:
    """Return the sum of a manifest's numbers with this name."""
    return sum(map(int, re.findall(rf"\b{name}: (\d+)", (FOLDER / manifest).read_text())))


def accuracies(pods: list[Mapping[str, str]], script: Path) -> list[str]:
    """Run the script in a process per pod, and return the last lines."""
    started = [
        subprocess.Popen([sys.executable, script], env={**os.environ, **pod}, stdout=subprocess.PIPE, text=True)
        for pod in pods
    ]
    return [process.communicate(timeout=250)[0].strip().splitlines()[-1] for process in started]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The example of the image, with fewer epochs."""
    (copied,) = re.findall(r"COPY (\S+) /workspace/train.py", (FOLDER / "Dockerfile").read_text())
    text = (EXAMPLES / copied).read_text()
    assert "epochs=10" in text
    (tmp_path / "train.py").write_text(text.replace("epochs=10", "epochs=4"))
    return tmp_path / "train.py"


@pytest.mark.timeout(120)
def test_trainjob(script: Path, port: str) -> None:
    """Each pod of a TrainJob starts its processes; all pods return one accuracy."""
    pods = number("trainjob.yaml", "numNodes")
    names = {"PET_NNODES": str(pods), "PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": "127.0.0.1"}
    each = [{**names, "PET_MASTER_PORT": port, "PET_NODE_RANK": str(index)} for index in range(pods)]
    lines = accuracies(each, script)
    assert len(set(lines)) == 1
    assert float(lines[0].split()[-1]) > 0.8


@pytest.mark.timeout(120)
def test_pytorchjob_with_one_device_per_pod(script: Path, port: str) -> None:
    """Each pod of a PyTorchJob that needs one process is a rank; all pods return one accuracy."""
    pods = number("pytorchjob.yaml", "replicas")
    names = {"WORLD_SIZE": str(pods), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PARALLELIZE_PROCESSES": "1"}
    each = [{**names, "RANK": str(index)} for index in range(pods)]
    lines = accuracies(each, script)
    assert float(lines[0].split()[-1]) > 0.8
