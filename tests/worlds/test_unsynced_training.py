"""Training without parallel_model, where nothing synchronizes the ranks, causes a warning."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallelize import all_reduce, distributed, parallel_model, rank


def _fit(model: nn.Module, average: Callable[[nn.Module], None] = lambda model: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.full((2, 4), rank() + 1.0)).sum().backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()


def _average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = all_reduce(parameter.grad, "mean")


@distributed(processes=2)
def train(ways: tuple[str, ...]) -> None:
    for way in ways:
        print(way, file=sys.stderr)
        model = nn.Linear(4, 1)
        if way == "ddp":
            _fit(nn.parallel.DistributedDataParallel(model))
        elif way == "by hand":
            _fit(model, _average_gradients)
        elif way == "with a group that counts no collectives":
            importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
            dist.new_group(backend="fake")
            _fit(model)
        elif way == "in a block":
            with parallel_model(model):
                _fit(model)
        elif way == "after its block":
            with parallel_model(model):
                pass
            _fit(model)
        else:
            _fit(model)


@pytest.mark.parametrize("way", ["unsynced", "after its block"])
def test_unsynced_training_is_warned_of_once(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The warning names the line of the optimizer's step, and the fix; also if the loop follows the block."""
    train((way, "unsynced again"))
    err = capsys.readouterr().err
    assert err.count("each of 2 processes trains a separate model") == 1
    assert "test_unsynced_training.py" in err.partition("UserWarning")[0]
    assert "with parallel_model(model):" in err


@pytest.mark.parametrize("way", ["ddp", "by hand", "in a block", "with a group that counts no collectives"])
def test_averaged_training_is_not_warned_of(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is unsynced training later in the same run, which is taken as intended."""
    train((way, "unsynced"))
    assert capsys.readouterr().err == f"{way}\nunsynced\n"
