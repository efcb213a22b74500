"""A failed rank, however it fails, is one exception in the caller: the root cause, within seconds, with its rank."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import TORCHRUN

from parallelize import LaunchError, WorkerError, distributed, rank
from parallelize.cluster.world import World
from parallelize.launchers.local import workers

pytestmark = pytest.mark.slow

WITHIN_S = 60.0  # seconds on a busy machine; the other ranks would run for LONG_S
LONG_S = 300


class TwoArgumentsError(Exception):
    """Pickle would call it with its message only."""

    def __init__(self, left: int, right: str) -> None:
        super().__init__(f"{left} and {right}")
        self.left, self.right = left, right


class ForeignError(OSError):
    """Its __reduce__ omits a required argument of its class."""

    def __init__(self, path: str, *, size: int) -> None:
        super().__init__(28, "disk full", path)
        self.size = size

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self.args


def segfault() -> None:
    ctypes.string_at(0)


def segfault_elsewhere() -> None:
    """In a thread of a library, which has no Python frames."""
    ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_ulong()), None, None, None)
    time.sleep(LONG_S)


def raise_(error: BaseException) -> None:
    raise error


# How a rank fails; the exception in the caller: its type and attributes.
FAIL: dict[str, tuple[Callable[[], object], type[BaseException], dict[str, object]]] = {
    "raise": (
        lambda: raise_(TwoArgumentsError(1, "two")),
        TwoArgumentsError,
        {"left": 1, "right": "two", "args": ("1 and two",)},
    ),
    "sys.exit": (lambda: sys.exit(3), WorkerError, {"exitcode": 3, "signal_name": None}),
    "os._exit": (lambda: os._exit(3), WorkerError, {"exitcode": 3, "signal_name": None}),
    "os._exit(0)": (lambda: os._exit(0), WorkerError, {"exitcode": 0, "signal_name": None}),
    "SIGKILL": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        WorkerError,
        {"exitcode": -9, "signal_name": "SIGKILL"},
    ),
    "SIGSEGV": (segfault, WorkerError, {"exitcode": -11, "signal_name": "SIGSEGV"}),
    "SIGSEGV elsewhere": (segfault_elsewhere, WorkerError, {"exitcode": -11, "signal_name": "SIGSEGV"}),
    "KeyboardInterrupt": (lambda: raise_(KeyboardInterrupt()), KeyboardInterrupt, {}),
    "foreign": (lambda: raise_(ForeignError("/scratch", size=7)), WorkerError, {"exitcode": None}),
}


def compute() -> None:
    a = torch.randn(500, 500)
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        a = (a @ a).tanh()


def sort_in_cpp() -> None:
    """Block in C++ for seconds, during which Python runs no signal handler."""
    while True:
        torch.randn(20_000_000).sort()


PEERS: dict[str, Callable[[], object]] = {
    "collective": lambda: dist.all_reduce(torch.ones(1)),
    "compute": compute,
    "sleep": lambda: time.sleep(LONG_S),
    "c++": sort_in_cpp,
}


@distributed(processes=3)
def fail_among(peers: str, failing: tuple[int, ...], how: str, when: Path) -> str:
    if dist.get_rank() not in failing:
        PEERS[peers]()
        return "went on"
    when.with_suffix(f".{dist.get_rank()}").write_text(str(time.time()))
    FAIL[how][0]()
    return "did not fail"


@pytest.mark.parametrize("how", FAIL)
@pytest.mark.parametrize(("peers", "failing"), [("collective", (0, 1)), ("compute", (2,)), ("sleep", (0,))], ids=str)
def test_one_exception_says_which_rank_failed_and_how(
    how: str, failing: tuple[int, ...], peers: str, tmp_path: Path
) -> None:
    """Whichever ranks fail, the caller's exception names a failed rank and how the others ended."""
    _, expected, attributes = FAIL[how]
    with pytest.raises(expected) as caught:
        fail_among(peers, failing, how, tmp_path / "at")
    # A rank that is killed because another one has failed may leave an empty file.
    elapsed = time.time() - min(float(text) for path in tmp_path.iterdir() if (text := path.read_text()))
    error = caught.value
    text = "\n".join([str(error), *error.__notes__])
    assert type(error) is expected
    assert elapsed < WITHIN_S
    assert {name: getattr(error, name) for name in attributes} == attributes
    assert any(f"rank {rank} " in text for rank in failing), text
    assert os.uname().nodename in text
    assert sum(note.startswith("the others: ") for note in error.__notes__) == 1
    assert "gloo" not in text
    if how.startswith("SIGSEGV"):
        shown = text.partition("Fatal Python error: Segmentation fault\n")[2].splitlines()
        innermost = ["string_at", "segfault"] if how == "SIGSEGV" else ["segfault_elsewhere"]
        frames = [line.rpartition(" in ")[2] for line in shown[1:]]
        assert frames[: len(innermost) + 1] == [*innermost, "fail_among"]
        assert shown[0].startswith("Current thread") == (how == "SIGSEGV")
        assert "Extension modules" not in text


