"""However the caller is stopped, all processes of a call end, and their `finally` blocks run where possible."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from parallelize import distributed

pytestmark = pytest.mark.slow

GONE_WITHIN_S = 60.0  # on a busy machine

SCRIPT = """
import multiprocessing, os, pathlib, signal, subprocess, sys, time
import torch
from torch.utils.data import DataLoader
import torch.distributed as dist
from parallelize import distributed
from parallelize.launchers.elastic.plugin import ElasticLauncher

FOLDER = pathlib.Path(sys.argv[1])

@distributed(processes=2, launcher=ElasticLauncher(start_method=sys.argv[2]))
def train():
    rank = dist.get_rank()
    grandchild = subprocess.Popen(["sleep", "300"])
    loading = iter(DataLoader(list(range(10**6)), num_workers=1))
    next(loading)
    try:
        FOLDER.joinpath(f"ready.{rank}").touch()
        while True:
            time.sleep(0.01)
    finally:
        FOLDER.joinpath(f"finally.{rank}").touch()

try:
    train()
except BaseException as error:
    FOLDER.joinpath("caught").write_text(type(error).__name__)
    raise
finally:
    FOLDER.joinpath("finally").touch()
"""


@dataclass
class Script:
    process: subprocess.Popen[str]
    folder: Path
    family: list[psutil.Process]
    temporary: Path

    def assert_gone(self) -> None:
        """Assert that the script and all processes that it started end in time."""
        self.process.wait(GONE_WITHIN_S)
        _, alive = psutil.wait_procs(self.family, timeout=GONE_WITHIN_S)
        assert not alive, [each.cmdline() for each in alive]
        assert not list(self.temporary.glob("parallelize-*"))

    def has(self, *names: str) -> bool:
        return all((self.folder / name).exists() for name in names)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 40
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Starts the script and waits until its workers, their DataLoaders and their child processes run."""
    scripts: list[Script] = []
    temporary = tempfile.mkdtemp(prefix="plz", dir="/tmp")  # the name of a socket in it must be short

    def start(start_method: str, *prefix: str) -> Script:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(SCRIPT))
        process = subprocess.Popen(
            [*prefix, sys.executable, str(path), str(tmp_path), start_method],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": temporary},
        )
        script = Script(process, tmp_path, [], Path(temporary))
        scripts.append(script)
        wait_until(lambda: script.has("ready.0", "ready.1"), process)
        assert list(script.temporary.glob("parallelize-*"))
        script.family = psutil.Process(process.pid).children(recursive=True)
        return script

    yield start
    for script in scripts:
        for each in script.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        script.process.kill()
        script.process.communicate()
    shutil.rmtree(temporary)


@pytest.mark.parametrize(
    ("number", "start_method"),
    [(signal.SIGTERM, "forkserver"), (signal.SIGTERM, "spawn"), (signal.SIGHUP, "forkserver")],
)
def test_a_signal_to_the_caller_ends_everything(
    number: signal.Signals, start_method: str, start: Callable[..., Script]
) -> None:
    """Workers run their `finally` blocks, then the caller ends by the signal."""
    script = start(start_method)
    script.process.send_signal(number)
    script.assert_gone()
    assert script.has("finally.0", "finally.1")
    assert script.process.returncode == -number


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_killed_caller_leaves_no_orphan(start_method: str, start: Callable[..., Script]) -> None:
    """SIGKILL cannot be handled; workers notice it, run their `finally` blocks and end, with all they started."""
    script = start(start_method)
    assert len(script.family) >= 2 * 3
    script.process.kill()
    script.assert_gone()
    assert script.has("finally.0", "finally.1")
    assert not script.has("finally")


def test_a_killed_caller_leaves_no_orphan_without_pidfd_open(start: Callable[..., Script], tmp_path: Path) -> None:
    """A kernel or a sandbox that refuses pidfd_open: workers look for their launcher once a second."""
    stub = "import os\ndef refuse(*_): raise PermissionError(1, 'pidfd_open')\nos.pidfd_open = refuse\n"
    (tmp_path / "sitecustomize.py").write_text(stub)
    script = start("forkserver", "env", f"PYTHONPATH={os.pathsep.join([str(tmp_path), *sys.path])}")
    script.process.kill()
    script.assert_gone()
    assert script.has("finally.0", "finally.1")


