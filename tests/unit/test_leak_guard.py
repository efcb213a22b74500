"""The leak guard of conftest.py detects each kind of leak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEAKS = {
    "child process": (
        """
        import subprocess, sys
        def test_it():
            global kept
            kept = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        """,
        "process *time.sleep(600)*",
    ),
    "orphan": (
        """
        import subprocess, sys
        def test_it():
            child = "import time; time.sleep(600)"
            parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
            subprocess.run([sys.executable, "-c", parent], check=True)
        """,
        "process *time.sleep(600)*",
    ),
    "child of the fork server": (
        """
        import multiprocessing, time
        def test_it():
            global kept
            kept = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
            kept.start()
        """,
        "process *forkserver*",
    ),
    "thread": (
        """
        import threading
        def test_it():
            threading.Thread(target=threading.Event().wait, name="lasting", daemon=True).start()
        """,
        "thread 'lasting' (Thread)",
    ),
    "process group": (
        """
        import torch.distributed as dist
        def test_it():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        """,
        "an initialised process group of 1",
    ),
    "new variable": (
        """
        import os
        def test_it():
            os.environ["LEFT"] = "1"
        """,
        "variable LEFT: None became '1'",
    ),
    "removed variable": (
        """
        import os
        def test_it():
            del os.environ["GIVEN"]
        """,
        "variable GIVEN: 'yes' became None",
    ),
    "signal handler": (
        """
        import signal
        def test_it():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        """,
        "handler of SIGTERM: *SIG_IGN*",
    ),
    "import path": (
        """
        import sys
        def test_it():
            sys.path.insert(0, "/elsewhere")
        """,
        "sys.path: '/elsewhere' was added or removed",
    ),
}

HARMLESS = """
    import multiprocessing, os, subprocess, sys, threading
    def test_it(monkeypatch):
        monkeypatch.setenv("GIVEN", "other")
        subprocess.run([sys.executable, "-c", ""], check=True)
        thread = threading.Thread(target=len, args=("",))
        thread.start()
        worker = multiprocessing.get_context("forkserver").Process(target=len, args=("",))
        worker.start()
        worker.join()
        thread.join()
"""


@pytest.fixture
def guarded(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], pytest.RunResult]:
    """Return a function that runs a test file in a separate pytest, with this project's conftest."""
    monkeypatch.setenv("GIVEN", "yes")

    def run(source: str) -> pytest.RunResult:
        pytester.makeconftest(CONFTEST.read_text().replace("GRACE_S = 30.0", "GRACE_S = 0.2"))
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=240)

    return run


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_fails_its_test(leak: str, guarded: Callable[[str], pytest.RunResult]) -> None:
    """A test that leaks has an error that names the leak."""
    source, named = LEAKS[leak]
    result = guarded(source)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*left behind:*", f"*{named}"])


def test_cleaned_up_resources_are_no_leak(guarded: Callable[[str], pytest.RunResult]) -> None:
    """Processes, threads and variables that end with their test, and the fork server, are accepted."""
    guarded(HARMLESS).assert_outcomes(passed=1)


def test_a_leak_does_not_fail_the_next_test(guarded: Callable[[str], pytest.RunResult]) -> None:
    """A leak of one test is cleaned up before the next one starts."""
    first, _ = LEAKS["new variable"]
    second = """
        def test_next():
            assert "LEFT" not in os.environ
        """
    guarded(first + second).assert_outcomes(passed=2, errors=1)


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_scripts_run_as_users_run_them(how: str, run_script: Callable[..., object]) -> None:
    """Each way of running a script passes its arguments and variables."""
    result = run_script(
        "import os, sys\nprint(sys.argv[1:], os.environ['GIVEN'])", how=how, args=("a", "b"), env={"GIVEN": "yes"}
    )
    assert result.stdout == "['a', 'b'] yes\n"
