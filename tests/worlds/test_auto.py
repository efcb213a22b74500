"""backend="auto" chooses the first engine that fits, and then trains exactly as the engine's name does."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import outputs_of_ranks
from torch import nn

from parallelize import AutoBackend, ConfigError, FSDPBackend, distributed, parallel_model, rank, world_size
from parallelize.backends.auto.choice import choose, needed_bytes
from parallelize.backends.auto.model_bytes import ModelBytes

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
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    log, logger = Log(), logging.getLogger("parallelize")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    try:
        yield log.lines
    finally:
        logger.removeHandler(log)


def chosen(lines: list[str]) -> list[str]:
    """Return the engines that were chosen, as the lines say."""
    return [line.split("has chosen ")[1].split(",")[0] for line in lines if ": backend='auto' has chosen " in line]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor | None = None) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, WIDTH) if x is None else x).square().mean().backward()
    optimizer.step()


def train(
    backend: Any,
    *,
    is_made_inside: bool = False,
    kind: Any = torch.optim.AdamW,
    depth: int = 4,
    evaluates: bool = True,
) -> tuple[dict[str, Any], list[str]]:
    """Return the trained state with the numbers drawn next, and what was logged."""
    torch.manual_seed(7 + rank())
    model = Net(depth)
    made = None if is_made_inside else kind(model.parameters())
    with logged() as lines, parallel_model(model, backend=backend, buffers="rank0", restore=evaluates):
        optimizer = made or kind(model.parameters())
        if evaluates and (rank() == 0 or not isinstance(backend, AutoBackend)):  # rank 0 alone before the choice
            with torch.no_grad():
                model.eval()(torch.ones(2, WIDTH))
        model.train()
        for _ in range(3):
            step(model, optimizer)
        drawn = torch.rand(3)
    return {**model.state_dict(), "drawn": drawn}, lines


def test_training_is_that_of_the_chosen_engine() -> None:
    """Weights, statistics, attributes and random numbers are bitwise those of the engine that is named."""

    def run() -> dict[tuple[str, bool], tuple[list[str], bool]]:
        found = {}
        for engine, is_made_inside in itertools.product(LIMITS, (False, True)):  # where the optimizer is made
            state, lines = train(AutoBackend(memory=LIMITS[engine]), is_made_inside=is_made_inside)
            named, _ = train(NAMED[engine], is_made_inside=is_made_inside)
            is_equal = all(torch.equal(state[key], value) for key, value in named.items())
            found[engine, is_made_inside] = chosen(lines), is_equal
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


class Caching(nn.Module):
    """Writes to its arguments: it fills a cache, and draws from a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any, cache: Any, generator: torch.Generator) -> torch.Tensor:
        cache.outputs.append(self.layer(x.data))
        return torch.stack(cache.outputs).sum(0) * torch.rand(4, generator=generator)