def test_a_caller_that_dies_slowly_leaves_no_folder(start: Callable[..., Script]) -> None:
    """The kernel interrupts spawned workers when the caller's thread is dead; freeing its memory may take seconds."""
    script = start("spawn")
    script.process.send_signal(signal.SIGSTOP)
    for each in psutil.Process(script.process.pid).children():
        each.send_signal(signal.SIGINT)
    wait_until(lambda: script.has("finally.0", "finally.1"), script.process)
    time.sleep(1)
    script.process.kill()
    script.assert_gone()


def test_nohup_stays_in_force(start: Callable[..., Script]) -> None:
    """A caller that ignores SIGHUP keeps running, and so do its workers; SIGTERM still ends it."""
    script = start("forkserver", "nohup")
    os.killpg(script.process.pid, signal.SIGHUP)
    script.process.send_signal(signal.SIGTERM)
    script.assert_gone()
    assert script.process.returncode == -signal.SIGTERM


def test_ctrl_c_in_a_terminal_raises_one_keyboard_interrupt(start: Callable[..., Script]) -> None:
    """A terminal sends SIGINT to the caller's process group; `finally` blocks run."""
    script = start("forkserver")
    os.killpg(script.process.pid, signal.SIGINT)
    script.assert_gone()
    assert script.has("finally.0", "finally.1")
    assert (script.folder / "caught").read_text() == "KeyboardInterrupt"
    _, err = script.process.communicate()
    assert err.count("KeyboardInterrupt") == 1, err
    assert "torch/distributed/elastic" not in err
    assert "leaked" not in err


STARTING = """
import sys, time
from parallelize import distributed
from parallelize.launchers.elastic.plugin import ElasticLauncher

@distributed(processes=2, launcher=ElasticLauncher(start_method=sys.argv[1]))
def train():
    time.sleep(300)

try:
    train()
except KeyboardInterrupt:
    print("caught")
"""


@pytest.mark.parametrize("children", [2, 3])
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_ctrl_c_while_processes_start(start_method: str, children: int) -> None:
    """The fork server and starting workers do not react to it; a KeyboardInterrupt is raised in the caller."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTING, start_method],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        caller = psutil.Process(process.pid)
        wait_until(lambda: len(caller.children(recursive=True)) >= children, process)
        family = caller.children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=20) == ("caught\n", "")
    _, alive = psutil.wait_procs(family, timeout=GONE_WITHIN_S)
    assert not alive


INTERRUPTED = """
import multiprocessing.process, os, signal

class Interrupting(multiprocessing.process._ParentProcess):
    def __init__(self, *args):
        super().__init__(*args)
        os.kill(os.getpid(), signal.SIGINT)

multiprocessing.process._ParentProcess = Interrupting
"""

RETURNING = """
import multiprocessing, sys
from parallelize import distributed
from parallelize.launchers.elastic.plugin import ElasticLauncher

def train():
    return 7

distributed(processes=2, launcher=ElasticLauncher(start_method=sys.argv[1]))(train)()
process = multiprocessing.get_context(sys.argv[1]).Process(target=print, args=["not interrupted"])
process.start()
process.join()
print(process.exitcode)
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_worker_that_is_interrupted_before_it_knows_what_it_runs(start_method: str, tmp_path: Path) -> None:
    """A terminal's Ctrl-C reaches it while multiprocessing sets it up; a process of the caller's own is interrupted."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    run = subprocess.run(
        [sys.executable, "-c", RETURNING, start_method],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "1\n"
    assert run.stderr.count("KeyboardInterrupt") == 1


@pytest.mark.parametrize(
    ("number", "only", "code", "message"),
    [
        (signal.SIGTERM, "", -signal.SIGTERM, ""),  # as `timeout` sends it: to all processes of the group
        (signal.SIGKILL, "forkserver", 1, "LaunchError: the fork server, which starts the worker processes, has ended"),
    ],
)
def test_a_fork_server_that_ends_while_processes_start(
    number: int, only: str, code: int, message: str, tmp_path: Path
) -> None:
    """A signal to the group ends the caller as without workers, in silence; else one error says what has ended."""
    script = tmp_path / "script.py"
    script.write_text(STARTING)
    with subprocess.Popen(
        [sys.executable, script, "forkserver"], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        caller = psutil.Process(process.pid)
        wait_until(lambda: len(caller.children(recursive=True)) >= 2, process)
        time.sleep(0.5)  # the caller waits for the fork server, which imports torch for longer
        family = caller.children(recursive=True)
        if only:
            next(each for each in family if only in " ".join(each.cmdline())).send_signal(number)
        else:
            os.killpg(process.pid, number)
        err = process.communicate(timeout=30)[1]
    assert process.returncode == code, err
    assert message in err
    assert "EOFError:" not in err.replace("EOFError)", "")
    assert bool(err) == bool(message)
    _, alive = psutil.wait_procs(family, timeout=GONE_WITHIN_S)
    assert not alive


@distributed(processes=2)
def ranks() -> int:
    return dist.get_rank()


def test_handlers_are_as_before_after_a_call() -> None:
    """The caller's handlers are restored, whether the call returned or raised."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
    handlers = [lambda *_: None for _ in numbers]
    before = [signal.signal(number, handler) for number, handler in zip(numbers, handlers, strict=True)]
    try:
        assert ranks.all_ranks() == [0, 1]
        assert [signal.getsignal(number) for number in numbers] == handlers
        with pytest.raises(ZeroDivisionError):
            divide_by_zero()
        assert [signal.getsignal(number) for number in numbers] == handlers
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE" not in os.environ


