"""`explain()` describes a call, and starts nothing."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import hardware, option_sets, worlds

from parallelize import ConfigError, distributed
from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.explain import explain
from parallelize.config.layout import compute_layout
from parallelize.plugins import registry


@distributed(processes=2, seed=3, timeout=90, max_restarts=1, logs="all")
def train() -> None: ...


def rows(explained: str) -> dict[str, str]:
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in explained.splitlines()[1:]}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)


def test_every_decision_is_a_row() -> None:
    """Processes, devices, launcher, collectives' backend and the main options each have a row."""
    explained = train.explain()
    assert explained.startswith("train would run as\n")
    found = rows(explained)
    assert found["processes"] == "1 node(s) x 2 = 2"
    assert found["devices"] == "cpu, for each of 2 local ranks"
    assert found["starts"] == "2 processes on this node, by local"
    assert (found["collectives"], found["precision"], found["seed"]) == ("gloo", "fp32", "3")
    assert (found["timeout"], found["restarts"], found["logs"]) == ("90 s", "1", "all")
    assert found["inside"].startswith("rank 0 logs batches, traffic and memory")


def test_a_table_is_not_wider_than_a_terminal() -> None:
    """Long rows are broken into several lines."""
    explained = train.options(amp="bf16").explain()
    assert max(len(line) for line in explained.splitlines()) <= 100
    assert "\n  precision    O1 in bf16 (native)\n                 weights in forward: fp32\n" in explained


def test_each_process_has_its_gpus_on_a_line() -> None:
    """Each local rank has a line with its GPUs: one under ddp, several under ddp2."""
    hardware = Hardware("cuda", 4)
    by_device = explain(compute_layout(Config.parse(gpus=[1, 3]), hardware), name="train")
    assert "  devices      local rank 0: cuda:1\n                 local rank 1: cuda:3\n" in by_device
    by_node = explain(compute_layout(Config.parse(gpus=2, backend="ddp2"), hardware), name="train")
    assert "  devices      local rank 0: cuda:0, cuda:1\n" in by_node
    assert "inside" not in by_node


def test_another_machine() -> None:
    """A call for GPUs that this machine lacks is explained for a machine that has them; else it raises as the call."""
    explained = train.options(gpus=8, num_nodes=2).explain(gpus=8)
    assert rows(explained)["processes"] == "2 node(s) x 8 = 16"
    many = train.options(gpus=99)
    for refused in (many, many.explain, lambda: many.explain(gpus=4)):
        with pytest.raises(ConfigError, match="gpus=99"):
            refused()


def test_one_process_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with one process runs in the calling process, and under torchrun the rank is shown."""
    assert rows(train.options(processes=1).explain())["starts"] == "nothing: runs in the calling process"
    for name, value in World(1, 1, 0, 2, 2, "127.0.0.1", 29500).env().items():
        monkeypatch.setenv(name, value)
    assert rows(train.explain())["starts"] == "nothing: a launcher has started this process as rank 1 of 2"


def test_variables_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """PARALLELIZE_ variables are applied, as in a call."""
    monkeypatch.setenv("PARALLELIZE_PROCESSES", "3")
    assert rows(train.explain())["processes"] == "1 node(s) x 3 = 3"


@given(
    options=option_sets(),
    backend=st.sampled_from(registry.names("backends")),
    engine=st.sampled_from(registry.names("precision")),
    machine=hardware,
    world=st.none() | worlds(),
    queue=st.sampled_from([None, "slurm"]),
)
def test_every_layout_is_explained(
    options: dict[str, Any], backend: str, engine: str, machine: Hardware, world: World | None, queue: str | None
) -> None:
    """Whatever can be laid out, on any machine and by any launcher, is a table with every row."""
    try:
        config = Config.parse(**options, backend=backend, amp_engine=engine)
        layout = compute_layout(config, machine, world)
    except ConfigError:
        return
    described = rows(explain(layout, name="train", queue=queue))
    expected = {"backend", "processes", "devices", "starts", "collectives", "precision", "seed", "timeout"}
    assert expected | {"restarts", "logs"} <= described.keys()
