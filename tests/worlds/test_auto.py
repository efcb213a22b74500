"""backend="auto" chooses the fastest engine that fits, and then trains exactly as the engine's name does."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import outputs_of_ranks
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from parallelize import AutoBackend, ConfigError, FSDPBackend, distributed, parallel_model, rank, world_size
from parallelize.backends.auto.choice import SIZES, choose

WIDTH = 256
KEEPS_GATHERED = FSDPBackend(reshard_after_forward=False)
# Of a Net with AdamW, ddp needs 5.4 MB, fsdp 3.7 MB, and 3.2 MB if it reshards after forward.
LIMITS = {"ddp": None, "fsdp": 3_800_000, "fsdp reshard_after_forward=False": 5_000_000}
NAMED: dict[str, Any] = {"ddp": "ddp", "fsdp": "fsdp", "fsdp reshard_after_forward=False": KEEPS_GATHERED}


class Net(nn.Module):
    """Blocks with statistics, masks and a counter."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1))
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, 10)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"

    @property
    def choices(self) -> list[str]:
        """The engines that were chosen, as the tables say."""
        rows = [line for line in self.text.splitlines() if line.endswith("(chosen)")]
        return [row.strip().partition(":")[0] for row in rows]


@contextlib.contextmanager
def logged() -> Iterator[Log]:
    log, logger = Log(), logging.getLogger("parallelize")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    try:
        yield log
    finally:
        logger.removeHandler(log)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, WIDTH)).square().mean().backward()
    optimizer.step()


def train(
    backend: Any, *, is_made_inside: bool = False, steps: int = 3, kind: Any = torch.optim.AdamW
) -> tuple[dict[str, Any], str]:
    """Return the trained state with the numbers drawn next, and what was logged."""
    torch.manual_seed(7 + rank())
    model = Net()
    made = None if is_made_inside else kind(model.parameters())
    with logged() as log, parallel_model(model, backend=backend, buffers="rank0"):
        optimizer = made or kind(model.parameters())
        if rank() == 0 or getattr(backend, "plan", "named") is not None:  # rank 0 alone before the choice
            with torch.no_grad():
                model.eval()(torch.ones(2, WIDTH))
        model.train()
        for _ in range(steps):
            step(model, optimizer)
        drawn = torch.rand(3)
    return {**model.state_dict(), "drawn": drawn}, log.text


def chosen(text: str) -> list[str]:
    log = Log()
    log.text = text
    return log.choices


def test_training_is_that_of_the_chosen_engine() -> None:
    """Weights, statistics, attributes and random numbers are bitwise those of the engine that is named."""

    def run() -> dict[tuple[str, bool], tuple[list[str], bool]]:
        found = {}
        for engine, is_made_inside in itertools.product(LIMITS, (False, True)):  # where the optimizer is made
            limit = (LIMITS[engine] or 10**9) + is_made_inside  # another one: it is measured again
            state, text = train(AutoBackend(memory=limit), is_made_inside=is_made_inside)
            named, _ = train(NAMED[engine], is_made_inside=is_made_inside)
            is_equal = all(torch.equal(state[key], value) for key, value in named.items())
            found[engine, is_made_inside] = chosen(text), is_equal
        return found

    first, second = distributed(processes=2)(run).all_ranks()
    assert first == {key: ([key[0]], True) for key in first}
    assert second == {key: ([], True) for key in first}


def test_one_process_trains_as_without_the_library() -> None:
    """The measurement leaves gradients, statistics, attributes and generators of one process as they were."""

    def trained(block: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        random.seed(3)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(4, WIDTH)).mean().backward()  # gradients to which the first batch adds
        with block(model):
            model(torch.randn(16, WIDTH)).square().mean().backward()
            optimizer.step()
        return {**model.state_dict(), "drawn": torch.rand(3), "other": torch.tensor([random.random(), model.calls])}

    expected, state = trained(contextlib.nullcontext), trained(lambda model: parallel_model(model, backend="auto"))
    assert all(torch.equal(state[key], value) for key, value in expected.items())


