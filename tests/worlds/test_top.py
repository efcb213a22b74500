"""`parallelize top` on runs in another process, which go on undisturbed."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from parallelize.cli.top import verdict
from parallelize.hang_detection.rank_state import RankState
from parallelize.runtime.live_facts import listed_runs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="runs are listed on Linux")]

SCRIPT = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from parallelize import barrier, distributed, parallel_model, rank, shard_loader

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
        for steps, x in enumerate(shard_loader(DataLoader(Slow(), batch_size=1))):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if steps == 500:
                break
    return "trained"

@distributed(processes=2)
def wait():
    if rank() == 0:
        time.sleep(25)
    barrier("evaluated")
    return "met"

print(train() if sys.argv[1] == "train" else wait())
"""


@pytest.fixture
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the script, and wait until its run is listed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", request.param]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 200
        while not (found := addresses_of(process.pid)) and time.monotonic() < end:
            time.sleep(0.05)
        (address,) = found
        assert address in listed_runs()
        yield process, address


def addresses_of(pid: int) -> set[str]:
    """Return the addresses that are listed by the descendants of a process: other programs may run meanwhile."""
    pids = {each.pid for each in psutil.Process(pid).children(recursive=True)}
    names = Path("/proc/net/unix").read_text(errors="replace")
    return {address for of, address in re.findall(r"@parallelize-run/\d+/(\d+)/(\S+)", names) if int(of) in pids}


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parallelize", "top", "--once", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("program", ["train"], indirect=True)
def test_the_rank_that_the_others_wait_for_is_named(program: tuple[subprocess.Popen[str], str]) -> None:
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
