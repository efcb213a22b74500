"""One Slurm cluster for all tests in this folder; each test starts and ends without jobs."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, missing, running


@pytest.fixture(scope="session")
def lab() -> Iterator[Cluster]:
    """The running cluster, shared by all tests."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="plz-slurm-"))
    folder.chmod(0o755)
    try:
        with running(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(lab: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, set as that of this process's Slurm commands; the test's jobs are cancelled at the end."""
    for name, value in {**lab.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}.items():
        monkeypatch.setenv(name, value)
    yield lab
    lab.cancel_all()
