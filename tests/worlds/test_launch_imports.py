"""The fork server imports torch and known packages once; all other modules are imported by each worker."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """
import pathlib, sys
import PIL.Image, own, sklearn.datasets
from parallelize import distributed

@distributed(processes=2)
def train():
    loaded = [name in sys.modules for name in ("torch", "PIL.Image", "sklearn.datasets", "own")]
    import own
    return loaded, own.VALUE

print(train.all_ranks())
file = pathlib.Path(own.__file__)
file.write_text(file.read_text().replace("VALUE = 1", "VALUE = 22"))
print(train.all_ranks())
"""


@pytest.mark.parametrize(("variables", "is_forked"), [({}, True), ({"PARALLELIZE_PRELOAD": "0"}, False)])
def test_what_the_fork_server_imports(
    variables: dict[str, str], is_forked: bool, tmp_path: Path, run_script: Run
) -> None:
    """Known packages that the caller has imported; the user's own modules, edited between calls, are read again."""
    if importlib.util.find_spec("PIL") is None:
        pytest.skip("needs Pillow")
    (tmp_path / "own.py").write_text("VALUE = 1\n")
    shown = run_script(SCRIPT, env={"PYTHONDONTWRITEBYTECODE": "1", **variables}, timeout_s=100).stdout.splitlines()
    for line, value in zip(shown, (1, 22), strict=True):
        assert ast.literal_eval(line) == [([True, is_forked, is_forked, False], value)] * 2


SLOW = "import sys, time\nif '-c' in sys.orig_argv:\n    time.sleep(2)\n"
ANNOUNCED = """
from parallelize import distributed

@distributed(processes=2)
def train():
    return 1

train()
train()
"""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_first_call_of_more_than_a_second_says_what_it_starts(is_terminal: bool, tmp_path: Path) -> None:
    """One line on a terminal, none elsewhere and none for a call that starts at once."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    script = tmp_path / "script.py"
    script.write_text(ANNOUNCED)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    reading, writing = os.openpty() if is_terminal else os.pipe()
    subprocess.run(
        [sys.executable, script], stderr=writing, env={**os.environ, "PYTHONPATH": path}, timeout=100, check=True
    )
    os.write(writing, b"END\n")
    shown = b""
    while b"END" not in shown:
        shown += os.read(reading, 4096)
    os.close(reading)
    os.close(writing)
    first = shown.decode().splitlines()[0]
    line = "parallelize: starting 2 processes of train, which import torch and what this program has imported"
    assert first == (line if is_terminal else "END")


THREADS = """
import numpy, threadpoolctl
from parallelize import distributed

@distributed(processes=2)
def train():
    return {each["num_threads"] for each in threadpoolctl.threadpool_info() if each["internal_api"] == "openblas"}

print(train())
"""


def test_numpy_uses_the_threads_of_a_rank(run_script: Run) -> None:
    """The fork server's libraries read the workers' OMP_NUM_THREADS: ranks do not each use all cores."""
    if importlib.util.find_spec("threadpoolctl") is None:
        pytest.skip("reads the number of threads by threadpoolctl")
    cores = len(os.sched_getaffinity(0))
    assert run_script(THREADS, env={"OMP_NUM_THREADS": ""}).stdout.strip() == str({max(1, cores // 2)})
