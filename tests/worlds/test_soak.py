"""Many calls in a row leak nothing."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallelize import distributed

CALLS = 120
WARM = 20


def sum_over_ranks(number: int, net: nn.Module) -> tuple[int, torch.Tensor]:
    """All-reduce a number, with a model as argument and a tensor returned; fail on the last rank for some numbers."""
    if number % 10 == 9 and dist.get_rank() == dist.get_world_size() - 1:
        raise ArithmeticError(number)
    total = torch.tensor([number])
    dist.all_reduce(total)
    return int(total.item()), next(net.parameters()).detach() + 1


def call(number: int, net: nn.Module) -> None:
    """Make and check one call in one to three processes."""
    processes = 1 + number % 3
    function = distributed(processes=processes)(sum_over_ranks)
    if number % 10 == 9:
        with pytest.raises(ArithmeticError, match=str(number)):
            function(number, net)
    else:
        assert function(number, net)[0] == number * processes


@distributed(processes=2)
def fork_server() -> int:
    return psutil.Process(os.getppid()).ppid()


def resources() -> dict[str, object]:
    """Return the resources held by this process and the fork server, after collecting garbage."""
    gc.collect()
    server = fork_server()
    return {
        "files here": psutil.Process().num_fds(),
        "files of the fork server": psutil.Process(server).num_fds(),
        "temporary files": len(list(Path(tempfile.gettempdir()).iterdir())),
        "processes": sorted(each.pid for each in psutil.Process().children(recursive=True)),
        "threads": sorted(each.name for each in threading.enumerate()),
    }


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_calls_leak_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls, failed ones included, leave no file, process or thread."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    net = nn.Linear(1000, 250)
    for number in range(WARM):
        call(number, net)
    before, resident = resources(), psutil.Process().memory_info().rss
    for number in range(WARM, CALLS):
        call(number, net)
    assert resources() == before
    assert psutil.Process().memory_info().rss - resident < 100 * 2**20