def test_the_arguments_of_the_first_forward_stay_as_they_were() -> None:
    """A cache is filled once, and a generator draws once; a packed sequence of a graph has no copy."""

    def trained(block: Any) -> list[Any]:
        torch.manual_seed(3)
        model, inputs = Caching(), torch.ones(2, 4, requires_grad=True)
        cache, generator = SimpleNamespace(outputs=[]), torch.Generator().manual_seed(1)
        with block(model):
            packed = nn.utils.rnn.pack_sequence([2 * inputs])
            model(packed, cache, generator).square().mean().backward()
        gradients = [inputs.grad, *[parameter.grad for parameter in model.parameters()]]
        return [*gradients, torch.rand(2, generator=generator), *cache.outputs]

    expected, found = trained(contextlib.nullcontext), trained(lambda model: parallel_model(model, backend="auto"))
    assert len(expected) == 5
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Keeping(nn.Module):
    """Keeps its outputs in an object, which is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), SimpleNamespace(outputs=[])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.outputs.append(self.layer(x))
        return torch.stack(self.kept.outputs).sum(0)


def test_outputs_of_the_measured_forward_that_stay_are_told() -> None:
    """Backward through them says why their graph is dropped, and where to keep outputs."""
    with parallel_model(Keeping(), backend="auto") as model:
        output = model(torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="keep them in attributes of modules"):
            output.mean().backward()


def test_one_line_says_what_was_chosen_and_why() -> None:
    """Rank 0 logs it with the bytes of all candidates; explain() shows the rule before the run."""
    run = distributed(backend=AutoBackend(memory=5_000_000), processes=2)(train)
    explained = run.explain()
    assert "ddp: holds parameters + gradients + optimizer state + saved; sends 2 x gradients" in explained
    assert explained.index("ddp: ") < explained.index("fsdp reshard_after_forward=False: ") < explained.index("fsdp: ")
    (_, lines), (_, others) = run.all_ranks(AutoBackend(memory=5_000_000))
    assert others == []
    choice, start = lines
    assert choice == (
        "Net: backend='auto' has chosen fsdp reshard_after_forward=False, the first of these that fits into 4.3 MiB "
        "of a device: ddp 5.1 MiB, fsdp reshard_after_forward=False 3.4 MiB, fsdp 3.1 MiB"
    )
    assert "backend='auto' has chosen fsdp reshard_after_forward=False" in start


def test_a_model_that_fits_nowhere_is_told_what_is_missing() -> None:
    """The error names the nearest engine, its bytes, the parts, and what would help."""
    with pytest.raises(ConfigError) as caught:
        distributed(processes=2)(train)(AutoBackend(memory=3_000_000))
    (fault,) = caught.value.faults
    assert fault.what == "Net fits no engine of backend='auto'; the nearest is fsdp, which needs 3.1 MiB on a device"
    assert fault.why.startswith("nine tenths of a device's memory are 2.6 MiB; of the whole model, parameters take 1.0")
    assert all(part in fault.why for part in ("gradients 1.0", "optimizer state 2.0", "saved for backward "))
    assert all(word in fault.fix for word in ("smaller batch", "checkpoint", "more devices", "balanced"))


def test_the_rank_with_the_least_memory_decides() -> None:
    """All ranks choose what fits on each of them."""

    def run() -> list[str]:
        return train(AutoBackend(memory=10**9 if rank() == 0 else LIMITS["fsdp"]))[1]

    assert chosen(distributed(processes=2)(run)()) == ["fsdp"]


class Unknown(torch.optim.SGD):
    """An optimizer whose state is not known."""


@pytest.mark.parametrize(
    ("kind", "engine"), [(torch.optim.SGD, "ddp"), (Unknown, "fsdp reshard_after_forward=False")], ids=["SGD", "other"]
)
def test_the_state_of_optimizers_counts(kind: Any, engine: str) -> None:
    """SGD keeps nothing; an optimizer that is not torch's is taken to keep two tensors a parameter."""

    def run() -> list[str]:
        return train(AutoBackend(memory=4_900_000), kind=lambda parameters: kind(parameters, 0.1))[1]

    assert chosen(distributed(processes=2)(run)()) == [engine]


class Adapted(Net):
    """Only its head is trained, and `parameters` lists that alone, with an argument of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)

    def parameters(self, part: str = "head") -> list[nn.Parameter]:
        return list(getattr(self, part).parameters())


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    """All parameters count, also those that an override of `parameters` leaves out; the rest is of the trained ones."""

    def run() -> list[str]:
        model = Adapted()
        optimizer = torch.optim.AdamW([*model.parameters("blocks"), *model.parameters()])
        with logged() as lines, parallel_model(model, backend=AutoBackend(memory=2_500_000), buffers="rank0"):
            step(model, optimizer)
        return lines

    assert chosen(distributed(processes=2)(run)()) == ["ddp"]


def test_parameters_that_do_not_fit_with_gradients_are_sharded_at_once() -> None:
    """Nothing is measured: forward runs once."""

    def run() -> tuple[list[str], int]:
        model = Net(depth=24)
        size = sum(each.nbytes for each in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with logged() as lines, parallel_model(model, backend=AutoBackend(memory=int(1.5 * size)), restore=False):
            step(model, optimizer)
        return lines, model.calls

    lines, calls = distributed(processes=2)(run)()
    assert (chosen(lines), calls) == (["fsdp"], 1)
    assert "no device holds the whole model with its gradients, so that none has run" in lines[0]


def test_limits_of_the_process_count() -> None:
    """Under ulimit -d, free memory is what the limit leaves."""

    def run() -> list[str]:
        used = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
        limit = int(used.split()[1]) * 1024 + 2**30
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return train("auto")[1]

    line, _ = distributed(processes=2)(run)()
    assert 500 < float(line.split("fits into ")[1].split(" MiB")[0]) <= 922


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


class Special(nn.Module):
    """A model whose first forward is not like those of others, as `kind` says; a buffer gets its shape in it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind, self.runs = nn.Linear(WIDTH, WIDTH), kind, itertools.count()
        self.register_buffer("least", torch.tensor([]))

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "forces":
            positions = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(positions), positions, create_graph=True)[0]
        if self.kind == "torch.func":
            return torch.func.grad(self.energy)(x)
        if self.kind == "out of memory" and next(self.runs) == 0:
            self.energy(torch.empty(2**50))
        if self.kind == "a buffer gets its shape" and not self.least.numel():
            self.least.resize_(WIDTH).copy_(x.detach().amin(0))
        return self.body(x).tanh()


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("forces", "ddp"),
        ("torch.func", "ddp"),
        ("a buffer gets its shape", "ddp"),
        ("out of memory", "fsdp reshard_after_forward=False"),
    ],
)
def test_a_forward_that_cannot_be_measured_like_others(kind: str, engine: str) -> None:
    """It may differentiate, or run out of memory: then it does not fit ddp, which is no error."""

    def run(backend: Any) -> tuple[list[str], torch.Tensor]:
        torch.manual_seed(2)
        model = Special(kind if backend == "auto" else kind.replace("out of memory", ""))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with logged() as lines, parallel_model(model, backend=backend, buffers="rank0"):
            step(model, optimizer, torch.full((8, WIDTH), rank() + 0.5))
        return lines, model.body.weight.detach()

    lines, weight = distributed(processes=2)(run)("auto")
    assert chosen(lines) == [engine]
    assert ("it has run out of memory" in lines[0]) == (kind == "out of memory")
    torch.testing.assert_close(weight, distributed(processes=2)(run)("ddp")[1])


