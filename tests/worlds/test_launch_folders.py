"""A call's folder is private, and nothing of it stays, however the call and its caller end."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ranks import wait_for
from torch.utils.data import DataLoader

from parallelize import WorkerError, distributed, rank
from parallelize.call.task import Call, Task
from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import Node
from parallelize.config.config import Config
from parallelize.config.layout import compute_layout
from parallelize.launchers.batch_launcher import NodeCall, outcomes_of

GONE_WITHIN_S = 90.0  # on a busy machine, whose fork server imports torch first


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of this process and of those that it starts; short, as the names of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="plz", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def left_in(temporary: Path) -> list[str]:
    """Return what is in the temporary folder, but for torch.compile's cache, an empty folder."""
    return [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


@distributed(processes=2)
def ranks() -> int:
    return rank()


def test_a_fifo_of_another_user_stops_no_call(temporary: Path) -> None:
    """Anybody may make one in the temporary folder, under any name; who opens it waits for its writer."""
    os.mkfifo(temporary / "parallelize-call-x")
    assert ranks.all_ranks() == [0, 1]
    assert left_in(temporary) == ["parallelize-call-x"]


KILLED = """
import os, pathlib, signal, sys, threading, time
import torch
from parallelize import distributed

class Value:
    def __reduce__(self):
        return kill_this_process, ()

def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)

@distributed(processes=2)
def train(weights):
    return Value()

if sys.argv[1] == "in a thread":
    folder = pathlib.Path(os.environ["TMPDIR"])
    threading.Thread(target=distributed(processes=2)(time.sleep), args=[300], daemon=True).start()
    while not list(folder.glob("*/setup.1")):
        time.sleep(0.01)
    sys.exit()
train(torch.ones(10**6))
"""


def is_importing(caller: subprocess.Popen[bytes], temporary: Path) -> bool:
    """Return whether the files of the call are written while its fork server imports torch."""
    for server in psutil.Process(caller.pid).children():
        with contextlib.suppress(OSError):
            is_begun = "libtorch" in Path(f"/proc/{server.pid}/maps").read_text()
            return is_begun and len(list(temporary.glob("*/setup.1"))) == 1
    return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="shows what the server has imported")
def test_nothing_is_left_of_a_program_that_is_killed_in_its_first_call(temporary: Path) -> None:
    """Arguments and the environment are in the folder, which the fork server removes when it has imported torch."""
    with subprocess.Popen([sys.executable, "-c", KILLED, ""], start_new_session=True) as process:
        wait_for(lambda: process.poll() is not None or is_importing(process, temporary), timeout_s=GONE_WITHIN_S)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    psutil.wait_procs(family, timeout=GONE_WITHIN_S)
    wait_for(lambda: not left_in(temporary), timeout_s=GONE_WITHIN_S)


@pytest.mark.slow
@pytest.mark.parametrize(("when", "code"), [("it reads the value", -signal.SIGKILL), ("in a thread", 0)])
def test_nothing_is_left_of_a_program_that_ends_in_a_call(when: str, code: int, temporary: Path) -> None:
    """Killed when its workers have ended, or as its main thread ends while another one makes a call."""
    with subprocess.Popen([sys.executable, "-c", KILLED, when], start_new_session=True) as process:
        assert process.wait(GONE_WITHIN_S) == code
    wait_for(lambda: not left_in(temporary), timeout_s=GONE_WITHIN_S)


class Looks:
    """An argument that looks at the temporary folder while it is pickled, and unpickled."""

    def __init__(self) -> None:
        self.modes: list[tuple[str, str]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        self.modes += modes()
        return modes, ()


def modes() -> list[tuple[str, str]]:
    """Return the names and modes of all that is in the temporary folder."""
    folder = Path(tempfile.gettempdir())
    return [(name, stat.filemode((folder / name).stat().st_mode)) for name in left_in(folder)]


@distributed(processes=1, launcher="local")
def seen(modes_when_read: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return modes_when_read


def test_a_call_to_another_machine_lies_in_a_private_folder(temporary: Path) -> None:
    """As ssh and Ray send it: while it is written, and where it is read."""
    looks = Looks()
    layout = compute_layout(Config.parse(processes=1), Hardware())
    call = NodeCall.of(Task.of(Call(seen.__wrapped__, (looks,), {}, layout)))
    assert looks.modes
    assert {mode for _, mode in looks.modes} == {"drwx------"}
    (outcome,) = outcomes_of([call.run(Node("127.0.0.1", 0, 0))])
    assert outcome.value
    assert {mode for _, mode in outcome.value} == {"drwx------"}
    assert left_in(temporary) == []


def die_while_loading() -> None:
    loader = DataLoader([torch.ones(10)] * 100, num_workers=1)
    for _ in loader:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_leaves_no_socket_of_its_loader(temporary: Path) -> None:
    """A loader's worker has a socket, from which the rank takes the memory of tensors; it is killed with the rank."""
    with pytest.raises(WorkerError):
        distributed(processes=2)(die_while_loading)()
    wait_for(lambda: not left_in(temporary), timeout_s=GONE_WITHIN_S)