@distributed(processes=2)
def divide_by_zero() -> float:
    return 1 / 0


def _wait_for_a_key(peer: int, *_: dist.ProcessGroup) -> None:
    dist.distributed_c10d._get_default_store().get(f"never set by {peer}")


def _receive(peer: int, *_: dist.ProcessGroup) -> None:
    dist.recv(torch.ones(1), src=peer)


def _reduce_in_another_group(peer: int, *groups: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1), group=groups[peer - 1])


@distributed(processes=3)
def fail_beside_blocked_ranks(block: Callable[..., None], folder: Path) -> None:
    """Rank 0 raises while ranks 1 and 2 wait for each other in compiled code: none of their connections is closed."""
    rank, groups = dist.get_rank(), [dist.new_group([1, 2]) for _ in range(2)]
    if rank == 0:
        while len(list(folder.glob("waiting.*"))) < 2:
            time.sleep(0.01)
        time.sleep(0.3)
        raise ZeroDivisionError
    try:
        folder.joinpath(f"waiting.{rank}").touch()
        block(3 - rank, *groups)
    finally:
        time.sleep(0.01)  # a bytecode at which Python calls handlers of signals
        folder.joinpath(f"finally.{rank}").touch()


@pytest.mark.parametrize("block", [_receive, _reduce_in_another_group, _wait_for_a_key])
def test_finally_blocks_run_on_ranks_that_wait_in_compiled_code(block: Callable[..., None], tmp_path: Path) -> None:
    """A rank fails; the others are in C++, where Python cannot call a handler, until their groups are aborted."""
    with pytest.raises(ZeroDivisionError) as info:
        fail_beside_blocked_ranks(block, tmp_path)
    assert len(list(tmp_path.glob("finally.*"))) == 2
    assert "ranks 1-2: stopped" in "".join(info.value.__notes__)


def test_a_call_works_in_another_thread() -> None:
    """Python allows signal handlers in the main thread only, and a call works without them."""
    values: list[list[int]] = []
    thread = threading.Thread(target=lambda: values.append(ranks.all_ranks()))
    thread.start()
    thread.join()
    assert values == [[0, 1]]


LEAVES_A_THREAD = """
import pathlib, sys, threading, time
from parallelize import distributed, rank

@distributed(processes=2)
def train(reported):
    def work():
        while not pathlib.Path(reported).exists():
            time.sleep(0.01)
        pathlib.Path(f"{reported}.{rank()}").touch()

    threading.Thread(target=work, name="writer").start()
    return rank()

print(train.all_ranks(sys.argv[1]))
"""


def test_threads_that_keep_a_call_from_returning_are_named(tmp_path: Path) -> None:
    """Python waits for them at exit, as their work may matter; here they end once they were reported."""
    reported = tmp_path / "reported"
    command = [sys.executable, "-c", LEAVES_A_THREAD, reported]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        lines = sorted(process.stderr.readline() for _ in range(2))
        reported.touch()
        assert process.stdout.read() == "[0, 1]\n"
    for number, line in enumerate(lines):
        waits = f"parallelize: rank {number} has returned, but its process waits for threads that the function started"
        assert line.startswith(f"{waits}: writer.")
    assert len(list(tmp_path.glob("reported.*"))) == 2