class Tanh(nn.Module):
    """A part of a model that torch.compile does not skip, as it skips torch's own modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


# torch itself reads `.grad` of an output when it compiles what follows the model.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compiles", ["the model", "a part", "a function that calls it"])
def test_compiled_programs_train(compiles: str) -> None:
    """A step that is compiled may be the first; from the choice on, forward is compiled as under ddp."""

    def run(backend: str) -> tuple[int, torch.Tensor]:
        torch.manual_seed(0)
        graphs = list[int]()

        def compiler(graph: Any, inputs: Any) -> Any:
            graphs.append(len(inputs))
            return graph.forward

        model = nn.Sequential(nn.Linear(6, 8), Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        called = torch.compile(model, backend=compiler) if compiles == "the model" else model

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return called(x).square().mean()

        if compiles == "a part":
            model[1].compile(backend=compiler)
        if compiles == "a function that calls it":
            loss_of = torch.compile(loss_of, backend=compiler)
        with parallel_model(model, backend=backend):
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(torch.full((8, 6), rank() + 1.0)).backward()
                optimizer.step()
        return len(graphs), model[0].weight.detach()

    auto, ddp = (distributed(processes=2)(run)(backend) for backend in ("auto", "ddp"))
    assert auto[0] == ddp[0] > 0
    torch.testing.assert_close(auto[1], ddp[1])


BYTES = {"memory": 1e10, "parameters": 4e9, "gradients": 4e9, "optimizer_state": 8e9, "saved": 1e8, "backward": 8.1e9}


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (1e11, "ddp"),
        (1e10, "fsdp reshard_after_forward=False"),
        (5e9, "fsdp shard_over='node'"),
        (3e9, "fsdp"),
    ],
)
def test_over_nodes_the_order_is_that_of_what_is_sent(memory: float, expected: str) -> None:
    """A copy in each node comes before one over all nodes, as long as it fits; without equal nodes there is none."""
    model = ModelBytes(**{**BYTES, "memory": memory}, largest_unit=4e8, outside_units=1e8)
    needed = needed_bytes(model, ranks=32, ranks_of_node=8)
    assert str(choose("Net", model, needed)) == expected
    assert len(needed) == 4
    assert len(needed_bytes(model, ranks=32, ranks_of_node=1)) == 3


@pytest.mark.slow
def test_two_nodes_of_two_processes_choose_alike(tmp_path: Path) -> None:
    """Each node holds a copy where that fits, and the gathered model does not."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from worlds.test_auto import chosen, train\n"
        "from parallelize import AutoBackend, distributed\n"
        "run = distributed(processes=2, num_nodes=2)(train)\n"
        "_, lines = run(AutoBackend(memory=6_100_000), kind=torch.optim.SGD, depth=16, evaluates=False)\n"
        "print(lines[0])\n"
    )
    outputs = outputs_of_ranks(script, world_size=4, per_node=2)
    assert "has chosen fsdp shard_over='node'," in outputs[0]
