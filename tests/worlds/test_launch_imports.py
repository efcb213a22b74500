"""Modules that the caller has imported are imported once, by the fork server, and again when a file has changed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]

PLAIN = """
import os
with open(os.environ["IMPORTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
VALUE = 1
"""
THREADED = (
    PLAIN
    + """
import threading
thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
"""
)
RANDOM = PLAIN + "import random\ngenerator = random.Random()\n"
CONNECTED = PLAIN + "import socket\nopened = socket.socket()\n"
ENDING = PLAIN + "import sys\nif sys.argv[0] == '-c':\n    sys.exit('not here')\n"

SCRIPT = """
import os, pathlib, sys
import pack.inner
from parallelize import distributed
from parallelize.launchers.elastic.plugin import ElasticLauncher

@distributed(processes=2)
def train():
    import pack.inner
    value = pack.inner.VALUE
    alive = pack.inner.thread.is_alive() if hasattr(pack.inner, "thread") else None
    return value, alive

def imports():
    return len(set(pathlib.Path(os.environ["IMPORTS"]).read_text().split()))

if __name__ == "__main__":
    print(train.all_ranks(), imports())
    print(train.all_ranks(), imports())
    if len(sys.argv) > 1:
        file = pathlib.Path(pack.inner.__file__)
        file.write_text(file.read_text().replace("VALUE = 1", "VALUE = 22"))
        print(train.all_ranks(), imports())
"""


@pytest.fixture
def call(tmp_path: Path, run_script: Run) -> Callable[..., list[str]]:
    """Return a function that writes an installed package with a module, runs the script, and returns what it prints."""

    def run(module: str, *args: str, folder: str = "site-packages", **variables: str) -> list[str]:
        package = tmp_path / folder / "pack"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "inner.py").write_text(module)
        path = f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{package.parent}"
        env = {"PYTHONPATH": path, "IMPORTS": str(tmp_path / "imports"), "PYTHONDONTWRITEBYTECODE": "1", **variables}
        return run_script(SCRIPT, args=args, env=env, timeout_s=100).stdout.splitlines()

    return run


def test_a_module_of_the_caller_is_imported_once_for_all_calls(call: Callable[..., list[str]]) -> None:
    """The caller and the fork server import it, and no worker; a file that has changed is imported again."""
    assert call(PLAIN, "edit") == ["[(1, None), (1, None)] 2", "[(1, None), (1, None)] 2", "[(22, None), (22, None)] 3"]


def test_a_module_of_the_users_own_is_imported_by_each_worker(call: Callable[..., list[str]]) -> None:
    """Edits between calls take effect, as in a notebook: only installed packages are imported in advance."""
    found = call(PLAIN, "edit", folder="own")
    assert found == ["[(1, None), (1, None)] 3", "[(1, None), (1, None)] 5", "[(22, None), (22, None)] 7"]


def test_a_variable_turns_it_off(call: Callable[..., list[str]]) -> None:
    """With PARALLELIZE_PRELOAD=0 each worker imports the modules."""
    assert call(PLAIN, PARALLELIZE_PRELOAD="0") == ["[(1, None), (1, None)] 3", "[(1, None), (1, None)] 5"]


@pytest.mark.parametrize(("module", "alive"), [(THREADED, True), (CONNECTED, None), (RANDOM, None)])
def test_a_module_that_cannot_be_shared_is_imported_by_each_worker(
    module: str, alive: bool | None, call: Callable[..., list[str]]
) -> None:
    """Forked processes lack the fork server's threads, and share its sockets and the state of its generators."""
    # The caller and the fork server, which keeps its process ID, and two workers per call.
    assert call(module) == [f"{[(1, alive)] * 2} 4", f"{[(1, alive)] * 2} 6"]


def test_a_module_that_fails_in_the_fork_server_is_left_to_the_workers(call: Callable[..., list[str]]) -> None:
    """An import that even ends the process does not end the fork server, and is silent."""
    assert call(ENDING) == ["[(1, None), (1, None)] 4", "[(1, None), (1, None)] 6"]


SLOW = "import sys, time\nif sys.argv[0] == '-c':\n    time.sleep(2)\n"
ANNOUNCED = """
import pack
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
    package = tmp_path / "site-packages" / "pack"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SLOW)
    script = tmp_path / "script.py"
    script.write_text(ANNOUNCED)
    path = f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{package.parent}"
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
