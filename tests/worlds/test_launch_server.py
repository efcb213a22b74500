"""A fork server that is killed, is stopped, or imports for ever; and the numbers of its workers."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from ranks import wait_for

from parallelize import LaunchError, distributed, rank
from parallelize.launchers.local import workers
from parallelize.launchers.local.server_calls import names_training

LONG_S = 300.0
GONE_WITHIN_S = 60.0  # on a busy machine


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def kill_the_server(attempts: int, folder: Path) -> int:
    """Kill it in these attempts, while both ranks and a program that each has started run."""
    number = attempt()
    if number < attempts:
        program = subprocess.Popen(["sleep", str(LONG_S)])
        folder.joinpath(f"program.{number}.{rank()}").write_text(str(program.pid))
        wait_for(lambda: len(list(folder.glob(f"program.{number}.*"))) == 2, timeout_s=GONE_WITHIN_S)
        if rank() == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(LONG_S)
    return number


def programs_of(folder: Path) -> list[psutil.Process]:
    """Return the programs that the ranks have started, as far as they run."""
    pids = [int(path.read_text()) for path in folder.glob("program.*")]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.slow
def test_a_restart_after_the_server_was_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the kernel kills it that lacks memory: another server starts the workers anew."""
    assert distributed(processes=2, max_restarts=2)(kill_the_server)(2, tmp_path) == 2
    assert caplog.text.count("after LaunchError: the fork server, which starts the worker processes, has ended") == 2
    _, alive = psutil.wait_procs(programs_of(tmp_path), timeout=GONE_WITHIN_S)
    assert not alive


@pytest.mark.slow
def test_the_last_attempt_raises_the_servers_end(tmp_path: Path) -> None:
    """With the errors of the attempts before."""
    with pytest.raises(LaunchError, match="has ended") as caught:
        distributed(processes=2, max_restarts=1)(kill_the_server)(2, tmp_path)
    assert type(caught.value) is LaunchError
    assert any(note.startswith("attempt 0 had failed with LaunchError") for note in caught.value.__notes__)


def kill_the_server_later(folder: Path) -> int:
    """Return a value, and kill the server as soon as the outcomes of both ranks are written."""

    def kill() -> None:
        wait_for(lambda: len(list(folder.glob("*/outcome.[01]"))) == 2, timeout_s=GONE_WITHIN_S)
        os.kill(os.getppid(), signal.SIGKILL)

    if rank() == 0:
        threading.Thread(target=kill).start()
    return rank()


def test_values_are_not_lost_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have returned need no server any more."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert distributed(processes=2)(kill_the_server_later).all_ranks(tmp_path) == [0, 1]


def servers() -> list[psutil.Process]:
    """Return the fork servers of this process that have not ended."""
    running = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "import serve; serve(" in " ".join(child.cmdline()):
                running.append(child)
    return running


def early_servers(server: psutil.Process) -> list[psutil.Process]:
    """Return the early server of a fork server, in a list; none if it has ended, or there was none."""
    running = []
    for child in server.children():
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # it has just ended
            is_tracker = "resource_tracker" in " ".join(child.cmdline())
            if not is_tracker and os.getpgid(child.pid) == server.pid:
                running.append(child)
    return running


def test_a_stopped_server_is_given_up(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line says what is waited for; then an error does, and the next call has another server."""
    ranks = distributed(processes=2)(rank)
    ranks()
    before = servers()
    # An early server would serve the call.
    wait_for(lambda: not any(early_servers(server) for server in before), timeout_s=GONE_WITHIN_S)
    for server in before:
        server.suspend()
    monkeypatch.setattr(workers, "_ANNOUNCED_AFTER_S", 0.5)
    with pytest.raises(LaunchError, match="did not answer within timeout=3 s") as caught:
        distributed(processes=2, timeout=3)(rank)()
    monkeypatch.undo()
    lines = capfd.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("parallelize: waiting for ")]
    (given_up,) = [server for server in before if not server.is_running()]
    assert f"(process {given_up.pid}), which a signal has stopped" in line
    assert f"(process {given_up.pid}), which a signal has stopped" in str(caught.value)
    for server in servers():
        server.resume()
    assert ranks.all_ranks() == [0, 1]


HANGS = """
import sys, time
if sys.argv[0] == "-c":  # as of the fork server
    time.sleep(300)
"""

IMPORTS_FOR_EVER = """
import sys, timm
from parallelize import LaunchError, distributed, rank

try:
    distributed(processes=2, timeout=8, max_restarts=0)(rank)()
except LaunchError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_module_that_hangs_when_it_is_imported(tmp_path: Path) -> None:
    """The error names the packages that the server imports."""
    (tmp_path / "timm.py").write_text(HANGS)
    (tmp_path / "script.py").write_text(IMPORTS_FOR_EVER)
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=GONE_WITHIN_S
    )
    assert "did not answer within timeout=8 s" in ended.stdout
    assert "which imports torch, parallelize, " in ended.stdout
    assert "timm" in ended.stdout


