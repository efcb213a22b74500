"""The startup summary: rank 0 logs one line when training starts, and its numbers are right."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, shard_loader
from parallelize.run.startup_summary import size_text

pytestmark = pytest.mark.slow


def train_in_two_blocks() -> int:
    """Return the bytes of this process's gradients."""
    model = nn.Sequential(nn.Linear(64, 301), nn.Linear(301, 10))
    model[0].bias.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=16)
    gradients = 0
    for _ in range(2):
        with parallel_model(model):
            with torch.no_grad():
                model(torch.zeros(1, 64))  # an evaluation logs no summary
            for (x,) in shard_loader(loader):
                model(x).sum().backward()
                gradients = sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)
                optimizer.step()
                optimizer.zero_grad()
    return gradients


def test_the_line_agrees_with_the_measured_sizes(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once in a run, on rank 0, before the first step."""
    caplog.set_level("INFO", logger="parallelize")
    gradients = distributed(processes=2, logs="all")(train_in_two_blocks)()
    text = (
        "Sequential: 22,585 parameters, 22,284 of them trained; 2 processes on 2 cpu device(s); "
        f"batches: 16 x 2 processes = 32 global; {size_text(gradients)} of gradients averaged a step; fp32"
    )
    assert [each for each in caplog.messages if "parameters" in each] == [text]


@pytest.mark.parametrize("level_set", ["INFO", "inside", ""])
def test_the_callers_log_level_applies_to_the_workers(run_script, level_set: str) -> None:
    """With level INFO, set by the caller or in the function, rank 0's line is on stderr once a call; else it is not."""
    script = """
        import logging, sys, torch
        from parallelize import distributed, parallel_model
        if sys.argv[1:] == ["INFO"]:
            logging.basicConfig(level="INFO", format="%(name)s: %(message)s")

        @distributed(processes=2)
        def train(*level_set):
            if "inside" in level_set:
                logging.basicConfig(level="INFO", format="%(name)s: %(message)s")
            logging.getLogger("another").info("shown, too")
            model = torch.nn.Linear(1, 1)
            with parallel_model(model):
                model(torch.ones(1)).backward()

        train(*sys.argv[1:])
        train(*sys.argv[1:])
    """
    log = run_script(script, args=(level_set,)).stderr
    line = r"^parallelize: Linear: 2 parameters; 2 processes on 2 cpu device\(s\); 8 bytes of gradients averaged a step"
    assert len(re.findall(line, log, re.MULTILINE)) == (2 if level_set else 0)
    assert log.count("another: shown, too\n") == (2 if level_set else 0)
