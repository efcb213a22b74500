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
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from parallelize import distributed

pytestmark = pytest.mark.slow

GONE_WITHIN_S = 60.0  # on a busy machine

SCRIPT = """
import ctypes, multiprocessing, os, pathlib, signal, subprocess, sys, time
import torch
from torch.utils.data import DataLoader
import torch.distributed as dist
from parallelize import distributed
from parallelize.launchers.local.launcher import LocalLauncher

FOLDER = pathlib.Path(sys.argv[1])

@distributed(processes=2, launcher=LocalLauncher(start_method=sys.argv[2]))
def train():
    rank = dist.get_rank()
    grandchild = subprocess.Popen(["sleep", "300"])
    loading = iter(DataLoader(list(range(10**6)), num_workers=1))
    next(loading)
    try:
        FOLDER.joinpath(f"ready.{rank}").touch()
        while True:
            time.sleep(0.01)
            if FOLDER.joinpath("hold").exists():
                FOLDER.joinpath(f"held.{rank}").touch()
                mutex = ctypes.create_string_buffer(256)
                for _ in range(2):  # a deadlock that holds the GIL
                    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
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
    end = time.monotonic() + 120
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


def test_nohup_is_respected(start: Callable[..., Script]) -> None:
    """A signal that the program ignores does not end a call: the next one does, which it does not ignore."""
    script = start("forkserver", "nohup")
    for number in (signal.SIGHUP, signal.SIGTERM):
        script.process.send_signal(number)
    script.assert_gone()
    assert script.process.returncode == -signal.SIGTERM


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


@pytest.mark.parametrize("how", ["stopped", "in compiled code"])
def test_a_killed_caller_leaves_no_worker_that_cannot_react(
    how: str, start: Callable[..., Script], tmp_path: Path
) -> None:
    """SIGTERM reaches neither a stopped process nor one that holds the GIL: the fork server kills them."""
    script = start("forkserver")
    if how == "stopped":
        for each in script.family:
            if each.pid == os.getpgid(each.pid) and each.ppid() != script.process.pid:  # a worker
                each.suspend()
    else:
        tmp_path.joinpath("hold").touch()
        wait_until(lambda: script.has("held.0", "held.1"), script.process)
    script.process.kill()
    script.assert_gone()
    assert not script.has("finally.0")


def test_a_killed_caller_and_server_leave_no_worker(start: Callable[..., Script]) -> None:
    """As a kernel without memory kills them: the server first, before the caller has noticed."""
    script = start("forkserver")
    workers = [each for each in script.family if each.pid == os.getpgid(each.pid) and each.ppid() != script.process.pid]
    server = workers[0].parent()
    assert server is not None
    script.process.send_signal(signal.SIGSTOP)
    server.kill()
    script.process.kill()
    _, alive = psutil.wait_procs(workers, timeout=GONE_WITHIN_S)
    assert len(workers) == 2
    assert not alive


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


INTERRUPTED_TRAINING = """
import os, pathlib, signal, sys, threading, time
import torch
from torch import nn
from parallelize import distributed, is_main, parallel_model, rank, save

FOLDER, SLOW = pathlib.Path(sys.argv[1]), int(sys.argv[2])

@distributed(processes=2)
def train(model):
    optimizer, step = torch.optim.SGD(model.parameters(), 0.01), 0
    with parallel_model(model):
        try:
            while True:
                loss = model(torch.full((4, 2), 1.0 + rank())).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step == 20:
                    FOLDER.joinpath(f"ready.{rank()}").touch()
                if rank() == SLOW and step > 20:
                    time.sleep(0.2)  # the other rank waits in a collective
        except KeyboardInterrupt:
            save(FOLDER / "saved.pt", model=model, step=step)
            if is_main():
                torch.save(step, FOLDER / "step.pt")

def interrupt():
    while len(list(FOLDER.glob("ready.*"))) < 2:
        time.sleep(0.05)
    os.killpg(0, signal.SIGINT)

threading.Thread(target=interrupt).start()
model = nn.Linear(2, 1)
before = model.weight.detach().clone()
try:
    train(model)
