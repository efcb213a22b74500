"""Fixtures for all tests: a guard against leaks, and a runner for user scripts."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from hypothesis import HealthCheck, settings

# Processes and threads may take this long to end; only a failing test waits this long.
GRACE_S = 30.0

# pytest sets the first for each phase; the first optimizer imports torch._dynamo, which sets the second.
FOREIGN_VARIABLES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}

# pytest-timeout arms SIGALRM around each test.
FOREIGN_SIGNALS = {signal.SIGALRM} if sys.platform != "win32" else set()

# One per process, shared by all progress bars; tqdm ends it at exit.
FOREIGN_THREADS = {"TMonitor"}


# Hypothesis tests check results, not speed, which depends on the load of the machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Background jobs of a shell, and nohup, ignore these signals, and so would the tests and every program they start.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@dataclass(frozen=True)
class ProcessState:
    """Process-wide state that a test must leave as it was."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    environ: Mapping[str, str]
    handlers: Mapping[int, object]
    path: tuple[str, ...]

    @classmethod
    def now(cls) -> ProcessState:
        return cls(
            processes=frozenset(psutil.Process().children(recursive=True)),
            threads=frozenset(threading.enumerate()),
            environ={name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES},
            handlers={number: signal.getsignal(number) for number in signal.valid_signals() - FOREIGN_SIGNALS},
            path=tuple(sys.path),
        )


def _lasting_processes() -> set[int | None]:
    """Return the processes that are started once: multiprocessing's, and our fork servers with what helps them."""
    fork_server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # no public name
    tracker = multiprocessing.resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # no public name
    lasting = {fork_server, tracker}
    for process in psutil.Process().children():
        if _has(process, "import serve; serve("):
            lasting |= {process.pid, *(each.pid for each in process.children() if _helps_server(each, process.pid))}
    return lasting


def _helps_server(process: psutil.Process, server: int) -> bool:
    """Whether a child of a fork server is its tracker or its early server; a worker leads a group of its own."""
    with contextlib.suppress(ProcessLookupError):
        return _has(process, "resource_tracker") or os.getpgid(process.pid) == server
    return False


def _has(process: psutil.Process, text: str) -> bool:
    with contextlib.suppress(psutil.Error):  # it has just ended
        return text in " ".join(process.cmdline())
    return False


def _leaked_processes(before: ProcessState) -> list[str]:
    lasting = _lasting_processes()
    # psutil compares start times too, so a reused pid counts as another process.
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


def _leaked_threads(before: ProcessState) -> list[str]:
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


def _changed_environ(before: ProcessState) -> list[str]:
    now = ProcessState.now().environ
    changed = sorted(name for name in now.keys() | before.environ.keys() if now.get(name) != before.environ.get(name))
    for name in changed:
        if name in before.environ:
            os.environ[name] = before.environ[name]
        else:
            del os.environ[name]
    return [f"variable {name}: {before.environ.get(name)!r} became {now.get(name)!r}" for name in changed]


def _changed_handlers(before: ProcessState) -> list[str]:
    changed = [number for number, handler in before.handlers.items() if signal.getsignal(number) != handler]
    found = [f"handler of {signal.Signals(number).name}: {signal.getsignal(number)!r}" for number in changed]
    for number in changed:
        handler = before.handlers[number]
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]  # signal.getsignal returned it
    return found


def _changed_path(before: ProcessState) -> list[str]:
    # Workers inherit sys.path: with the checkout in it they would import that and not the installed package.
    changed = sorted(set(sys.path) ^ set(before.path))
    sys.path[:] = before.path
    return [f"sys.path: {each!r} was added or removed" for each in changed]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run all tests of a file, which share a module's fixtures, and all that need Slurm's cluster."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "slurm" if "/slurm/" in nodeid else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks a process, thread, process group, variable, signal handler or entry of sys.path."""
    before = ProcessState.now()
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
def reparent_orphans() -> None:
    """Make orphans of child processes children of this process, so that the leak guard sees them.

    Source: https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html
    """
    pr_set_child_subreaper = 36
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


@pytest.fixture(autouse=True, scope="session")
def separate_temporary_folder() -> Iterator[None]:
    """Give the tests a temporary folder, removed at the end with what the killed callers of some tests leave in it."""
    multiprocessing.util.get_temp_dir()  # is removed when this process ends, so it must not be in that folder
    with (
        tempfile.TemporaryDirectory(prefix="parallelize-tests-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


How = Literal["file", "-c", "stdin"]


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python code as a user would: as a script file, with `python -c`, or from stdin.

    The function takes the code (dedented) and the keyword-only `how`, `args`, `launcher` (Python's arguments before
    a script file, such as `-m torch.distributed.run`), `env` (added to this process's variables), `check` (fail the
    test on an exit code other than 0) and `timeout_s`. It returns the completed process with its output as text. On
    a timeout all processes of the script's session are killed.
    """

    def run(
        code: str,
        *,
        how: How = "file",
        args: tuple[str, ...] = (),
        launcher: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = 240.0,
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
