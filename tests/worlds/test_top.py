"""`parallelize top` on runs in another process, which go on undisturbed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import wait_for

from parallelize.cli.top import ask, verdict
from parallelize.cluster.call_folders import call_folder
from parallelize.hang_detection.rank_state import RankState
from parallelize.run.live_facts import listed_runs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="runs are listed on Linux")]

SCRIPT = """
import os, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from parallelize import all_reduce, barrier, distributed, parallel_model, rank, shard_loader

class Slow(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.05 if rank() == 1 else 0.001)
        return torch.full((4,), float(index))

@distributed(processes=2)
def train():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with parallel_model(model):
        for x in shard_loader(DataLoader(Slow(), batch_size=1)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if all_reduce(float(os.path.exists("stop")), "max"):
                break
    return "trained"

@distributed(processes=2)
def wait():
    if rank() == 0:
        time.sleep(60)
    barrier("evaluated")
    return "met"

print(train() if sys.argv[1] == "train" else wait())
"""


@pytest.fixture
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the script, and wait until its run is listed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", request.param]
    before = listed_runs()
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        # Its folder of temporary files is this test's, where other programs make no calls.
        wait_for(lambda: bool(stores() - before), timeout_s=200)
        (address,) = stores() - before
        wait_for(lambda: bool(ask([address])[address]), timeout_s=200)
        yield process, address


def stores() -> set[str]:
    """Return the paths of the stores that are listed; other programs may list addresses meanwhile."""
    return {address for address in listed_runs() if address.startswith("/")}


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parallelize", "top", "--once", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("program", ["train"], indirect=True)
def test_the_rank_that_the_others_wait_for_is_named(program: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    """With its data loader, and a line for each rank; the run is found by itself and by its address."""
    process, address = program
    time.sleep(2)  # a first step
    for shown in (top(), top(address)):
        lines = shown.stdout[shown.stdout.index(address) :].splitlines()
        assert lines[1].split() == ["rank", "host", "steps/s", "computing", "data", "waiting", "memory", "line"]
        first, second = (line.split() for line in lines[2:4])
        assert (first[0], second[0]) == ("0", "1")
        assert 2 < float(first[2]) < 21
        assert int(first[5].rstrip("%")) > 50 > int(second[5].rstrip("%"))
        assert lines[4].startswith("rank 1 is ")
        assert lines[4].endswith(" times slower than the median in its data loader")
    (tmp_path / "stop").touch()
    assert process.communicate(timeout=120)[0].endswith("trained\n")
    assert address not in listed_runs()


@pytest.mark.parametrize("program", ["wait"], indirect=True)
def test_a_wait_is_shown_with_the_awaited_rank(program: tuple[subprocess.Popen[str], str]) -> None:
    """Since when, and where both are; it ends as it would have."""
    process, address = program
    time.sleep(3)
    lines = top(address).stdout.splitlines()
    assert " in barrier('evaluated'), for rank 0 since " in lines[3]
    assert lines[4].startswith("rank 1 waits at script.py:")
    assert process.communicate(timeout=120)[0].endswith("met\n")


SPOOF = """
import json, os, socket, sys, threading, time
import torch.distributed as dist

mode, user = sys.argv[1], os.getuid()
os.setgid(65534), os.setuid(65534)
escape = "\\x1b]0;PWNED\\x07\\x1b[31m\\u202e"
FACTS = dict(host=escape, world_size=1, at_s=1.0, steps=1, looks={"computing": 1}, waits_s=0, memory_bytes=1)
STATEMENT = ["loop", escape, escape, [escape]]
STATE = [0, "running", escape, escape, [], [escape], False, 0, 10**9, FACTS, "other", escape, [STATEMENT]]

def changed(place, value):
    return [value if number == place else field for number, field in enumerate(STATE)]

STATES = {
    "lie": STATE,
    "junk": changed(9, dict(host=1, world_size="x")),
    "many ranks": changed(9, FACTS | {"world_size": 10**30}),
    "negative rank": changed(0, -1),
    "nan": changed(9, FACTS | {"at_s": float("nan")}),
    "wrong looks": changed(9, FACTS | {"looks": [1]}),
    "wrong collectives": changed(4, [[1]]),
    "wrong wait": changed(10, "kind"),
    "wrong statements": changed(12, [["loop"]]),
    "short": STATE[:3],
    "no list": {"a": 1},
}

def serve(connection):
    while connection.recv(4096):
        if mode == "huge":
            connection.sendall(b"\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x3f" * 64)

def accept(listener):
    while True:
        threading.Thread(target=serve, args=[listener.accept()[0]], daemon=True).start()

def lie(store):
    store.add("asked", 0)
    while True:
        store.set("state/0", json.dumps(STATES[mode]))
        time.sleep(0.05)

if mode in STATES:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, work = store.port, (lie, dist.PrefixStore("parallelize/watch/0", store))
else:
    listener = socket.create_server(("127.0.0.1", 0))
    port, work = listener.getsockname()[1], (accept, listener)
threading.Thread(target=work[0], args=work[1:], daemon=True).start()
named = socket.socket(socket.AF_UNIX)
named.bind(f"\\0parallelize-run/{user}/{os.getppid()}/127.0.0.1:{port}")
print(port, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("mode", "shown"),
    [
        ("silent", "does not answer within 5 s"),
        ("huge", ""),
        ("lie", "?]0;PWNED??[31m? in ?]0;PWNED??[31m?"),
        *[
            (mode, "says what no run of this library says")
            for mode in (
                "junk",
                "many ranks",
                "negative rank",
                "nan",
                "wrong looks",
                "wrong collectives",
                "wrong wait",
                "wrong statements",
                "short",
                "no list",
            )
        ],
    ],
)
def test_a_store_of_another_user(mode: str, shown: str) -> None:
    """It is not listed, though its name says so; asked by its address, it is answered with printable characters."""
    command = [sys.executable, "-c", SPOOF, mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as spoof:
        assert spoof.stdout is not None
        address = f"127.0.0.1:{int(spoof.stdout.readline())}"
        assert f"/{address}" in Path("/proc/net/unix").read_text(errors="replace")
        assert address not in listed_runs()
        asked = top(address)
        spoof.kill()
    assert asked.returncode == (mode != "lie")
    said = asked.stdout + asked.stderr
    assert shown in said
    assert all(character.isprintable() or character == "\n" for character in said)


def test_folders_of_others_are_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As links, folders that others may write to, and files and FIFOs of such names, which stop nobody."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with call_folder() as made:
        prefix = made.name.rpartition("-")[0]
    own, shared, elsewhere = (tmp_path / name for name in (f"{prefix}-a", f"{prefix}-b", "elsewhere"))
    for folder in (own, shared, elsewhere):
        folder.mkdir(mode=0o700)
        (folder / "store").touch()
    shared.chmod(0o755)
    (tmp_path / f"{prefix}-c").symlink_to(elsewhere)
    (tmp_path / f"{prefix}-d").touch()
    os.mkfifo(tmp_path / f"{prefix}-e")
    with_fifo = tmp_path / f"{prefix}-f"
    with_fifo.mkdir(mode=0o700)
    os.mkfifo(with_fifo / "store")
    assert stores() == {str(own / "store")}
    if os.getuid() == 0:
        os.chown(own, 65534, 65534)
        assert stores() == set()


def test_runs_that_do_not_answer_are_asked_at_the_same_time(capsys: pytest.CaptureFixture[str]) -> None:
    """A store that accepts connections and is silent, three times: each is named once."""
    with contextlib.ExitStack() as listening:
        servers = [listening.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
        assert ask(addresses) == {address: {} for address in addresses}
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"{address} does not answer within 5 s" for address in addresses)


def test_without_a_run() -> None:
    """It says so, and how to ask one elsewhere."""
    shown = top("127.0.0.1:9")
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.startswith("no run of several processes answers")
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("waiting", "data", "text"),
    [
        ((0.5, 0.5, 0.48), (0.1, 0.1, 0.1), "no rank is much slower"),
        ((0.5, 0.5, 0.1), (0.1, 0.1, 0.1), "rank 2 is 1.8 times slower than the median outside of its data loader"),
        ((0.5, 0.5, 0.1), (0.1, 0.1, 0.4), "rank 2 is 1.8 times slower than the median in its data loader"),
    ],
)
def test_the_verdict(waiting: tuple[float, ...], data: tuple[float, ...], text: str) -> None:
    """A rank that waits less than the others takes longer for its own part of each step."""
    shares = {rank: {"waiting": a, "data": b} for rank, (a, b) in enumerate(zip(waiting, data, strict=True))}
    assert verdict({rank: RankState(rank, "running") for rank in shares}, shares).startswith(text)
