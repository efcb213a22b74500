"""The numbers of the startup summary and their format."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import compute_layout
from parallelize.plugins.base import LocalEngine
from parallelize.run.context import Runtime
from parallelize.run.startup_summary import StartupSummary, size_text


def run_of_two() -> Runtime:
    return Runtime(World(world_size=2, local_world_size=2), compute_layout(Config.parse(processes=2), Hardware()))


def line(*models: nn.Module, run: Runtime | None = None) -> str:
    summary = StartupSummary(run or run_of_two())
    for model in models:
        summary.add_model(model, LocalEngine(model))
    return summary.text()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (7.25 * 2**30, "7.2 GiB"),
        (1000 * 2**30, "1000.0 GiB"),
    ],
)
def test_sizes_are_written_for_people(size: float, text: str) -> None:
    """The unit is the largest one that gives at least 1."""
    assert size_text(size) == text
    assert size_text(3 * 2**40) == "3.0 TiB"


def test_several_models_are_one_line() -> None:
    """Their parameters are added up, and written in millions where there are that many."""
    with torch.device("meta"):
        assert line(nn.Linear(1000, 2000), nn.Conv1d(1, 1, 1)).startswith(
            "Linear + Conv1d: 2.0 M parameters; 2 processes on 2 cpu device(s)"
        )


@pytest.mark.parametrize(("count", "text"), [(999_999, "999,999"), (1_000_000, "1.0 M"), (2_345_678_901, "2,345.7 M")])
def test_parameters_are_counted(count: int, text: str) -> None:
    """Those that are trained are counted too, if some are not."""
    with torch.device("meta"):
        frozen = nn.Linear(count - 3, 1, bias=False).requires_grad_(False)
        assert f": {text} parameters, 3 of them trained; " in line(frozen, nn.Linear(3, 1, bias=False))
        assert f": {text} parameters; " in line(nn.Linear(count, 1, bias=False))


@pytest.mark.parametrize(
    ("world", "options", "hardware", "is_logged"),
    [
        (World(), {"processes": 1}, Hardware(), False),
        (World(world_size=2, local_world_size=2), {"processes": 2}, Hardware(), True),
        (World(rank=1, local_rank=1, world_size=2, local_world_size=2), {"processes": 2}, Hardware(), False),
        (World(), {"backend": "dp", "gpus": 2}, Hardware("cuda", 2), True),
        (World(), {"backend": "dp", "gpus": 1}, Hardware("cuda", 1), False),
    ],
)
def test_rank_0_of_a_parallel_run_logs_the_summary_once(caplog, monkeypatch, world, options, hardware, is_logged):
    """A single process with a single device logs nothing."""
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (0, 2**30))
    summary = StartupSummary(Runtime(world, compute_layout(Config.parse(**options), hardware)))
    model = nn.Linear(1, 1)
    summary.add_model(model, LocalEngine(model))
    with caplog.at_level("INFO", logger="parallelize"):
        summary.log_once()
        summary.log_once()
    assert [each.getMessage() for each in caplog.records] == [summary.text()] * is_logged


def test_only_active_loaders_are_listed() -> None:
    """Batch sizes are in the line while a reference to their loader is kept, equal ones once."""
    run, model = run_of_two(), nn.Linear(1, 1)
    kept = [run.loaders.begin(sizes) for sizes in ("8 x 2 processes = 16 global", "8 x 2 processes = 16 global", "")]
    assert "; batches: 8 x 2 processes = 16 global; 8 bytes of gradients averaged a step; fp32" in line(model, run=run)
    kept.append(run.loaders.begin("4 x 2 processes = 8 global"))
    assert "; batches: 4 x 2 processes = 8 global and 8 x 2 processes = 16 global; " in line(model, run=run)
    assert "batch" not in line(model)  # of another run
    kept.clear()
    gc.collect()
    assert "batch" not in line(model, run=run)
