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
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

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


class LockedError(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class ForeignError(OSError):
    """Its __reduce__ omits a required argument of its class."""

    def __init__(self, path: str, *, size: int) -> None:
        super().__init__(28, "disk full", path)
        self.size = size

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self.args


def segfault() -> None:
    ctypes.string_at(0)


def raise_(error: BaseException) -> None:
    raise error


FAIL = {
    "raise": lambda: raise_(TwoArgumentsError(1, "two")),
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": segfault,
    "KeyboardInterrupt": lambda: raise_(KeyboardInterrupt()),
    "locked": lambda: raise_(LockedError()),
    "foreign": lambda: raise_(ForeignError("/scratch", size=7)),
}

# The exception in the caller: its type and attributes.
EXPECTED: dict[str, tuple[type[BaseException], dict[str, object]]] = {
    "raise": (TwoArgumentsError, {"left": 1, "right": "two", "args": ("1 and two",)}),
    "sys.exit": (WorkerError, {"exitcode": 3, "signal_name": None}),
    "os._exit": (WorkerError, {"exitcode": 3, "signal_name": None}),
    "os._exit(0)": (WorkerError, {"exitcode": 0, "signal_name": None}),
    "SIGKILL": (WorkerError, {"exitcode": -9, "signal_name": "SIGKILL"}),
    "SIGSEGV": (WorkerError, {"exitcode": -11, "signal_name": "SIGSEGV"}),
    "KeyboardInterrupt": (KeyboardInterrupt, {}),
    "locked": (WorkerError, {"exitcode": None}),
    "foreign": (WorkerError, {"exitcode": None}),
}


def wait_in_collective() -> None:
    dist.all_reduce(torch.ones(1))


def compute() -> None:
    a = torch.randn(500, 500)
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        a = (a @ a).tanh()


def sleep() -> None:
    time.sleep(LONG_S)


def sort_in_cpp() -> None:
    """Block in C++ for seconds, during which Python runs no signal handler."""
    while True:
        torch.randn(20_000_000).sort()


PEERS = {"collective": wait_in_collective, "compute": compute, "sleep": sleep, "c++": sort_in_cpp}


@distributed(processes=3)
def fail_among(peers: str, failing: tuple[int, ...], how: str, when: Path) -> str:
    if dist.get_rank() not in failing:
        PEERS[peers]()
        return "went on"
    when.with_suffix(f".{dist.get_rank()}").write_text(str(time.time()))
    FAIL[how]()
    return "did not fail"


@pytest.mark.parametrize("how", FAIL)
@pytest.mark.parametrize(
    ("peers", "failing"),
    [
        ("collective", (0, 1)),
        ("compute", (2,)),
        ("sleep", (0,)),
    ],
    ids=str,
)
def test_one_exception_says_which_rank_failed_and_how(
    how: str, failing: tuple[int, ...], peers: str, tmp_path: Path
) -> None:
    """Whichever ranks fail, the caller's exception names a failed rank and how the others ended."""
    expected, attributes = EXPECTED[how]
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
    if how == "SIGSEGV":
        shown = text.partition("Fatal Python error: Segmentation fault\n")[2].splitlines()
        assert [line.rpartition(" in ")[2] for line in shown[1:4]] == ["string_at", "segfault", "fail_among"]
        assert "Extension modules" not in text


def test_ranks_blocked_in_compiled_code_do_not_delay_it(tmp_path: Path) -> None:
    """A worker that cannot run its signal handler is killed after the grace period."""
    with pytest.raises(TwoArgumentsError):
        fail_among("c++", (1,), "raise", tmp_path / "at")
    assert time.time() - float((tmp_path / "at.1").read_text()) < WITHIN_S


@distributed(processes=2)
def raise_on_1(text: str) -> None:
    if rank() == 1:
        time.sleep(1)  # until rank 0 waits
        raise RuntimeError(text)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("text", ["could not restore the optimizer", "query on replica-3 timed out"])
def test_a_runtime_error_of_the_user_is_the_cause(text: str) -> None:
    """Whatever it says: only torch's messages about lost connections and timeouts are explained by other ranks."""
    with pytest.raises(RuntimeError, match=text) as caught:
        raise_on_1(text)
    assert type(caught.value) is RuntimeError
    assert caught.value.__cause__ is None


@distributed(processes=2)
def leave_early() -> int:
    if dist.get_rank() == 1:
        sys.exit()
    return 7


def test_sys_exit_without_a_code_returns_none() -> None:
    """sys.exit() is a return of None."""
    assert leave_early.all_ranks() == [7, None]


@distributed(processes=2)
def return_a_lock(on: int) -> object:
    if dist.get_rank() == on:
        return {"model": 1, "lock": threading.Lock()}
    time.sleep(LONG_S)
    return None


def test_an_unpicklable_value_fails_at_once() -> None:
    """The error names the rank and the item of the value, and does not wait for the other ranks."""
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"the returned value\['lock'\] cannot be pickled(.|\n)*lock") as caught:
        return_a_lock(0)
    assert time.monotonic() - started < WITHIN_S
    assert (caught.value.rank, caught.value.host) == (0, os.uname().nodename)


class FailsToUnpickle:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


@distributed(processes=2)
def return_an_unreadable_value() -> FailsToUnpickle:
    return FailsToUnpickle()


def test_a_value_that_cannot_be_unpickled_is_an_error() -> None:
    """The caller raises WorkerError with the reason."""
    with pytest.raises(WorkerError, match="cannot be unpickled in the calling process\n  why: ValueError: invalid lit"):
        return_an_unreadable_value()


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
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = run_script(PENDING, launcher=launcher, check=False)
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
        sleep()
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
def kill_a_parent(generation: int) -> None:
    if rank() == 0:
        psutil.Process().parents()[generation].kill()
    time.sleep(LONG_S)


@pytest.mark.parametrize("generation", [0, 1], ids=["process of the call", "fork server"])
def test_a_killed_fork_server_is_named(generation: int) -> None:
    """The caller hears exactly that, and the next call starts another one."""
    with pytest.raises(LaunchError, match="the fork server, which starts the worker processes, has ended"):
        kill_a_parent(generation)
    assert leave_badly("") == 1


@distributed(processes=2)
def fork_and_return(how: str) -> str:
    child = os.fork()
    if child == 0 and how == "raises":
        raise ZeroDivisionError
    if child == 0:
        return "a child's value"
    return f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"


@pytest.mark.parametrize(("how", "code"), [("returns", "0"), ("raises", "1")])
def test_a_forked_child_is_no_rank(how: str, code: str) -> None:
    """It ends where it leaves the function: its value is not the rank's, nor is its error."""
    assert fork_and_return.all_ranks(how) == [code, code]


@distributed(processes=2)
def run_a_script(script: Path) -> str:
    return subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout


def test_a_script_that_a_rank_runs_is_no_rank(tmp_path: Path) -> None:
    """It inherits the rank's variables, and its call has processes of its own."""
    script = tmp_path / "script.py"
    script.write_text("from parallelize import distributed, rank\nprint(distributed(processes=2)(rank).all_ranks())\n")
    assert run_a_script.all_ranks(script) == ["[0, 1]\n"] * 2
