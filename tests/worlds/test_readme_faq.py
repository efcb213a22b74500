"""The messages that README explains are those that users meet."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import distributed, parallel_model, rank

README = Path(__file__).parents[2] / "README.md"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def bypassing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel_model(model):
        model[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()


def leaving_out() -> None:
    model = Net()
    with parallel_model(model):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()


def killed() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def stopping() -> None:
    breakpoint()


lock = threading.Lock()
WAYS: list[tuple[dict[str, Any], Callable[[], None]]] = [
    ({"gpus": 4}, killed),
    ({"processes": 2}, lambda: print(lock)),
    ({"bakend": "ddp"}, killed),
    ({"processes": 2, "amp": "fp16"}, killed),
    ({"processes": 2}, bypassing),
    ({"processes": 2}, leaving_out),
    ({"processes": 2}, killed),
    ({"processes": 2}, stopping),
]


def messages() -> list[str]:
    """The first column of README's table, as patterns."""
    section = README.read_text().partition("## When it says no\n")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    return [re.escape(each).replace(re.escape("..."), ".*") for each in quoted]


@pytest.mark.skipif(torch.cuda.is_available(), reason="one of the messages is of a machine without GPUs")
def test_every_message_is_what_a_user_meets() -> None:
    """Each row, in its order, is the first line of the error that its mistake gives."""
    known = messages()
    assert len(known) == len(WAYS)
    for pattern, (options, function) in zip(known, WAYS, strict=True):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is part of the pattern
            distributed(**options)(function)()
        first = f"{caught.type.__name__}: {caught.value}".splitlines()[0]
        assert re.fullmatch(pattern, first), first
