"""A node of a call, as it is made in a process."""

from __future__ import annotations

import tracemalloc

import torch

from parallelize.call.task import Task
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.launchers.local.nodes import Nodes


def function(_: object) -> None: ...


def test_a_call_on_one_node_does_not_write_its_arguments_down() -> None:
    """Nodes compare arguments as text: that of a million numbers has megabytes, and one node has no other."""
    layout = Layout(Config.parse(processes=2), 1, ((torch.device("cpu"),),) * 2)
    numbers = list(range(10**6))
    tracemalloc.start()
    try:
        task = Task(function, (numbers,), {"more": numbers}, layout)
        nodes = Nodes(None, task, patience_s=1.0, key="", serves_store=False)
        assert nodes.start() > 0
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    nodes.close()
    assert most < 10**6
