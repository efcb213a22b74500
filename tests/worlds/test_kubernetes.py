"""examples/16_kubernetes: each pod's process runs the example with the variables that Kubeflow sets, on loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from ranks import free_port

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "16_kubernetes"


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
    text = (EXAMPLES.parent / copied).read_text()
    assert "epochs=10" in text
    (tmp_path / "train.py").write_text(text.replace("epochs=10", "epochs=4"))
    return tmp_path / "train.py"


def trainjob() -> list[Mapping[str, str]]:
    """Each pod starts its processes."""
    pods = number("trainjob.yaml", "numNodes")
    names = {"PET_NNODES": str(pods), "PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": "127.0.0.1"}
    port = {"PET_MASTER_PORT": str(free_port())}
    return [{**names, **port, "PET_NODE_RANK": str(index)} for index in range(pods)]


def pytorchjob() -> list[Mapping[str, str]]:
    """Each pod, which needs one process, is a rank."""
    pods = number("pytorchjob.yaml", "replicas")
    names = {"WORLD_SIZE": str(pods), "MASTER_ADDR": "127.0.0.1", "PARALLELIZE_PROCESSES": "1"}
    port = {"MASTER_PORT": str(free_port())}
    return [{**names, **port, "RANK": str(index)} for index in range(pods)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("job", [trainjob, pytorchjob])
def test_all_pods_return_one_accuracy(job: Callable[[], list[Mapping[str, str]]], script: Path) -> None:
    """As the image's script prints it at its end."""
    (line,) = set(accuracies(job(), script))
    assert float(line.split()[-1]) > 0.8
