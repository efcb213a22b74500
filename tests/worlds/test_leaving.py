"""The end of a rank: what the function leaves in its process ends as at the end of a program, and loses nothing."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from parallelize import distributed

pytestmark = pytest.mark.slow

KEPT = """
import concurrent.futures, multiprocessing, sys
import torch
from torch.utils.data import DataLoader
from parallelize import distributed

kept = []

def square(number):
    return number * number

def of_joblib():
    import joblib
    return joblib.Parallel(n_jobs=2)(joblib.delayed(square)(number) for number in range(4))[3]

def of_scikit_learn():
    from sklearn.model_selection import cross_val_score
    from sklearn.tree import DecisionTreeClassifier
    inputs = torch.arange(20.0).reshape(-1, 1).numpy()
    scores = cross_val_score(DecisionTreeClassifier(), inputs, [0, 1] * 10, cv=2, n_jobs=2)
    return 9 * int(len(scores) == 2)

def of_threads():
    kept.append(concurrent.futures.ThreadPoolExecutor(2))
    return kept[0].submit(square, 3).result()

def of_processes():
    kept.append(concurrent.futures.ProcessPoolExecutor(2))
    return kept[0].submit(square, 3).result()

def of_spawned_processes():
    context = multiprocessing.get_context("spawn")
    kept.append(concurrent.futures.ProcessPoolExecutor(1, mp_context=context))
    return kept[0].submit(pow, 3, 2).result()

def of_pool():
    kept.append(multiprocessing.Pool(2))
    return kept[0].map(square, [3])[0]

def of_loader():
    kept.append(DataLoader([9.0, 1.0], num_workers=2, persistent_workers=True))
    return int(next(iter(kept[0])))

@distributed(processes=2)
def train(function):
    return function()

print(train.all_ranks(globals()[f"of_{sys.argv[1]}"]))
"""


@pytest.mark.parametrize(
    "kind", ["joblib", "scikit_learn", "threads", "processes", "spawned_processes", "pool", "loader"]
)
def test_what_is_idle_ends_with_the_rank(kind: str, tmp_path: Path) -> None:
    """Executors, pools and loaders that the function keeps: no grace is over, no process is killed, nothing is said."""
    package = {"joblib": "joblib", "scikit_learn": "sklearn"}.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:  # an import would set variables
        pytest.skip(f"{package} is not installed")
    script = tmp_path / "script.py"
    script.write_text(KEPT)
    done = subprocess.run([sys.executable, script, kind], capture_output=True, text=True, check=False)
    assert done.stdout == "[9, 9]\n", done.stderr
    unexpected = [line for line in done.stderr.splitlines() if "kept changed" not in line]
    assert not any("ended" in line or "leaked" in line or "Error" in line for line in unexpected), done.stderr


SUBMITTED = """
import concurrent.futures, pathlib, sys, time
from parallelize import distributed, rank

Executor = getattr(concurrent.futures, sys.argv[1])

def write(path):
    time.sleep(0.5)
    pathlib.Path(path).touch()

@distributed(processes=2)
def train():
    executor = Executor(1)
    for number in range(3):
        executor.submit(write, f"written.{rank()}.{number}")
    return rank()

print(train.all_ranks())
"""


@pytest.mark.parametrize("executor", ["ThreadPoolExecutor", "ProcessPoolExecutor"])
def test_what_was_submitted_is_done_after_the_return(executor: str, tmp_path: Path) -> None:
    """Also what waits in the queue: one process does it at its end, a rank does it within its grace."""
    script = tmp_path / "script.py"
    script.write_text(SUBMITTED)
    command = [sys.executable, script, executor]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == "[0, 1]\n", done.stderr
    assert done.stderr == ""
    assert len(list(tmp_path.glob("written.*"))) == 6


@distributed(processes=2)
def terminate_children(count: int) -> set[int | None]:
    codes = set()
    for _ in range(count):
        child = get_context("fork").Process(target=time.sleep, args=[300])
        child.start()
        child.terminate()
        child.join()
        codes.add(child.exitcode)
    return codes


def test_a_forked_child_is_terminated_as_in_one_process() -> None:
    """Wherever it is at that moment, and so the processes of a pool: the rank's handler is not the child's."""
    assert terminate_children.all_ranks(20) == [{-signal.SIGTERM}] * 2
