"""The Python blocks in README run unchanged."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest
from readme import README

# Imports and definitions that the blocks use but do not show.
PRELUDE = """
import contextlib, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from parallelize import distributed, no_sync, parallel_model, rank, shard_loader

x, y = torch.randn(50, 3), torch.arange(50) % 2
loader = test_loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
loss_of = nn.functional.cross_entropy

class Reals(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i): return torch.ones(3) * i

reals = DataLoader(Reals(), batch_size=4)

@distributed(processes=2)
def train(epochs):
    return epochs * (rank() + 1)

def legacy_train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

@distributed(processes=2)
def block(loader, test_loader):
    noise = lambda n: torch.randn(n, 2)
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    critic_loss = lambda real, fake: fake.mean() - real.mean()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_there_are_blocks() -> None:
    """The pattern finds the blocks of README; otherwise the tests below would run nothing."""
    assert len(blocks()) >= 5


@pytest.mark.parametrize("number", range(len(blocks())))
def test_block_runs(number: int, run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Each block runs inside a function in two processes; the block that calls `train` runs in the caller."""
    code = blocks()[number]
    if "SlurmLauncher" in code:
        compile(code, "README", "exec")
        pytest.skip("needs a cluster; tests/slurm makes the same calls on one")
    if code.startswith("loss = train("):
        script = f"{PRELUDE}\n{code}\nassert (loss, losses) == (2, [2, 4])\nprint('done')"
    else:
        indented = "".join(f"    {line}\n" for line in code.splitlines())
        data = "reals" if "generator" in code else "loader"
        script = f"{PRELUDE}\n{indented}    return 'done'\nprint(block({data}, test_loader))"
    assert run_script(script).stdout.strip().endswith("done")
