"""One short run of two processes for each feature of README whose other tests are all slow."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import SyncError, barrier, checkpoints, distributed, parallel_model, rank, shard_loader


def test_ranks_in_different_collectives_are_a_deadlock() -> None:
    """The error names the line of each rank."""

    @distributed(processes=2)
    def part() -> None:
        if rank() == 0:
            dist.all_reduce(torch.ones(4))
        else:
            barrier("saved")

    with pytest.raises(SyncError, match="ranks are in different collectives") as raised:
        part()
    for number, collective in enumerate((r"all_reduce of float32\[4\]", "barrier")):
        assert re.search(rf"rank {number} waits at test_features.py:\d+ in .*{collective}", str(raised.value))


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(backend: str, tmp_path: Path) -> None:
    """A rank is killed between two checkpoints; the run is started again by itself."""

    @distributed(processes=2, backend=backend, seed=0, max_restarts=1)
    def train(folder: Path, *, kill: bool) -> list[torch.Tensor]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        data = TensorDataset(torch.arange(32.0).reshape(16, 2))
        loader = shard_loader(DataLoader(data, batch_size=2, shuffle=True))
        things = {"model": model, "optimizer": optimizer, "loader": loader}
        with parallel_model(model), checkpoints(folder, every=1, **things) as saved:
            for _ in range(loader.epoch, 2):
                for step, (x,) in enumerate(loader):
                    if kill and rank() == 1 and step == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                    saved.step()
        return [each.detach().clone() for each in model.parameters()]

    whole, resumed = train(tmp_path / "whole", kill=False), train(tmp_path / "resumed", kill=True)
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


@pytest.mark.parametrize(
    "launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")], ids=["python", "torchrun"]
)
def test_a_script_is_run_by_python_or_by_torchrun(
    launcher: tuple[str, ...], run_script: Callable[..., CompletedProcess[str]]
) -> None:
    """It needs no `if __name__ == "__main__"`; the processes of torchrun join."""
    script = """
        from parallelize import all_reduce, distributed

        @distributed(processes=2)
        def train(number):
            return all_reduce(number, "sum")

        print(f"<{train(21)}>", flush=True)
    """
    # Of torchrun's processes, one may end its line after the other has begun its own.
    assert run_script(script, launcher=launcher).stdout.count("<42>") == (2 if launcher else 1)


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