def test_ranks_blocked_in_compiled_code_do_not_delay_it(tmp_path: Path) -> None:
    """A worker that cannot run its signal handler is killed after the grace period."""
    with pytest.raises(TwoArgumentsError):
        fail_among("c++", (1,), "raise", tmp_path / "at")
    assert time.time() - float((tmp_path / "at.1").read_text()) < WITHIN_S


def raise_on_1(text: str) -> None:
    if rank() == 1:
        time.sleep(1)  # until rank 0 waits
        raise RuntimeError(text)
    dist.all_reduce(torch.ones(1))


def return_a_generator() -> object:
    if rank() == 0:
        return {"model": 1, "lines": (line for line in ())}
    return time.sleep(LONG_S)


class FailsToUnpickle:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def kill_the_server() -> None:
    if rank() == 0:
        psutil.Process().parent().kill()
    time.sleep(LONG_S)


# A function; the exception in the caller: its type, text and attributes.
RAISED: dict[str, tuple[Callable[[], object], type[Exception], str, dict[str, object]]] = {
    "an unpicklable value": (
        return_a_generator,
        WorkerError,
        r"the returned value\['lines'\] cannot be pickled(.|\n)*generator",
        {"rank": 0, "host": os.uname().nodename},
    ),
    "a value that cannot be unpickled": (
        partial(FailsToUnpickle),
        WorkerError,
        "cannot be unpickled in the calling process\n  why: ValueError: invalid lit",
        {},
    ),
    # Only torch's messages about lost connections and timeouts are explained by other ranks.
    "restore": (partial(raise_on_1, "could not restore the model"), RuntimeError, "could not", {"__cause__": None}),
    "timeout": (partial(raise_on_1, "query on replica-3 timed out"), RuntimeError, "query on", {"__cause__": None}),
    "killed fork server": (kill_the_server, LaunchError, "the fork server, which starts the worker processes, has", {}),
}


@pytest.mark.parametrize("what", RAISED)
def test_the_cause_is_named(what: str) -> None:
    """The caller hears exactly that, without waiting for the other ranks, and the next call has its value."""
    function, expected, text, attributes = RAISED[what]
    started = time.monotonic()
    with pytest.raises(expected, match=text) as caught:
        distributed(processes=2)(function)()
    assert time.monotonic() - started < WITHIN_S
    assert type(caught.value) is expected
    assert {name: getattr(caught.value, name) for name in attributes} == attributes
    assert leave_badly("") == 1


@distributed(processes=2, max_restarts=1)
def die_again() -> None:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if dist.get_rank() == 1:
        print("".join(f"step {number} of {attempt}\n" for number in range(30)))
        print("reason of", attempt, file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG_S)


def test_the_last_output_is_that_of_the_last_attempt() -> None:
    """The note has the end of both streams of the last attempt."""
    with pytest.raises(WorkerError) as caught:
        die_again()
    (tail,) = (note for note in caught.value.__notes__ if note.startswith("last lines of rank 1:"))
    assert "step 29 of 1\n" in tail
    assert tail.endswith("\nreason of 1")
    assert " of 0" not in tail


class FailsToShutDown(dist.ProcessGroup):
    def shutdown(self) -> None:
        raise RuntimeError("the device is gone")


def make_fragile(_store: dist.Store, rank: int, size: int, _timeout: timedelta) -> dist.ProcessGroup:
    return FailsToShutDown(rank, size)


def connect_fragile(world: World) -> None:
    dist.Backend.register_backend("fragile", make_fragile, devices=["cpu"])
    dist.init_process_group(
        "fragile", init_method=f"tcp://{world.master_addr}:{world.master_port}", rank=world.rank, world_size=2
    )


@distributed(processes=2, init_connection=connect_fragile)
def return_over_a_fragile_group() -> int:
    return 42


def test_a_result_outlives_an_error_in_closing_the_group(caplog: pytest.LogCaptureFixture) -> None:
    """The function has returned: the error is logged, and the caller gets the value."""
    assert return_over_a_fragile_group() == 42
    assert "the process group was closed, after the function had returned" in caplog.text


PENDING = """
import sys, threading
import torch, torch.distributed as dist
from parallelize import distributed, rank

@distributed()
def train():
    if rank() == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        raise ZeroDivisionError
    threading.Event().wait()

try:
    train()
except ZeroDivisionError:
    print(f"initialized: {dist.is_initialized()}", flush=True)
    sys.exit(3)
"""


def test_a_failed_rank_of_torchrun_does_not_wait_for_its_collectives(run_script: Callable[..., Any]) -> None:
    """Destroying a group waits for its pending collectives, and so for other ranks; an aborted one does not."""
    ended = run_script(PENDING, launcher=TORCHRUN, check=False)
    assert ended.stdout == "initialized: False\n"
    assert "exitcode  : 3" in ended.stderr


