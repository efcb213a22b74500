"""launcher="ray" on a real Ray cluster of three nodes on this machine: `tox run -e ray`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from parallelize import MissingDependencyError, RayLauncher, distributed

CALLS = Path(__file__).with_name("ray_calls.py")

has_ray = importlib.util.find_spec("ray.cluster_utils") is not None if importlib.util.find_spec("ray") else False
needs_ray = pytest.mark.skipif(not has_ray, reason="ray is not installed")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what became of each call; all run on one cluster, because starting one takes ten seconds."""
    folder = tmp_path_factory.mktemp("ray")
    before = set(psutil.Process().children(recursive=True))
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(
        [sys.executable, CALLS, folder], env=environ, capture_output=True, text=True, timeout=560, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    new = [each for each in psutil.Process().children(recursive=True) if each not in before]
    _, alive = psutil.wait_procs(new, timeout=20)
    left = [" ".join(each.cmdline()) for each in alive]
    for each in alive:
        each.kill()
    return {**json.loads((folder / "results").read_text()), "out": done.stdout, "err": done.stderr, "left": left}


pytestmark = pytest.mark.timeout(600)


@needs_ray
def test_values_and_weights(results: dict[str, Any]) -> None:
    """Four processes on two nodes train one model; the caller gets all values, and the model's weights."""
    found = results["value"]
    assert found["values"] == [[number, 4.0, "1"] for number in range(4)]
    assert found["weight"] == -1.5


@needs_ray
def test_output_of_rank_0_is_shown(results: dict[str, Any]) -> None:
    """Ray shows rank 0's output, in calls and submitted jobs, and the launcher the job's states."""
    assert results["out"].count("trained by 0\n") == 2
    assert "trained by 1" not in results["out"]
    assert ": PENDING, for 2 x {'CPU': 2, 'worker': 1}\n" in results["err"]
    assert ": RUNNING\n" in results["err"]


@needs_ray
def test_exception_with_the_users_line(results: dict[str, Any]) -> None:
    """The exception has its own type, and notes with the rank and the line that raised it."""
    found = results["exception"]
    assert found["args"] == ["of the user"]
    assert "rank 3 of 4" in found["notes"]
    assert "# this line is in the notes" in found["notes"]


@needs_ray
def test_submitted_job(results: dict[str, Any]) -> None:
    """A job returns its value and state."""
    found = results["submitted"]
    assert (found["result"], found["state"]) == ([0, 2.0, "1"], "COMPLETED")


@needs_ray
def test_killed_actor(results: dict[str, Any]) -> None:
    """Without restarts the error says that an actor is gone; with one, the call runs again."""
    assert results["killed_actor"].startswith("LaunchError: a node of job lose_actor-")
    assert results["restarted"] == 0
    assert "restart 1 of 1 after LaunchError: a node of job" in results["err"]


@needs_ray
def test_cancelled_job(results: dict[str, Any]) -> None:
    """A running job that is cancelled leaves no worker, and its result raises."""
    found = results["cancelled"]
    assert (found["states"], found["ended"]) == (["RUNNING", "CANCELLED"], True)
    assert "was cancelled" in found["error"]


@needs_ray
def test_job_that_waits_for_resources(results: dict[str, Any]) -> None:
    """A job that the cluster has no resources for waits, and can be cancelled."""
    assert results["pending"] == ["PENDING", "CANCELLED"]


@needs_ray
def test_ctrl_c(results: dict[str, Any]) -> None:
    """KeyboardInterrupt reaches the caller, and no worker is left."""
    assert results["interrupted"] == {"ended": True}


@needs_ray
def test_lost_node(results: dict[str, Any]) -> None:
    """If a machine is lost, the error says so, and the workers of the other one end."""
    assert results["lost_node"]["error"].startswith("LaunchError: a node ")
    assert "is gone" in results["lost_node"]["error"]
    assert results["lost_node"]["ended"]


@needs_ray
def test_nothing_is_left(results: dict[str, Any]) -> None:
    """After all calls and the end of the cluster no process is left."""
    assert results["left"] == []


@pytest.mark.skipif(has_ray, reason="ray is installed")
def test_without_ray() -> None:
    """Without ray the error has the command that installs it."""
    with pytest.raises(MissingDependencyError, match=r"pip install 'parallelize\[ray\]'"):
        distributed(launcher=RayLauncher(), processes=2)(print)()