def test_the_table_the_start_line_and_the_report_are_logged_once_on_rank_0() -> None:
    """After ten steps, the measured duration is beside the prediction."""

    def run() -> str:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        with logged() as log:
            for _ in range(2):  # the second block knows the choice
                with parallel_model(model, backend="auto", buffers="rank0"):
                    for _ in range(12):
                        step(model, optimizer)
        return log.text

    text, other = distributed(processes=2)(run).all_ranks()
    assert other == ""
    table, line, report = text.strip().split("\n", 5)[:5], *text.strip().splitlines()[5:]
    assert table[0].startswith("Net: engines of backend='auto', with ")
    assert [row.split(":")[0].strip() for row in table[1:4]] == [*NAMED]
    assert "process_per='node' compares dp and balanced" in table[4]
    assert "2 processes" in line
    assert "backend='auto' has chosen ddp: 0.005 GiB" in line
    assert report.startswith("ddp: 0.005 GiB, ")
    assert " ms a step predicted; measured: " in report


def test_the_report_leaves_the_users_hook_alone() -> None:
    """A hook that the user registers after the choice runs after each step, also after the one that is reported."""

    def run() -> int:
        model, calls = Net(), []
        optimizer = torch.optim.AdamW(model.parameters())
        with parallel_model(model, backend="auto", buffers="rank0"):
            step(model, optimizer)  # the first batch, on which the engine is chosen
            hook = register_optimizer_step_post_hook(lambda *_: calls.append("a step"))
            for _ in range(12):
                step(model, optimizer)
        hook.remove()
        return len(calls)

    assert distributed(processes=2)(run).all_ranks() == [12, 12]


def test_a_model_that_fits_nowhere_is_told_what_is_missing() -> None:
    """The error names the nearest engine, the excess, the parts, and what would help."""
    with pytest.raises(ConfigError) as caught:
        distributed(processes=2)(train)(AutoBackend(memory=3_000_000))
    (fault,) = caught.value.faults
    assert fault.what.startswith("Net fits no engine of backend='auto'; the nearest is fsdp: 0.00")
    assert "GiB more than 90 % of a device's memory" in fault.why
    assert all(part in fault.why for part in ("parameters", "gradients", "optimizer state", "saved for backward"))
    assert all(word in fault.fix for word in ("smaller batch", "checkpoint", "more devices", "balanced"))


def test_a_plan_is_used_again_for_the_same_model_and_limit(tmp_path: Path) -> None:
    """Another limit is measured, and kept beside it; explain() shows the tables."""
    path = tmp_path / "plan.json"
    backend = AutoBackend(plan=str(path))
    run = distributed(processes=2)(train)
    assert "chosen at the first forward" in distributed(backend=backend, processes=2)(train).explain()
    assert chosen(run(backend)[1]) == ["ddp"]
    assert "Net: engines of backend='auto'" in distributed(backend=backend, processes=2)(train).explain()
    kept = json.loads(path.read_text())
    ((key, choice),) = kept.items()
    path.write_text(json.dumps({key: ["fsdp", {}, *choice[2:]]}))
    state, text = run(backend)
    assert chosen(text) == []
    assert "backend='auto' has chosen fsdp: " in text
    expected, _ = run("fsdp")
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert chosen(run(AutoBackend(plan=str(path), memory=10**9))[1]) == ["ddp"]
    assert len(json.loads(path.read_text())) == 2
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds no choices"):
        run(backend)


def test_the_rank_with_the_least_memory_decides() -> None:
    """All ranks choose what fits on each of them."""

    def run() -> str:
        return train(AutoBackend(memory=10**9 if rank() == 0 else LIMITS["fsdp"]))[1]

    assert chosen(distributed(processes=2)(run)()) == ["fsdp"]


class Unknown(torch.optim.SGD):
    """An optimizer whose state is not known."""


@pytest.mark.parametrize(
    ("kind", "engine"), [(torch.optim.SGD, "ddp"), (Unknown, "fsdp reshard_after_forward=False")], ids=["SGD", "other"]
)
def test_the_state_of_optimizers_counts(kind: Any, engine: str) -> None:
    """SGD keeps nothing; an optimizer that is not torch's is taken to keep two tensors a parameter."""

    def run() -> str:
        return train(AutoBackend(memory=4_900_000), kind=lambda parameters: kind(parameters, 0.1))[1]

    assert chosen(distributed(processes=2)(run)()) == [engine]


