"""`train.compare` refuses calls that it cannot compare, before it starts a process."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import as_rank

from parallelize import ConfigError, distributed


@distributed(processes=2)
def train() -> None: ...


@pytest.mark.parametrize(
    ("options", "steps", "message"),
    [
        ({}, 0, r"train.compare\(0, ...\)(.|\n)*number of optimizer steps"),
        ({}, "data", r"train.compare\('data', ...\)(.|\n)*use train.compare\(5, ...\)"),
        ({"processes": 1}, 5, r"on one device(.|\n)*options\(processes=2\)"),
        ({"num_nodes": 2}, 5, r"num_nodes=2(.|\n)*options\(num_nodes=1\)"),
    ],
    ids=["no step", "no number", "one device", "nodes"],
)
def test_calls_that_cannot_be_compared_are_refused(options: dict[str, Any], steps: Any, message: str) -> None:
    """Each error names the reason and what to do."""
    with pytest.raises(ConfigError, match=message):
        train.options(**options).compare(steps)


def test_ranks_cannot_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of a run and under torchrun the processes are already there."""
    with as_rank(0, 2), pytest.raises(ConfigError, match="a process of a run"):
        train.compare(5)
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="without torchrun"):
        train.compare(5)
