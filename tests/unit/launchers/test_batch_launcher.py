"""Calls as they are sent to other machines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from parallelize.call.task import Call, Task
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.launchers.batch_launcher import NodeCall


def function(_: object) -> None: ...


def test_another_machine_gets_the_content_of_a_memmap(tmp_path: Path) -> None:
    """It may have another file at the path, or none."""
    np.arange(20_000.0).tofile(tmp_path / "x")
    memmap = np.memmap(tmp_path / "x", dtype=np.float64, mode="r")
    layout = Layout(Config.parse(processes=2), 1, ((torch.device("cpu"),),) * 2)
    call = NodeCall.of(Task.of(Call(function, (memmap, memmap[5:]), {}, layout)))
    (tmp_path / "x").unlink()
    (tmp_path / "call").write_bytes(call.task)
    whole, part = Task.read(tmp_path / "call", device=torch.device("cpu")).args
    np.testing.assert_array_equal(whole, np.arange(20_000.0))
    np.testing.assert_array_equal(part, np.arange(20_000.0)[5:])