def test_parameters_that_do_not_fit_with_gradients_are_sharded_at_once() -> None:
    """Nothing is measured: forward runs once."""

    def run() -> tuple[str, int]:
        model = Net(depth=24)
        size = sum(each.nbytes for each in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with logged() as log, parallel_model(model, backend=AutoBackend(memory=int(1.8 * size)), restore=False):
            step(model, optimizer)
        return log.text, model.calls

    text, calls = distributed(processes=2)(run)()
    assert (chosen(text), calls) == (["fsdp"], 1)
    assert "fsdp: 0.007 GiB, not timed  (chosen)" in text


def test_limits_of_the_process_count() -> None:
    """Under ulimit -d, free memory is what the limit leaves."""

    def run() -> list[str]:
        used = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
        limit = int(used.split()[1]) * 1024 + 2**30
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return [line for line in train("auto")[1].splitlines() if "to use" in line]

    (line,) = distributed(processes=2)(run)()
    assert 0.5 < float(line.split("with ")[1].split()[0]) <= 0.9


def test_submodules_train_before_the_first_forward() -> None:
    """Gradients of a call of a submodule are averaged, and the model goes on with the chosen engine."""

    def run(backend: Any) -> dict[str, Any]:
        torch.manual_seed(5)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        with parallel_model(model, backend=backend, buffers="rank0"):
            x = torch.full((4, WIDTH), rank() + 1.0) / world_size()
            model.head(x).square().mean().backward()
            optimizer.step()
            for _ in range(2):
                step(model, optimizer)
        return dict(model.state_dict())

    state = distributed(processes=2)(run)(AutoBackend(memory=LIMITS["fsdp"]))
    for key, value in distributed(processes=2)(run)("ddp").items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


KINDS = ("all_reduce", "all_gather")
FACTS = {
    "memory": 1e10,
    "parameters": 4e9,
    "gradients": 4e9,
    "optimizer state": 8e9,
    "saved for backward": 1e8,
    "in backward": 4e9,
    "units": 10,
    "largest unit": 4e8,
    "outside of units": 1e8,
    "restored at the end": 0,
    "largest stage": 1e10,
    "is on accelerator": 1,
    "s of forward and backward": 1e-3,
    "s of updating a byte": 1e-12,
    **{f"s of {kind} of {size} bytes": size * 1e-9 for kind in ("all_reduce", "all_gather") for size in SIZES},
    **{
        f"s of {kind} in a node of {size} bytes": size * 1e-11
        for kind in ("all_reduce", "all_gather")
        for size in SIZES
    },
}


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({}, {"shard_over": "node", "reshard_after_forward": False}),
        ({"memory": 5e9}, {"shard_over": "node"}),
        ({"memory": 3e9}, {}),
    ],
    ids=["the links between nodes are slow", "no room for all gathered", "no room for the shards of a node"],
)
def test_over_nodes_a_copy_in_each_node_sends_less(changes: dict[str, float], engine: dict[str, Any]) -> None:
    """As long as it fits; the other engines are in the table."""
    found = choose({**FACTS, **changes}, "Net", 8 * 4, 8, 1)
    assert (found.engine, found.options) == ("fsdp", engine)
    assert found.table.count("fsdp") == 4


@pytest.mark.slow
def test_nodes_of_two_processes_measure_their_own_links(tmp_path: Path) -> None:
    """All ranks of two nodes choose alike, and train on."""
    script = tmp_path / "script.py"
    script.write_text(
        "from worlds.test_auto import LIMITS, train\n"
        "from parallelize import AutoBackend, distributed\n"
        "backend = AutoBackend(memory=LIMITS['fsdp reshard_after_forward=False'])\n"
        "print(distributed(processes=2, num_nodes=2)(train)(backend)[1])\n"
    )
    outputs = outputs_of_ranks(script, world_size=4, per_node=2)
    assert outputs[0].count("  fsdp") == 4
    assert "(chosen)" in outputs[0]
