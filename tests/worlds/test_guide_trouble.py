"""The texts that the guide to trouble shows are those that programs print."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import TORCHRUN

pytestmark = pytest.mark.slow

Run = Callable[..., "subprocess.CompletedProcess[str]"]

GUIDE = Path(__file__).parents[2] / "examples" / "guides" / "trouble.md"

IMPORTS = """
import os, signal, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.data import DataLoader, Dataset, TensorDataset
from parallelize import all_reduce, barrier, distributed, is_main, parallel_model, rank, shard_loader

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, uses_head=True):
        return self.layer(x) + self.head(x) if uses_head else self.layer(x)

dataset = TensorDataset(torch.arange(160.0).view(40, 4) / 160)

def train_on(loader, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with parallel_model(model):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
"""

# Heading of the guide -> programs that show the texts of its section.
PROGRAMS = {
    "Expected to have finished reduction in the prior iteration": """
@distributed(processes=2)
def train():
    dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(Net())
    for _ in range(2):
        wrapped(torch.ones(2, 4), uses_head=False).sum().backward()

train()
""",
    "got mixed torch.Tensor and DTensor": """
from torch.distributed.fsdp import fully_shard

@distributed(processes=2)
def train():
    dist.init_process_group("gloo")
    model = nn.Linear(4, 4)
    fully_shard(model)
    return model.weight @ torch.ones(4)

train()
""",
    "My epoch takes as long as before": """
@distributed(processes=2)
def train(shuffle):
    train_on(DataLoader(dataset, batch_size=4, shuffle=shuffle), Net())

train(shuffle=True)
train(shuffle=False)
""",
    "NCCL timeout: Watchdog caught collective operation timeout": """
def evaluate():
    time.sleep(300)

@distributed(processes=2, timeout=40)  # for the start on a busy machine, too
def train():
    if rank() == 1:
        evaluate()
    all_reduce(1.0, op="mean")

train()
""",
    "cannot be pickled, BrokenPipeError": """
file = open("log.txt", "w")

@distributed(processes=2)
def train():
    file.write("begins")

train()
""",
    "DataLoader worker is killed, Bus error, shared memory": """
class Deadly(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)

@distributed(processes=2)
def train():
    train_on(shard_loader(DataLoader(Deadly(), batch_size=4, num_workers=1)), Net())

train()
""",
    "SyncError: ranks wait for each other": """
@distributed(processes=2)
def train():
    model = nn.Linear(6, 1)
    with parallel_model(model):
        for step in range(9):
            if rank() == 1 and step == 1: break
            model(torch.ones(2, 6)).sum().backward()

train()
""",
    "My script hangs at the end": """
@distributed(processes=2)
def leave_a_thread():
    threading.Thread(target=time.sleep, args=[60], name="uploader").start()

@distributed(processes=2)
def train():
    if is_main():
        barrier()

leave_a_thread()
train()
""",
}

# What the guide shows, and the CPU of one machine cannot.
ELSEWHERE = ("[rank0]:[E", "ERROR: Unexpected bus error", "is killed by signal: Bus error")


def section(heading: str) -> str:
    found = GUIDE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert found, heading
    return found


def shown_lines(heading: str) -> Iterator[str]:
    """Yield the lines of texts in a section, those of which a program here is to print."""
    for block in re.findall(r"```text\n(.*?)```", section(heading), re.DOTALL):
        for line in block.splitlines():
            if not any(text in line for text in ELSEWHERE):
                yield line.removesuffix("...").rstrip()


def without_numbers(text: str) -> str:
    """Return a text in which numbers do not matter, nor the name of the script."""
    return re.sub(r"\d+", "N", text.replace("script.py", "train.py"))


@pytest.mark.parametrize("heading", PROGRAMS)
def test_the_shown_text_is_printed(heading: str, run_script: Run) -> None:
    """Each line of the section's texts is in what its program prints."""
    printed = without_numbers(run_script(IMPORTS + PROGRAMS[heading], check=False).stderr)
    lines = [without_numbers(line) for line in shown_lines(heading)]
    assert lines
    missing = [line for line in lines if line not in printed]
    assert not missing, printed


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_is_taken(taken_port: int, run_script: Run) -> None:
    """By torchrun's message, and by that of a call on two nodes."""
    heading = "Address already in use"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={taken_port}")
    printed = run_script("", launcher=launcher, check=False).stderr
    node = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken_port), "NODE_RANK": "0"}
    call = "from parallelize import distributed\ndistributed(num_nodes=2, processes=1)(print)()"
    printed += run_script(call, env=node, check=False).stderr
    for line in shown_lines(heading):
        assert without_numbers(line).replace("N.N.N.N", "_") in without_numbers(printed).replace("N.N.N.N", "_")


HERE = """
@distributed(processes=2)
def use_what_the_rank_likes():
    model = Net()
    with parallel_model(model):
        for _ in range(3):
            model(torch.full((2, 4), 1.0 + rank()), uses_head=rank() == 1).sum().backward()

@distributed(processes=2, backend="fsdp")
def mix_tensors():
    model = nn.Linear(4, 4)
    with parallel_model(model):
        loss = model(torch.full((2, 4), 1.0 + rank())).sum() + (model.weight @ torch.ones(4)).sum()
        loss.backward()
        return (model.weight * torch.ones(4, 4)).sum().item()

@distributed(processes=2)
def clip_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2), nn.LayerNorm(2))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with parallel_model(model):
        model(torch.ones(2, 4)).square().sum().backward()
        with implicit_replication():
            return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))

@distributed(processes=2)
def stop_together():
    model = nn.Linear(4, 1)
    with parallel_model(model):
        for step in range(9):
            loss = model(torch.full((2, 4), 1.0 + rank())).sum()
            loss.backward()
            if all_reduce(float(rank() == 1 and step == 1), "max"):
                continue
            if all_reduce(loss.detach(), "mean") < 1e9:
                break
    return step

use_what_the_rank_likes()
print("summed" if isinstance(mix_tensors(), float) else "")
print("clipped" if clip_tensor_parallel() > 0 else "")
print("stopped", stop_together())
"""


def test_what_to_do_here_works(run_script: Run) -> None:
    """The ways out that the guide names for four of the errors."""
    assert run_script(IMPORTS + HERE).stdout.split() == ["summed", "clipped", "stopped", "0"]


@pytest.mark.parametrize("launcher", [(), TORCHRUN])
def test_who_prints(launcher: tuple[str, ...], run_script: Run) -> None:
    """A call shows rank 0's output; under torchrun all ranks print, unless `is_main()` decides."""
    program = """
@distributed(processes=2)
def train():
    print("every rank\\n", end="", flush=True)
    if is_main():
        print("one rank\\n", end="", flush=True)

train()
"""
    printed = run_script(IMPORTS + program, launcher=launcher).stdout.splitlines()
    assert printed.count("every rank") == (2 if launcher else 1)
    assert printed.count("one rank") == 1


def test_headings_are_linked() -> None:
    """The table at the top leads to every symptom, by the names that GitHub gives to headings."""
    text = GUIDE.read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", text.partition("\n## ")[0])) == anchors
