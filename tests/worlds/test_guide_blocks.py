"""The Python blocks in README and in the guides run unchanged."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from readme import GUIDES, README, ROOT

# Imports and definitions that the blocks use but do not show.
PRELUDE = """
import contextlib, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from parallelize import distributed, no_sync, parallel_model, rank, save, shard_loader

x, y = torch.randn(50, 3), torch.arange(50) % 2
loader = test_loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
dataset = loader.dataset
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

def Gpt(layers):
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)], nn.Linear(3, 2))

@distributed(processes=2)
def block(loader, test_loader):
    noise = lambda n: torch.randn(n, 2)
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    critic_loss = lambda real, fake: fake.mean() - real.mean()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


WITHOUT_DIGITS = str.maketrans("", "", "0123456789")

BLOCKS = {f"{page.stem} {number}": block for page in GUIDES for number, block in enumerate(blocks(page))}


def test_there_are_blocks() -> None:
    """The pattern finds the blocks of the guides; otherwise the tests below would run nothing."""
    assert len(BLOCKS) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_block_runs(name: str, run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Each block runs inside a function in two processes; blocks that decorate or call functions run in the caller."""
    code = BLOCKS[name]
    for package in ("accelerate", "lightning_fabric", "tensorboard", "transformers", "wandb"):
        # Not by an import: some of these packages change the environment of this process.
        if package in code and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if "SlurmLauncher" in code:
        compile(code, name, "exec")
        pytest.skip("needs a cluster; tests/slurm makes the same calls on one")
    page, number = name.split()
    if page == "getting_started":  # its blocks are one program, without anything before them
        script = "\n".join(BLOCKS[f"{page} {each}"] for each in range(int(number) + 1)) + "\nprint('done')"
    elif "@distributed" in code or "train." in code:
        checks = "assert (loss, losses) == (2, [2, 4])" if "losses" in code else ""
        script = f"{PRELUDE}\n{code}\n{checks}\nprint('done')"
    else:
        indented = "".join(f"    {line}\n" for line in code.splitlines())
        data = "reals" if "generator" in code else "loader"
        script = f"{PRELUDE}\n{indented}    return 'done'\nprint(block({data}, test_loader))"
    assert run_script(script).stdout.strip().endswith("done")


def test_the_first_output(tmp_path: Path) -> None:
    """README's first program prints the lines that README shows, with about the same numbers."""
    shown = re.search(r"\$ python examples/01_digits\.py\n(.*?)```", README.read_text(), re.DOTALL)
    assert shown
    printed = run(ROOT / "examples/01_digits.py", tmp_path).stdout
    for line in shown[1].splitlines():
        if line != "...":
            assert line.translate(WITHOUT_DIGITS) in printed.translate(WITHOUT_DIGITS)
    assert numbers(printed)[-1] == pytest.approx(numbers(shown[1])[-1], abs=0.03)


@pytest.mark.slow
def test_the_first_mistake(tmp_path: Path) -> None:
    """README's mistake, after the inner loop of its first program, raises the error that README shows."""
    (mistake,) = blocks(README)
    program = (ROOT / "examples/01_digits.py").read_text()
    place = '            print(f"epoch'
    names = "import barrier, distributed, parallel_model, rank,"
    script = program.replace(place, mistake + place, 1).replace("import distributed, parallel_model,", names)
    (tmp_path / "train.py").write_text(script)
    errors = run(tmp_path / "train.py", tmp_path).stderr
    shown = re.search(r"```text\n(SyncError.*?)```", README.read_text(), re.DOTALL)
    assert shown
    assert shown[1].replace(";\n", "; ") in errors


def numbers(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"\d+\.\d+", text)]


def run(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=240, check=False)
