"""Programs that initialize the process group themselves and use DistributedDataParallel: as under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

Run = Callable[..., "CompletedProcess[str]"]

SCRIPTS = Path(__file__).with_name("ddp_scripts")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
RUN = """
import runpy, sys
from parallelize import distributed

@distributed(processes=2)
def run(*arguments):
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")

run(*sys.argv[1:])
"""
PARALLELIZE = ("-c", RUN)


def trained(script: str, launcher: tuple[str, ...], folder: Path) -> tuple[list[Any], str]:
    """Run a script on two ranks; return what each of them has saved, and the output."""
    folder.mkdir()
    command = [sys.executable, *launcher, str(SCRIPTS / f"{script}.py"), str(folder)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        # Under torchrun, where this package has no part, torch's threads may abort a process at its exit.
        if launcher != TORCHRUN or "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)], done.stdout


@pytest.mark.parametrize("script", [path.stem for path in sorted(SCRIPTS.glob("*.py"))])
def test_a_script_for_torchrun_trains_the_same_weights(script: str, tmp_path: Path) -> None:
    """Every rank saves bit by bit what it saves under torchrun: nothing is averaged, sharded or seeded twice."""
    expected, said = trained(script, TORCHRUN, tmp_path / "torchrun")
    found, said_too = trained(script, PARALLELIZE, tmp_path / "parallelize")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert [line in said for line in said_too.splitlines()].count(False) == 0


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
        init_process_group("gloo", rank=rank(), world_size=2, timeout=timedelta(seconds=77))
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
