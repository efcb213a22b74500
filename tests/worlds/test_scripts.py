"""Scripts without a __main__ guard, from a file, -c or stdin."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from ranks import TORCHRUN

from parallelize import barrier, distributed, rank

Run = Callable[..., "CompletedProcess[str]"]

# Uses a class, a function and a global of __main__; a worker that ran the script again would never end.
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


@pytest.mark.parametrize("how", ["file", *(pytest.param(each, marks=pytest.mark.slow) for each in ("-c", "stdin"))])
def test_a_script_without_a_guard_trains_its_model(how: str, run_script: Run) -> None:
    """The script runs once, and the model passed as an argument is trained by both ranks."""
    # The gradient is the mean of 2 and 4.
    assert run_script(SCRIPT, how=how).stdout == "once True 2.0 -0.3\n"


def test_torchrun_starts_the_same_script(run_script: Run) -> None:
    """In torchrun's processes the call runs as their ranks, and every rank has the result."""
    assert run_script(SCRIPT, launcher=TORCHRUN).stdout.splitlines() == ["once True 2.0 -0.3"] * 2


@pytest.mark.soak
def test_processes_of_torchrun_exit_cleanly(run_script: Run) -> None:
    """No process aborts at exit in 20 runs, where a gloo thread that outlives its group could free a tensor."""
    for _ in range(20):
        test_torchrun_starts_the_same_script(run_script)


def test_the_caller_is_interrupted() -> None:
    """After SIGINT no process of the call is left, which the leak guard of every test checks."""

    @distributed(processes=2, logs="all")
    def wait(caller: int) -> None:
        barrier()
        if rank() == 0:
            os.kill(caller, signal.SIGINT)
        time.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        wait(os.getpid())
