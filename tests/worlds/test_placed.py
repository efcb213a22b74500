"""Calls in processes that torchrun, mpirun or the user started: they join that world and start no process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ranks import free_port

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from parallelize import ConfigError, distributed, rank, world_size

class Result:
    pass

@distributed(**json.loads(sys.argv[1]))
def train(factor):
    total = torch.ones(1) * rank()
    dist.all_reduce(total)
    return [total.item() * factor, rank(), world_size()]

@distributed()
def give(x):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, x + rank())
    return model, lambda y: x * y, Result, model.weight

try:
    result = [train(1), train(2), train.all_ranks(1), distributed(timeout=600)(rank).all_ranks()]
    model, scale, kind, same = give(3.0)
    assert (model.weight.item(), scale(2.0), kind is Result, same is model.weight) == (3.0, 6.0, True, True)
    assert [scale(2.0) for _, scale, _, _ in give.all_ranks(4.0)] == [8.0, 8.0]
except ConfigError as error:
    result = str(error)
sys.stdout.write(json.dumps(result) + "\\n")  # one write: lines of two ranks do not mix
"""

RESULT = [[1.0, 0, 2], [2.0, 0, 2], [[1.0, 0, 2], [1.0, 1, 2]], [0, 1]]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OPEN_MPI = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
MPICH = ["mpiexec.hydra", "-n", "2", sys.executable]
LAUNCHERS = {"torchrun": TORCHRUN, "open mpi": OPEN_MPI, "mpich": MPICH}


def results(launcher: str, folder: Path, options: dict[str, object]) -> list[object]:
    """Return what each process prints, in any order."""
    command = LAUNCHERS[launcher]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs the command {command[0]!r}")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*command, str(script), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", '"'))]
    assert len(printed) == 2, done.stderr
    return printed


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_joins_the_launchers_world(launcher: str, tmp_path: Path) -> None:
    """In two processes of one launcher every call runs as one of two ranks and returns rank 0's value, of any kind."""
    assert results(launcher, tmp_path, {}) == [RESULT, RESULT]


def test_a_request_that_does_not_fit_names_both(tmp_path: Path) -> None:
    """The error of processes=4 in a world of two has both numbers, on every rank."""
    for result in results("torchrun", tmp_path, {"processes": 4}):
        assert "processes per node: 4 asked for, 2 started" in str(result)


def by_hand(rank: int) -> Mapping[str, Any]:
    return {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "RANK": rank, "LOCAL_RANK": rank}


def by_mpirun(rank: int) -> Mapping[str, Any]:
    names = {"SIZE": 2, "LOCAL_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}


@pytest.mark.parametrize("variables", [by_hand, by_mpirun])
def test_without_an_agent_rank_0_serves_the_store(variables: Any, tmp_path: Path) -> None:
    """With torchrun's or mpirun's variables set by hand; calls with another timeout= use the same store."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, str(script), "{}"],
            env={
                **os.environ,
                **{name: str(value) for name, value in variables(rank).items()},
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [json.loads(process.communicate(timeout=240)[0]) for process in started] == [RESULT, RESULT]
