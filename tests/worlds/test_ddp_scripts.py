"""Functions that initialize the process group themselves and use DistributedDataParallel: as under torchrun."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from ranks import TORCHRUN

pytestmark = pytest.mark.slow

Run = Callable[..., "CompletedProcess[str]"]

FUNCTION = """
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from parallelize import ConfigError, all_reduce, distributed, parallel_model, rank

def steps(model):
    net = nn.parallel.DistributedDataParallel(model)
    net(torch.full((1, 1), float(rank()))).sum().backward()
    return model.weight.grad.item()

@distributed(processes=2)
def train(initialized):
    model = nn.Linear(1, 1, bias=False)
    found = []
    if not initialized:
        for wrong in ({"rank": 1 - rank(), "world_size": 2}, {"rank": 0, "world_size": 4}):
            try:
                init_process_group("gloo", **wrong)
            except ConfigError as error:
                found.append(type(error).__name__)
        all_reduce(1.0, "mean")
        own = {"init_method": "env://", "rank": rank(), "world_size": 2}
        init_process_group("gloo", **own, timeout=timedelta(seconds=77))
        group = dist.group.WORLD._get_backend(torch.device("cpu"))
        found.append(group.options._timeout.total_seconds())
    found.append(steps(model))
    pair = dist.new_group([0, 1])
    dist.destroy_process_group(pair)
    destroy_process_group()
    if not initialized:
        dist.init_process_group()
    found.append(all_reduce(float(rank()), "mean"))
    with parallel_model(model):
        model.zero_grad()
        model(torch.full((1, 1), float(rank()))).sum().backward()
    dist.destroy_process_group()
    return found + [model.weight.grad.item()]

initialized = SETUP
found = [train(initialized), train(initialized)] if not initialized else [train(initialized), dist.is_initialized()]
from torch.distributed import distributed_c10d
found.append(init_process_group is dist.init_process_group is distributed_c10d.init_process_group)
print(f"{found}\\n", end="")
"""
OWN = ["ConfigError", "ConfigError", 77.0, 0.5, 0.5, 0.5]


def test_a_function_initializes_the_group_itself(run_script: Run) -> None:
    """It gets a group with its own options, may end it and begin again, and the run's blocks and helpers use it."""
    assert run_script(FUNCTION.replace("SETUP", "False"), timeout_s=240).stdout == f"{[OWN, OWN, True]}\n"


@pytest.mark.parametrize("setup", ["False", "dist.init_process_group('gloo') is None"])
def test_a_function_under_torchrun(setup: str, run_script: Run) -> None:
    """The same in torchrun's processes; a group that the script has made stays until the script ends it."""
    expected = [OWN, OWN, True] if setup == "False" else [[0.5, 0.5, 0.5], True, True]
    done = run_script(FUNCTION.replace("SETUP", setup), launcher=TORCHRUN, timeout_s=240)
    assert done.stdout.splitlines() == [str(expected)] * 2