# The number of rank 1, which has returned, is given to another process as soon as the kernel lets it go.
REUSED = """
import os, pathlib, subprocess, sys, threading, time
from parallelize import distributed, rank

folder = pathlib.Path(sys.argv[1])

def returns_early():
    if rank() == 1:
        folder.joinpath("new").write_text(str(os.getpid()))
        folder.joinpath("new").rename(folder / "pid")
        return
    while not folder.joinpath("go").exists():
        time.sleep(0.02)

def use_again():
    while not folder.joinpath("pid").exists():
        time.sleep(0.02)
    pid = int(folder.joinpath("pid").read_text())
    state = pathlib.Path(f"/proc/{pid}/stat")
    while state.exists() and " Z " not in state.read_text():
        time.sleep(0.02)
    is_free = not state.exists()
    folder.joinpath("go").touch() if not is_free else None
    while state.exists():
        time.sleep(0.02)
    while not innocent or innocent[-1].pid != pid:
        pathlib.Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        innocent.append(subprocess.Popen(["sleep", "300"], start_new_session=True))
    folder.joinpath("go").touch()

innocent = []
thread = threading.Thread(target=use_again)
thread.start()
distributed(processes=2)(returns_early)()
thread.join()
distributed(processes=2)(rank)()
print([process.poll() for process in innocent][-1])
for process in innocent:
    process.kill()
"""


@pytest.mark.slow
def test_no_signal_reaches_a_process_that_has_the_number_of_an_ended_rank(tmp_path: Path) -> None:
    """A rank that has returned keeps its number until the call is over, and gets no signal after that."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("may not make a namespace of processes here")
    (tmp_path / "script.py").write_text(REUSED)
    command = [*inside, sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GONE_WITHIN_S * 2)
    assert ended.stdout == "None\n", ended.stderr


IGNORES = """
import signal
from parallelize import distributed, rank

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(distributed(processes=2)(rank).all_ranks())
"""


@pytest.mark.slow
def test_a_program_that_ignores_the_ends_of_its_children() -> None:
    """Its fork server does not, or the kernel would reap the workers, whose exit codes are lost then."""
    ended = subprocess.run(
        [sys.executable, "-c", IGNORES], capture_output=True, text=True, check=False, timeout=GONE_WITHIN_S * 2
    )
    assert (ended.stdout, ended.stderr) == ("[0, 1]\n", "")


# Shows for a first call, and for one after the early server has ended: the names of its processes, whether they have
# torch's compiler, and whether the fork server has forked them.
FIRST_CALL = """
import multiprocessing, os, psutil, sys, time, torch
from parallelize import distributed

@distributed(processes=2)
def starts():
    return multiprocessing.current_process().name, "torch._dynamo" in sys.modules, os.getppid()

@distributed(processes=2)
def trains():
    if os.getpid() == 0:
        step()
    return multiprocessing.current_process().name, "torch._dynamo" in sys.modules, os.getppid()

def step():
    torch.ones(1, requires_grad=True).sum().backward()

def show():
    workers = (trains if "training" in sys.argv else starts).all_ranks()
    (server,) = psutil.Process().children()
    print(sorted((name, has_compiler, parent == server.pid) for name, has_compiler, parent in workers))
    return server

if "compiler" in sys.argv:
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
if "one core" in sys.argv:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
server = show()
while len(server.children()) > 1:  # its tracker stays
    time.sleep(0.02)
