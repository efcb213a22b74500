"""SIGUSR1 and SIGUSR2 to a program while its workers run: handlers run as if the function ran in the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.worlds.test_launch_stopping import GONE_WITHIN_S, wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import faulthandler, os, pathlib, signal, sys, time
from parallelize import distributed, rank, should_stop
from parallelize.cluster.slurm_allocation import STOP_FILE_VARIABLE

FOLDER = pathlib.Path(sys.argv[1])
CALLERS_HANDLER, RANKS = sys.argv[2], sys.argv[3].split()

def note(name):
    number = len(list(FOLDER.glob(f"{name}.*"))) + 1
    FOLDER.joinpath(f"{name}.{number}").touch()

@distributed(processes=2)
def train():
    name = f"rank{rank()}"
    if str(rank()) in RANKS:
        signal.signal(signal.SIGUSR1, lambda *_: note(name))
    if RANKS == ["ignore"]:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    FOLDER.joinpath(f"ready.{rank()}").touch()
    stop_file = pathlib.Path(os.environ.get(STOP_FILE_VARIABLE, FOLDER / "none"))
    try:
        while not FOLDER.joinpath("end").exists():
            time.sleep(0.01)
            if stop_file.exists():
                FOLDER.joinpath("warned").touch()
        return should_stop()
    finally:
        note(f"finally{rank()}")

if CALLERS_HANDLER == "python":
    signal.signal(signal.SIGUSR1, lambda *_: note("caller"))
if CALLERS_HANDLER == "c":
    faulthandler.register(signal.SIGUSR1, open(FOLDER / "stacks", "w"))
before = signal.getsignal(signal.SIGUSR1)
print(train(), signal.getsignal(signal.SIGUSR1) == before)
if CALLERS_HANDLER == "c":
    signal.raise_signal(signal.SIGUSR1)
"""


class Program:
    """A program whose ranks have a handler of SIGUSR1, or whose caller has."""

    def __init__(self, folder: Path, callers_handler: str, ranks: str, variables: dict[str, str]) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), callers_handler, ranks],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **variables},
        )
        self.wait_for("ready.0", "ready.1")
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def wait_for(self, *names: str) -> None:
        wait_until(lambda: all((self.folder / name).exists() for name in names), self.process)

    def ran(self) -> set[str]:
        """Return the handlers that have run, numbered."""
        return {path.name for name in ("rank", "caller") for path in self.folder.glob(f"{name}*.*")}

    def end(self) -> str:
        """Let the function return; return what the program has printed."""
        (self.folder / "end").touch()
        out, err = self.process.communicate(timeout=GONE_WITHIN_S)
        assert self.process.returncode == 0, err
        return out


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts the program and waits until its ranks run."""
    programs: list[Program] = []

    def start(callers_handler: str, ranks: str, **variables: str) -> Program:
        programs.append(Program(tmp_path, callers_handler, ranks, variables))
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()
        program.process.communicate()
        _, alive = psutil.wait_procs(program.family, timeout=GONE_WITHIN_S)
        assert not alive


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_handlers_of_the_function_run(send: Callable[[int, int], None], start: Callable[..., Program]) -> None:
    """The signal comes to the program or to its group, as `timeout` and a shell send it; twice, as they stay."""
    program = start("none", "0 1")
    send(program.process.pid, signal.SIGUSR1)
    program.wait_for("rank0.1", "rank1.1")
    send(program.process.pid, signal.SIGUSR1)
    program.wait_for("rank0.2", "rank1.2")
    assert program.end() == "False True\n"
    assert program.ran() == {"rank0.1", "rank0.2", "rank1.1", "rank1.2"}


def test_a_rank_without_a_handler_goes_on(start: Callable[..., Program]) -> None:
    """Only rank 0 has a handler, under `if is_main()`: the default action would end rank 1."""
    program = start("none", "0")
    program.process.send_signal(signal.SIGUSR1)
    program.wait_for("rank0.1")
    assert program.end() == "False True\n"


def test_a_function_that_ignores_the_signal_goes_on(start: Callable[..., Program]) -> None:
    """`signal.signal(signal.SIGUSR1, signal.SIG_IGN)` in the function."""
    program = start("none", "ignore")
    program.process.send_signal(signal.SIGUSR1)
    assert program.end() == "False True\n"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_without_handlers_the_program_ends(number: signal.Signals, start: Callable[..., Program]) -> None:
    """As one process does; the workers run their `finally` blocks first."""
    program = start("none", "")
    program.process.send_signal(number)
    program.process.communicate(timeout=GONE_WITHIN_S)
    assert program.process.returncode == -number
    assert len(list(program.folder.glob("finally*"))) == 2


def test_a_handler_of_the_caller_runs_instead(start: Callable[..., Program]) -> None:
    """A handler that the caller has installed before the call is neither replaced, nor joined by those of ranks."""
    program = start("python", "0 1")
    program.process.send_signal(signal.SIGUSR1)
    program.wait_for("caller.1")
    assert program.end() == "False True\n"
    assert program.ran() == {"caller.1"}


def test_a_handler_of_the_caller_in_c_stays(start: Callable[..., Program]) -> None:
    """Python does not know of those of faulthandler, which stay for the call, and after it."""
    program = start("c", "0 1")
    program.process.send_signal(signal.SIGUSR1)
    stacks = program.folder / "stacks"
    wait_until(lambda: "most recent call first" in stacks.read_text(), program.process)
    assert program.end() == "False True\n"
    assert stacks.read_text().count("Current thread") == 2
    assert program.ran() == set()


@pytest.mark.parametrize("ranks", ["", "0 1"])
def test_in_a_job_should_stop_and_handlers_of_the_function(ranks: str, start: Callable[..., Program]) -> None:
    """Slurm's warning makes should_stop() true, and runs the handlers that there are; it ends nothing."""
    program = start("none", ranks, SLURM_JOB_ID="65")
    program.process.send_signal(signal.SIGUSR1)
    names = {f"rank{rank}.1" for rank in ranks.split()}
    program.wait_for("warned", *names)
    assert program.end() == "True True\n"
    assert program.ran() == names


def test_a_signal_to_all_processes_comes_once(start: Callable[..., Program]) -> None:
    """Some clusters send it to every process of a job: ranks that have it already do not get the caller's, too."""
    program = start("none", "0 1")
    # Those that lead a process group; the first server does so, too, and the program has started it.
    ranks = [process for process in program.family if process.pid == os.getpgid(process.pid)]
    servers = {process.ppid() for process in ranks} - {program.process.pid}
    for process in program.family:
        process.send_signal(signal.SIGUSR1)
    program.wait_for("rank0.1", "rank1.1")
    program.process.send_signal(signal.SIGUSR1)
    # The server of the ranks forgets its own when it has heard of the caller's.
    assert len(servers) == 1
    wait_until(lambda: not any(_has_pending_signal(pid) for pid in servers), program.process)
    assert program.ran() == {"rank0.1", "rank1.1"}
    program.process.send_signal(signal.SIGUSR1)
    program.wait_for("rank0.2", "rank1.2")
    program.end()
    assert program.ran() == {"rank0.1", "rank0.2", "rank1.1", "rank1.2"}


def _has_pending_signal(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (shared,) = (line for line in lines if line.startswith("ShdPnd:"))
    return int(shared.split()[1], 16) != 0
