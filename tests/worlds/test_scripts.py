"""A script needs no guard, no file and no importable name for what it ships."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

Run = Callable[..., "CompletedProcess[str]"]

# A class, a closure and a global of __main__; started over and over if a worker ran the script again.
SCRIPT = r"""
import torch
from torch import nn
from parallelize import all_reduce, distributed, parallel_model, rank

class Net(nn.Linear):
    pass

scale = 2.0

@distributed(processes=2)
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel_model(model):
        model(torch.full((1, 1), scale * (rank() + 1))).sum().backward()
        optimizer.step()
    return type(model), all_reduce(torch.ones(1), "sum").item()

model = Net(1, 1, bias=False)
nn.init.zeros_(model.weight)
kind, ranks = train(model)
print(f"once {kind is Net} {ranks} {model.weight.item():.1f}\n", end="")  # one write: ranks share the stream
"""


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_a_script_without_a_guard_trains_its_model(how: str, run_script: Run) -> None:
    """However Python got the code, it runs once, and the model that went in comes back trained by both ranks."""
    # The gradient is the mean of 2 and 4.
    assert run_script(SCRIPT, how=how).stdout == "once True 2.0 -0.3\n"


def test_torchrun_starts_the_same_script(run_script: Run) -> None:
    """Where torchrun has placed the processes, the call joins them, and every rank has the result."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert run_script(SCRIPT, launcher=torchrun).stdout.splitlines() == ["once True 2.0 -0.3"] * 2


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_python_ends_in_peace_where_torchrun_started_it(run_script: Run) -> None:
    """No process aborts at its end, again and again: a gloo thread that outlives the group may free a tensor then."""
    for _ in range(20):
        test_torchrun_starts_the_same_script(run_script)