except KeyboardInterrupt:
    saved = torch.load(FOLDER / "saved.pt", weights_only=True)["model"]["weight"]
    print("trained", not torch.equal(model.weight, before), torch.equal(model.weight, saved))
"""


@pytest.mark.parametrize("slow", [0, 1])
def test_ctrl_c_is_a_keyboard_interrupt_in_the_function(slow: int, tmp_path: Path) -> None:
    """Each rank can save, alone, also one that waited for the other; what was trained comes back with the interrupt."""
    command = [sys.executable, "-c", INTERRUPTED_TRAINING, str(tmp_path), str(slow)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, check=False, start_new_session=True, timeout=120
    )
    assert done.stdout == "trained True True\n", done.stderr
    assert torch.load(tmp_path / "step.pt", weights_only=True) >= 20
    assert done.stderr == ""


GOES_ON = """
import pathlib, sys, time
from parallelize import distributed, rank

@distributed(processes=2)
def train():
    try:
        pathlib.Path(sys.argv[1], f"ready.{rank()}").touch()
        time.sleep(300)
    except KeyboardInterrupt:
        pathlib.Path(sys.argv[1], f"caught.{rank()}").touch()
        time.sleep(300)

train()
"""


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """A function that goes on after the first one is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", GOES_ON, tmp_path], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, process)
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: len(list(tmp_path.glob("caught.*"))) == 2, process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=GONE_WITHIN_S)[1].count("KeyboardInterrupt") == 1
        assert process.returncode == -signal.SIGINT


STARTING = """
import sys, time
from parallelize import distributed
from parallelize.launchers.local.launcher import LocalLauncher

@distributed(processes=2, launcher=LocalLauncher(start_method=sys.argv[1]))
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
        assert process.communicate(timeout=60) == ("caught\n", "")
    _, alive = psutil.wait_procs(family, timeout=GONE_WITHIN_S)
    assert not alive


def test_sigterm_to_the_group_while_processes_start_is_silent() -> None:
    """As `timeout` sends it: the caller ends by it as without workers, whose fork server has ended, too."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTING, "forkserver"], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        caller = psutil.Process(process.pid)
        wait_until(lambda: len(caller.children(recursive=True)) >= 2, process)
        family = caller.children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        assert (process.communicate(timeout=60)[1], process.returncode) == ("", -signal.SIGTERM)
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


class _Closing:
    def __del__(self) -> None:
        time.sleep(1.0)


def _go_on_after_a_finalizer(*_: Any) -> None:
    _Closing()  # Python ignores what is raised in it
    time.sleep(60)


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
        torch.save(rank, folder / f"finally.{rank}")


@pytest.mark.parametrize("block", [_receive, _reduce_in_another_group, _wait_for_a_key, _go_on_after_a_finalizer])
def test_finally_blocks_run_on_ranks_that_wait_in_compiled_code(block: Callable[..., None], tmp_path: Path) -> None:
    """A rank fails; the others are in C++, where Python cannot call a handler, or in a finalizer."""
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
def train(seconds):
    def work():
        time.sleep(seconds)
        pathlib.Path(f"written.{rank()}").touch()

    threading.Thread(target=work, name="writer").start()
    threading.Thread(target=time.sleep, args=[seconds], name="sleeper").start()
    return rank()

print(train.all_ranks(float(sys.argv[1])))
"""


@pytest.mark.parametrize(("seconds", "written"), [(0.5, 2), (300, 0)])
def test_a_thread_has_some_seconds_after_the_call(seconds: float, written: int, tmp_path: Path) -> None:
    """Its work may matter; one that goes on for longer is ended, and the log names it, its line and its rank."""
    command = [sys.executable, "-c", LEAVES_A_THREAD, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "[0, 1]\n"
    assert len(list(tmp_path.glob("written.*"))) == written
    for number in range(2) if not written else ():
        ended = f"the process of rank {number} ended with code 1 after the call had its values: "
        assert f"{ended}threads that the function has left were ended: writer at <string>:8, sleeper\n" in done.stderr
    assert "most recent call" not in done.stderr