@distributed(processes=2)
def stop_the_process_of_the_call(begun: Path) -> None:
    """Rank 0 raises; rank 1 stops the process that would report its end."""
    try:
        if rank() == 0:
            while not begun.exists():
                time.sleep(0.01)
            raise ZeroDivisionError
        begun.touch()
        time.sleep(LONG_S)
    finally:
        if rank() == 1:
            begun.write_text(str(os.getppid()))
            os.kill(os.getppid(), signal.SIGSTOP)


def test_a_worker_that_sigkill_does_not_end_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one in the driver of a GPU that hangs: neither the call waits for it, nor will Python at its exit."""
    monkeypatch.setattr(workers, "_KILL_TIMEOUT_S", 0.5)
    begun = tmp_path / "begun"
    try:
        with pytest.raises(ZeroDivisionError) as info:
            stop_the_process_of_the_call(begun)
        assert info.value.__notes__[-1] == "the others: rank 1: stopped"
        assert "does not end, 0.5 s after SIGKILL" in caplog.text
        assert not multiprocessing.active_children()
    finally:
        os.kill(int(begun.read_text()), signal.SIGCONT)


@distributed(processes=2, timeout=60)
def die_later(after_s: float) -> int:
    """Return, and let rank 1's process be killed a moment later."""
    if rank() == 1:
        threading.Timer(after_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
    return 1


@pytest.mark.parametrize("after_ms", range(0, 120, 10))
def test_a_rank_that_is_killed_as_it_returns(after_ms: int) -> None:
    """Before its value is written, it is an error; after that, the call has its values; it never waits for ever."""
    try:
        result = str(die_later(after_ms / 1000))
    except WorkerError as error:
        result = str(error)
    assert result == "1" or "was ended by SIGKILL" in result


@distributed(processes=2)
def leave_badly(way: str) -> int:
    """Return a value; rank 1's process ends badly after it, or not at all."""
    if rank() == 1 and way == "exit":
        multiprocessing.util.Finalize(None, os._exit, args=(3,), exitpriority=1)
    elif way == "thread":
        threading.Thread(target=time.sleep, args=[LONG_S]).start()
    return rank() + 1


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("exit", "the process of rank 1 ended with code 3 after the call had its values"),
        ("thread", "the process of rank 0 ended with code 1 after the call had its values"),
    ],
)
def test_what_happens_after_the_values_is_logged(way: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """No value of a finished call is lost to how its processes end."""
    assert leave_badly.all_ranks(way) == [1, 2]
    assert text in caplog.text


@distributed(processes=2)
def start_children(script: Path) -> list[object]:
    codes = []
    for how in ("returns", "raises"):
        child = os.fork()
        if child == 0 and how == "raises":
            raise ZeroDivisionError
        if child == 0:
            return ["a child's value"]
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return [*codes, subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout]


def test_a_child_of_a_rank_is_no_rank(tmp_path: Path) -> None:
    """A forked one ends where it leaves the function, with no value or error of the rank's; a script has own ranks."""
    script = tmp_path / "script.py"
    script.write_text("from parallelize import distributed, rank\nprint(distributed(processes=2)(rank).all_ranks())\n")
    assert start_children.all_ranks(script) == [[0, 1, "[0, 1]\n"]] * 2


NO_FORKS = """
import os

forks = os.fork

def fork():
    if os.path.exists(os.environ["FULL"]):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return forks()

os.fork = fork
"""

CALLS_OF_A_FULL_MACHINE = """
import os, pathlib, threading, time
from parallelize import LaunchError, distributed, rank

FULL = pathlib.Path(os.environ["FULL"])
RUNS = [FULL.with_name(f"rank {rank} runs") for rank in range(2)]
END = FULL.with_name("end")

@distributed(processes=2)
def work(waits):
    if waits:
        RUNS[rank()].touch()
        while not END.exists():
            time.sleep(0.01)
    return 1

def wait():
    print("the other call:", work(True))

if __name__ == "__main__":
    thread = threading.Thread(target=wait)
    thread.start()
    while not all(path.exists() for path in RUNS):
        time.sleep(0.01)
    FULL.touch()
    try:
        work(False)
    except LaunchError as error:
        print(error)
    FULL.unlink()
    END.touch()
    thread.join()
    print("the next call:", work(False))
"""


def test_a_machine_without_room_for_processes_is_named(
    tmp_path: Path, run_script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """A limit of processes or memory refuses the call, and no other one."""
    (tmp_path / "sitecustomize.py").write_text(NO_FORKS)
    variables = {"FULL": str(tmp_path / "full"), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    out = run_script(CALLS_OF_A_FULL_MACHINE, env=variables).stdout
    assert "the worker processes cannot be started\n  why: [Errno 11] Resource temporarily unavailable\n" in out
    assert "the other call: 1\nthe next call: 1\n" in out