show()
"""


def workers_in(line: str) -> list[tuple[bool, bool]]:
    """Return whether each of two workers has the compiler, and the fork server as its parent."""
    first, second = ast.literal_eval(line)
    # Named as if there was no early server. The number counts what a process has forked.
    assert {first[0].rstrip("0123456789"), second[0].rstrip("0123456789")} == {"ForkProcess-"}
    return [first[1:], second[1:]]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the early server sees the end of the caller by a pidfd")
@pytest.mark.parametrize("when", ["", "training", "compiler", "one core"])
def test_a_first_call_does_not_wait_for_the_compiler(when: str) -> None:
    """Unless its code trains, or the caller has imported the compiler, or workers that import it would share cores."""
    ended = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, when], capture_output=True, text=True, check=True, timeout=GONE_WITHIN_S * 2
    )
    first, later = ended.stdout.splitlines()
    is_early = when == "" and len(os.sched_getaffinity(0)) >= 2
    assert workers_in(first) == [(not is_early, not is_early)] * 2
    assert workers_in(later) == [(True, True)] * 2


# Rank 0 kills the process that has forked it, or that one's parent, in the first attempt.
KILLS = """
import os, psutil, signal, sys, time
from parallelize import distributed, rank

@distributed(processes=2, max_restarts=1)
def kills(steps):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        victim = psutil.Process(os.getppid())
        for _ in range(steps):
            victim = victim.parent()
        if rank() == 0:
            victim.kill()
        time.sleep(300)
    return os.getpid()

print(len(kills.all_ranks(int(sys.argv[1]))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1])
def test_a_killed_early_server_is_a_lost_server(steps: int) -> None:
    """It alone, or the fork server, with which it ends: a restart has workers of another one."""
    if len(os.sched_getaffinity(0)) < 2 or not hasattr(os, "pidfd_open"):
        pytest.skip("has no early server")
    ended = subprocess.run(
        [sys.executable, "-c", KILLS, str(steps)],
        capture_output=True,
        text=True,
        check=False,
        timeout=GONE_WITHIN_S * 2,
    )
    assert ended.stdout == "2\n", ended.stderr
    assert "restart 1 of 1 after LaunchError: the fork server" in ended.stderr


# A call of the early server, which goes on while the fork server serves the calls after it.
SERVED_EARLY = """
import os, pathlib, psutil, sys, threading, time
from parallelize import distributed, rank

folder = pathlib.Path(sys.argv[1])

@distributed(processes=2)
def waits():
    folder.joinpath(f"ready.{rank()}").write_text(str(os.getppid()))
    try:
        time.sleep(300)
    finally:
        time.sleep(0.5)  # a fork server that has no call would end meanwhile
        folder.joinpath(f"finally.{rank()}").touch()

@distributed(processes=2)
def parent():
    return os.getppid()

threading.Thread(target=waits, daemon=True).start()
while len(list(folder.glob("ready.*"))) < 2:
    time.sleep(0.02)
(server,) = psutil.Process().children()
while parent() != server.pid:
    pass
print(server.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.slow
def test_a_killed_caller_lets_the_workers_of_its_early_server_end(tmp_path: Path) -> None:
    """They have their time for `finally` blocks, though the fork server has no call of its own."""
    if len(os.sched_getaffinity(0)) < 2 or not hasattr(os, "pidfd_open"):
        pytest.skip("has no early server")
    with subprocess.Popen(
        [sys.executable, "-c", SERVED_EARLY, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        server = process.stdout.readline().strip()
        assert tmp_path.joinpath("ready.0").read_text() != server
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=GONE_WITHIN_S)
    assert not alive
    assert len(list(tmp_path.glob("finally.*"))) == 2


def evaluates() -> int:
    return rank()


def steps() -> None:
    torch.ones(1, requires_grad=True).sum().backward()


def trains_by_another_function() -> None:
    for _ in range(2):
        steps()


def trains_inside() -> None:
    def makes_optimizer() -> None:
        torch.optim.SGD([torch.ones(1, requires_grad=True)])

    makes_optimizer()


@pytest.mark.parametrize(
    ("function", "trains"),
    [
        (evaluates, False),
        (steps, True),
        (trains_by_another_function, True),
        (trains_inside, True),
        (wait_for, False),
        (len, False),
        (functools.partial(steps), False),
    ],
)
def test_which_functions_are_known_to_train(function: Callable[..., object], trains: bool) -> None:
    """Those that name what trains, or call by name a function of their module that does; others are a guess."""
    assert names_training(function) is trains
