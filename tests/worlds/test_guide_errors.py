"""The error messages quoted in the guide to debugging are those that the library raises."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import distributed, parallel_model, rank

GUIDE = Path(__file__).parents[2] / "examples" / "guides" / "debugging.md"


class Net(nn.Linear):
    pass


def assign_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel_model(model):
        loss = model(torch.full((1, 2), 1.0 + rank())).sum()
        for each, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
            each.grad = gradient
        optimizer.step()


def add_noise() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel_model(model):
        model(torch.full((1, 2), 1.0 + rank())).sum().backward()
        for each in model.parameters():
            each.grad += torch.randn_like(each)
        optimizer.step()


def kill_rank_1() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


FAILING = """\
from parallelize import barrier, distributed, rank

SIZES = {"shard-0": 100}

def samples(shard):
    return SIZES[shard]


@distributed(processes=2)
def train():
    print(samples(f"shard-{rank()}"))
    barrier()


train()
"""


def change_rate_on_rank_1() -> None:
    model = Net(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    with parallel_model(model):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] /= 1 + rank()


def ask() -> None:
    input("name of the run? ")


def unwrap() -> None:
    with parallel_model(Net(2, 1)) as model:
        print(model.module)


lines = (line for line in ())
MISTAKES: list[tuple[dict[str, Any], Callable[[], None]]] = [
    ({"gpus": 4}, kill_rank_1),
    ({"processes": 2}, lambda: print(lines)),
    ({"bakend": "ddp"}, kill_rank_1),
    ({"processes": 2, "amp": "fp16"}, kill_rank_1),
    ({"processes": 2}, assign_gradients),
    ({"processes": 2}, add_noise),
    ({"processes": 2}, change_rate_on_rank_1),
    ({"processes": 2}, kill_rank_1),
    ({"processes": 2}, ask),
    ({"processes": 2}, unwrap),
]


def messages() -> list[str]:
    """Return the first column of the guide's table of errors, as patterns."""
    section = GUIDE.read_text().partition("## Common errors\n")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    return [re.escape(each).replace(re.escape("..."), ".*") for each in quoted]


@pytest.mark.skipif(torch.cuda.is_available(), reason="one message appears only without GPUs")
def test_quoted_messages_match_the_errors() -> None:
    """Each row of the table is the first line of the error that its mistake raises."""
    patterns = messages()
    assert len(patterns) == len(MISTAKES)
    for pattern, (options, function) in zip(patterns, MISTAKES, strict=True):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is part of the pattern
            distributed(**options)(function)()
        first = f"{caught.type.__name__}: {caught.value}".splitlines()[0]
        assert re.fullmatch(pattern, first), first


def section(title: str) -> str:
    """Return the first block of text in a section of the guide."""
    text = GUIDE.read_text().partition(f"## {title}\n")[2]
    return text.partition("```text\n")[2].partition("```")[0]


def normalized(text: str) -> list[str]:
    """Return the lines without positions in a line, folders, the host, the pid, and how the other rank ended."""
    text = re.sub(r"^[ ^~]+\n", "", text, flags=re.MULTILINE)
    text = re.sub(r'File ".*/', 'File "', text).replace("script.py", "train.py")
    text = re.sub(r"on \S+ \(pid \d+\)", "on HOST (pid PID)", text)
    return re.sub(r"(others: rank 0: ).*", r"\1stopped", text).splitlines()


@pytest.mark.slow
def test_the_quoted_traceback_is_what_python_shows(run_script: Callable[..., Any]) -> None:
    """The guide's block of the section on tracebacks is the output of its program, and full has more lines."""
    folded, full = (run_script(FAILING, check=False, env={"PARALLELIZE_TRACEBACK": how}).stderr for how in ("", "full"))
    assert normalized(folded) == normalized(section("Tracebacks"))
    assert "decorator.py" in full
