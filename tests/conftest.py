"""Fails a test that leaves something behind; runs user scripts the way users run them."""

from __future__ import annotations

import ctypes
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import pytest
from hypothesis import HealthCheck, settings

# What ends by itself gets this long to do so; it is only waited for in full by a test that fails.
GRACE_S = 5.0

# pytest keeps the name of the running phase in the first; the first optimizer loads torch._dynamo, which sets the
# other.
FOREIGN_VARIABLES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}

# pytest-timeout arms SIGALRM around each test.
FOREIGN_SIGNALS = {signal.SIGALRM} if sys.platform != "win32" else set()

# One per process, shared by all bars of the process, ended by tqdm at exit.
FOREIGN_THREADS = {"TMonitor"}


# Random inputs are about what is right: how long one takes is the machine's, which may have other work to do.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Started in the background by a shell, or by nohup, tests would ignore these, and so would every program they start.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@dataclass(frozen=True)
class Surroundings:
    """What a test finds and has to leave as it was."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    environ: Mapping[str, str]
    handlers: Mapping[int, object]
    path: tuple[str, ...]

    @classmethod
    def now(cls) -> Surroundings:
        return cls(
            processes=frozenset(psutil.Process().children(recursive=True)),
            threads=frozenset(threading.enumerate()),
            environ={name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES},
            handlers={number: signal.getsignal(number) for number in signal.valid_signals() - FOREIGN_SIGNALS},
            path=tuple(sys.path),
        )


def _lasting_processes() -> set[int | None]:
    """Processes that multiprocessing starts once and ends with this one: the fork server, the resource tracker."""
    fork_server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # no public name
    tracker = multiprocessing.resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # no public name
    return {fork_server, tracker}


def _leaked_processes(before: Surroundings) -> list[str]:
    lasting = _lasting_processes()
    # Start times are compared too, so a reused pid is another process.
    new = [each for each in psutil.Process().children(recursive=True) if each not in before.processes]
    _, alive = psutil.wait_procs([each for each in new if each.pid not in lasting], timeout=GRACE_S)
    found = []
    for process in alive:
        try:
            found.append(f"process {process.pid}: {' '.join(process.cmdline()) or process.name()}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=GRACE_S)
    return found


def _leaked_threads(before: Surroundings) -> list[str]:
    new = [
        each
        for each in threading.enumerate()
        if each not in before.threads and type(each).__name__ not in FOREIGN_THREADS
    ]
    for thread in new:
        thread.join(GRACE_S)
    return [f"thread {each.name!r} ({type(each).__name__})" for each in new if each.is_alive()]


def _leaked_group() -> list[str]:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    size = dist.get_world_size()
    dist.destroy_process_group()
    return [f"an initialised process group of {size}"]


def _changed_environ(before: Surroundings) -> list[str]:
    now = Surroundings.now().environ
    changed = sorted(name for name in now.keys() | before.environ.keys() if now.get(name) != before.environ.get(name))
    for name in changed:
        if name in before.environ:
            os.environ[name] = before.environ[name]
        else:
            del os.environ[name]
    return [f"variable {name}: {before.environ.get(name)!r} became {now.get(name)!r}" for name in changed]


def _changed_handlers(before: Surroundings) -> list[str]:
    changed = [number for number, handler in before.handlers.items() if signal.getsignal(number) != handler]
    found = [f"handler of {signal.Signals(number).name}: {signal.getsignal(number)!r}" for number in changed]
    for number in changed:
        handler = before.handlers[number]
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]  # a handler was read
    return found


def _changed_path(before: Surroundings) -> list[str]:
    # Workers get it: with the checkout in it they would import that, and not the package that is tested.
    changed = sorted(set(sys.path) ^ set(before.path))
    sys.path[:] = before.path
    return [f"sys.path: {each!r} came or went" for each in changed]


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a process, thread, process group, variable, signal handler or entry of sys.path."""
    before = Surroundings.now()
    yield
    found = [
        *_leaked_group(),
        *_leaked_processes(before),
        *_leaked_threads(before),
        *_changed_environ(before),
        *_changed_handlers(before),
        *_changed_path(before),
    ]
    if found:
        pytest.fail("left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def orphans_come_home() -> None:
    """Makes orphans of child processes children of this one, so that the check above sees them too.

    Source: https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html
    """
    pr_set_child_subreaper = 36
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


How = Literal["file", "-c", "stdin"]


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python code the way a user does: a script file, `python -c`, or standard input.

    The returned function takes the code (dedented), then keyword-only `how`, `args`, `launcher` (Python's arguments
    before a script file, such as `-m torch.distributed.run`), `env` (added to this process's variables), `check` (fail
    the test on an exit code other than 0) and `timeout_s`, and returns the completed process with its output as text.
    A script that outlasts its time is killed with all processes of its session.
    """

    def run(
        code: str,
        *,
        how: How = "file",
        args: tuple[str, ...] = (),
        launcher: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = 50.0,
    ) -> subprocess.CompletedProcess[str]:
        text = textwrap.dedent(code)
        script = tmp_path / "script.py"
        script.write_text(text)
        source = {"file": (str(script),), "-c": ("-c", text), "stdin": ("-",)}[how]
        command = [sys.executable, *launcher, *source, *args]
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(text if how == "stdin" else None, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
                pytest.fail(f"still running after {timeout_s} s\n--- stdout\n{out}\n--- stderr\n{err}")
        if check and process.returncode != 0:
            pytest.fail(f"exit code {process.returncode}\n--- stdout\n{out}\n--- stderr\n{err}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return run
