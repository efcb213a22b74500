"""The leak guard of conftest.py detects each kind of leak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = Path(__file__).parents[1] / "conftest.py"


SLEEP = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}])"
FORK = "multiprocessing.get_context('forkserver').Process"
# Modules to import, the lines of a test, and what the guard says
LEAKS = {
    "child process": (
        "subprocess, sys",
        f"global kept; kept = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])",
        "process *time.sleep(600)*",
    ),
    "orphan": (
        "subprocess, sys",
        f"subprocess.run([sys.executable, '-c', {PARENT!r}], check=True)",
        "process *time.sleep(600)*",
    ),
    "child of the fork server": (
        "multiprocessing, time",
        f"global kept; kept = {FORK}(target=time.sleep, args=(600,)); kept.start()",
        "process *forkserver*",
    ),
    "thread": (
        "threading",
        "threading.Thread(target=threading.Event().wait, name='lasting', daemon=True).start()",
        "thread 'lasting' (Thread)",
    ),
    "process group": (
        "torch.distributed as dist",
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "an initialised process group of 1",
    ),
    "new variable": ("os", "os.environ['LEFT'] = '1'", "variable LEFT: None became '1'"),
    "removed variable": ("os", "del os.environ['GIVEN']", "variable GIVEN: 'yes' became None"),
    "signal handler": ("signal", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "handler of SIGTERM: *SIG_IGN*"),
    "import path": ("sys", "sys.path.insert(0, '/elsewhere')", "sys.path: '/elsewhere' was added or removed"),
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


def leaking(leak: str) -> str:
    """Return a test file."""
    modules, body, _ = LEAKS[leak]
    return f"import {modules}\ndef test_it():\n    {body}\n"


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_fails_its_test(leak: str, guarded: Callable[[str], pytest.RunResult]) -> None:
    """A test that leaks has an error that names the leak."""
    result = guarded(leaking(leak))
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*left behind:*", f"*{LEAKS[leak][-1]}"])


def test_cleaned_up_resources_are_no_leak(guarded: Callable[[str], pytest.RunResult]) -> None:
    """Processes, threads and variables that end with their test, and the fork server, are accepted."""
    guarded(HARMLESS).assert_outcomes(passed=1)


def test_a_leak_does_not_fail_the_next_test(guarded: Callable[[str], pytest.RunResult]) -> None:
    """A leak of one test is cleaned up before the next one starts."""
    second = "def test_next():\n    assert 'LEFT' not in os.environ\n"
    guarded(leaking("new variable") + second).assert_outcomes(passed=2, errors=1)


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_scripts_run_as_users_run_them(how: str, run_script: Callable[..., object]) -> None:
    """Each way of running a script passes its arguments and variables."""
    result = run_script(
        "import os, sys\nprint(sys.argv[1:], os.environ['GIVEN'])", how=how, args=("a", "b"), env={"GIVEN": "yes"}
    )
    assert result.stdout == "['a', 'b'] yes\n"
