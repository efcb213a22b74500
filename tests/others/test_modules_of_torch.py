"""Every module of torch's own database computes and trains under each back end what it does in one process.

The database, `torch.testing._internal.common_modules`, has arguments and inputs of each module, with and without a
batch dimension, as torch tests them. A case makes one forward, one backward and one step of SGD. Compared are this
rank's outputs, the gradients of its inputs, its buffers, and the parameters after the step, which hold the averaged
gradients:

    ddp         bitwise
    logical=    bitwise, of the cases whose first dimension two parts divide; plain torch runs these parts
    fsdp        1e-12 in float64
    balanced    1e-9 in float64: gradients of micro-batches are added in another order
    dp          1e-9 in float64, on two devices of CUDA, also pretended ones

Each rank has inputs of its own. Plain torch runs the inputs of all ranks one after the other, on copies of the model.
Lazy modules are called once before the block, as the error says that refuses them.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from others.torch_databases import Refusal, imported, largest_difference, outcome_of, unexplained
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from parallelize import BalancedBackend, distributed, parallel_model, rank, shard_loader, world_size

pytestmark = pytest.mark.slow

PARTS = 2


@dataclass(frozen=True)
class World:
    """How a run is started, and what it may differ by from plain torch.

    Attributes:
        options: of the call.
        block: options of the block.
        tolerance: the largest difference that is no difference.
        parts: into which `logical=` divides the batch of a rank.
        modules: the least number of modules of which there are cases.
    """

    options: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    parts: int = 1
    modules: int = 110


BALANCED = World(block={"backend": BalancedBackend(devices=["cpu", "cpu"], microbatches=PARTS)}, tolerance=1e-9)
"""One process of a plain script, with two stages and two micro-batches."""

DP = World(block={"backend": "dp", "gpus": [0, 1]}, tolerance=1e-9)
"""One process of a plain script, with two devices."""

WORLDS = {
    "ddp": World(),
    "fsdp": World({"backend": "fsdp"}, tolerance=1e-12),
    "logical": World({"logical": 2 * PARTS}, parts=PARTS, modules=40),
}

REFUSALS: dict[str, dict[str, Refusal]] = {
    "ddp": {},
    "fsdp": {},
    "logical": {
        "nn.LSTM": Refusal("an output of forward under logical=", "the batch is not the first dimension of its state"),
        "nn.GLU, train 2 no_batch_dim": Refusal("an output of forward under logical=", "its input is no batch"),
    },
    "balanced": {
        f"nn.BatchNorm1d, train {index} ": Refusal("differs by", "batch norm normalizes each micro-batch")
        for index in (0, 1, 2, 3, 5, 7)
    },
    "dp": {
        **{
            f"nn.{name}, {mode} 0": Refusal("", "DataParallel divides the first dimension, which is no batch here")
            for name, mode in itertools.product(
                (
                    *("CTCLoss", "GRU", "GRUCell", "LSTM", "LSTMCell", "MultiLabelMarginLoss", "MultiheadAttention"),
                    *("RNN", "RNNCell", "Transformer", "TransformerDecoderLayer", "TransformerEncoder"),
                    "TransformerEncoderLayer",
                ),
                ("train", "eval"),
            )
        },
        **{
            f"nn.BatchNorm{dimensions}d, train 0": Refusal("differs by", "each replica normalizes its part of a batch")
            for dimensions in (1, 2, 3)
        },
    },
}


class Trained(nn.Module):
    """A module whose outputs are multiplied by a parameter: a model without parameters would not be trained."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(self._scaled, self.module(*args, **kwargs))

    def _scaled(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value * self.gain
        return value


def _own(value: Any) -> Any:
    """Return a copy of a tensor, which keeps its own gradient; any other value as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


@dataclass(frozen=True)
class Case:
    """A module of the database, in one mode, with one of its arguments and inputs."""

    name: str
    entry: Any
    index: int
    is_training: bool

    def make(self) -> nn.Module:
        """Return the model; each call gives the same values."""
        arguments = self._arguments(seed=0).constructor_input
        torch.manual_seed(0)
        module = self.entry.module_cls(*arguments.args, **arguments.kwargs)
        model = Trained(module).double().train(self.is_training)
        if self.entry.is_lazy:
            # A block refuses parameters without values, and says to call the model first.
            args, kwargs = self.inputs(seed=0)
            with torch.no_grad():
                model(*args, **kwargs)
        return model

    def inputs(self, seed: int) -> tuple[Any, Any]:
        """Return (args, kwargs) of a forward."""
        forward = self._arguments(seed).forward_input
        args, kwargs = tree_map(_own, (forward.args, forward.kwargs))
        return args, kwargs

    def _arguments(self, seed: int) -> Any:
        return entries_of(self.entry, seed, is_training=self.is_training)[self.index]


@functools.cache
def entries_of(entry: Any, seed: int, *, is_training: bool) -> Any:
    """Return all arguments and inputs of a module for a seed."""
    torch.manual_seed(seed)
    return entry.module_inputs_func(entry, device="cpu", dtype=torch.float64, requires_grad=True, training=is_training)


def cases() -> Iterator[Case]:
    """Yield the cases of the database; in evaluation only of modules that are another function there."""
    for entry in imported("torch.testing._internal.common_modules").module_db:
        modes = [True]
        if entry.train_and_eval_differ:
            modes.append(False)
        for is_training in modes:
            for index, inputs in enumerate(entries_of(entry, 0, is_training=is_training)):
                mode = "train" if is_training else "eval"
                name = f"{entry.name}, {mode} {index} {inputs.desc}".strip()
                yield Case(name, entry, index, is_training)


@dataclass(frozen=True)
class Results:
    """What one rank has computed."""

    outputs: list[Tensor]
    gradients_of_inputs: list[Any]
    buffers: list[Tensor]


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def computed(forward: Callable[..., Any], model: nn.Module, case: Case, seed: int) -> Results:
    """Make a forward and a backward pass of the inputs of a seed; `model` has the buffers."""
    args, kwargs = case.inputs(seed)
    torch.manual_seed(seed)
    outputs = tensors_in(forward(*args, **kwargs))
    losses = []
    for output in outputs:
        if output.requires_grad:
            weights = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64, device=output.device)
            losses.append((output * weights.reshape(output.shape)).sum())
    torch.stack(losses).sum().backward()
    return Results(
        [output.detach().cpu() for output in outputs],
        [tensor.grad for tensor in tensors_in((args, kwargs))],
        [buffer.cpu().clone() for buffer in model.buffers()],
    )


def samples_in(inputs: Any) -> int:
    """Return the size of the first dimension of the first tensor that has one."""
    sizes = [len(tensor) for tensor in tensors_in(inputs) if tensor.ndim]
    return sizes[0] if sizes else 0


def in_parts(models: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Run equal parts of a batch through models, and join the outputs as `logical=` documents it."""
    samples = samples_in((args, kwargs))
    size = samples // len(models)
    columns = []
    for number, model in enumerate(models):

        def narrowed(value: Any, start: int = number * size) -> Any:
            if isinstance(value, Tensor) and value.ndim and len(value) == samples:
                return value.narrow(0, start, size).clone()
            return value

        columns.append(tensors_in(model(*tree_map(narrowed, args), **tree_map(narrowed, kwargs))))
    return [torch.cat(row) if row[0].ndim else torch.stack(row).mean() for row in zip(*columns, strict=True)]


def added(first: list[Any], second: list[Any]) -> list[Any]:
    """Return the sums of gradients; None is no gradient."""
    sums = []
    for pair in zip(first, second, strict=True):
        gradients = [gradient for gradient in pair if gradient is not None]
        sums.append(sum(gradients) if gradients else None)
    return sums


def by_hand(model: nn.Module, case: Case, ranks: int, parts: int) -> list[Results]:
    """Let plain torch compute what each rank does, and take the step of the mean gradients of the ranks."""
    start = copy.deepcopy(model)
    results = []
    total: Any = None
    for seed in range(ranks):
        models = [copy.deepcopy(start) for _ in range(parts)]
        forward = models[0] if parts == 1 else functools.partial(in_parts, models)
        results.append(computed(forward, models[0], case, seed))
        of_parts = [[parameter.grad for parameter in part.parameters()] for part in models]
        of_rank = functools.reduce(added, of_parts)
        total = of_rank if total is None else added(total, of_rank)
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            if gradient is not None:
                parameter.sub_(gradient / ranks)
    return results


def largest_of(found: Any, expected: Any) -> float:
    """Return the largest difference of two lists of tensors."""
    largest = 0.0
    for pair in zip(found, expected, strict=True):
        if pair[0] is None or pair[1] is None:
            largest = max(largest, 0.0 if pair[0] is pair[1] else float("inf"))
        else:
            largest = max(largest, largest_difference(*pair))
    return largest


def difference(case: Case, world: World) -> float:
    """Compute a case both ways; return the largest difference that is above the tolerance, else 0."""
    expected_model = case.make()
    expected_of_ranks = by_hand(expected_model, case, world_size(), world.parts)
    expected = expected_of_ranks[rank()]
    if world.parts > 1:
        # Under `logical=`, all ranks go on with the buffers of the first of all parts, as one process does.
        expected = replace(expected, buffers=expected_of_ranks[0].buffers)
    model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with parallel_model(model, **world.block):
        results = computed(model, model, case, rank())
        optimizer.step()
    pairs = (
        (results.outputs, expected.outputs),
        (results.gradients_of_inputs, expected.gradients_of_inputs),
        (results.buffers, expected.buffers),
        ([parameter.cpu() for parameter in model.parameters()], list(expected_model.parameters())),
    )
    largest = max(largest_of(*pair) for pair in pairs)
    return largest if largest > world.tolerance else 0.0


def runs_in_one_process(case: Case, parts: int) -> bool:
    """Return whether plain torch makes a backward pass of the case on this machine, in as many equal parts."""
    samples = samples_in(case.inputs(seed=0))
    if parts > 1 and (samples == 0 or samples % parts):
        return False
    try:
        by_hand(case.make(), case, 1, parts)
    except Exception:  # noqa: BLE001 - it is no case, whatever torch lacks
        return False
    return True


def outcomes_of_modules(world: World, most: int) -> dict[str, str]:
    """Return what the first cases of each module in each mode end with.

    Args:
        world: how this run was started.
        most: the number of cases of a module in a mode.
    """
    warnings.filterwarnings("ignore")
    outcomes = {}
    for case in cases():
        if case.index >= most or not runs_in_one_process(case, world.parts):
            continue
        if world.parts > 1:
            # A forward is divided as the batches of a loader with as many samples are.
            samples = samples_in(case.inputs(seed=0))
            for _ in shard_loader(DataLoader(range(samples * world_size()), batch_size=samples)):
                pass
        outcomes[case.name] = outcome_of(functools.partial(difference, case, world))
    return outcomes


SAMPLE, WHOLE = 1, 30
"""Cases of each module in each mode: of some losses, the database has hundreds."""


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("most", [SAMPLE, pytest.param(WHOLE, marks=pytest.mark.soak)], ids=["sample", "whole"])
def test_modules_of_torch(name: str, most: int) -> None:
    """All modules but those in the table compute and train what plain torch does."""
    world = WORLDS[name]
    run = distributed(processes=2, **world.options)(outcomes_of_modules)
    for outcomes in run.all_ranks(world, most):
        assert unexplained(outcomes, REFUSALS[name], is_sample=most == SAMPLE) == {}
        assert len({case.partition(",")[0] for case in outcomes}) >= world.modules


@pytest.mark.gpu2
@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices")
def test_modules_of_torch_on_two_devices(run_script: Callable[..., Any]) -> None:
    """All modules but those in the table compute and train, over two devices of one process, what plain torch does."""
    output = run_script(SCRIPT.format(world="DP", most=SAMPLE), env=environment()).stdout
    outcomes = json.loads(output.splitlines()[-1])
    assert unexplained(outcomes, REFUSALS["dp"], is_sample=True) == {}
    assert len({case.partition(",")[0] for case in outcomes}) >= DP.modules


def environment() -> dict[str, str]:
    """Return the variables of a script that imports tests."""
    return {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}


SCRIPT = """
import json
from others import test_modules_of_torch as tests
print(json.dumps(tests.outcomes_of_modules(tests.{world}, {most})))
"""


@pytest.mark.parametrize("most", [SAMPLE, pytest.param(WHOLE, marks=pytest.mark.soak)], ids=["sample", "whole"])
def test_modules_of_torch_in_stages(most: int, run_script: Callable[..., Any]) -> None:
    """All modules but those in the table compute and train, in a pipeline of two stages, what plain torch does."""
    output = run_script(SCRIPT.format(world="BALANCED", most=most), env=environment(), timeout_s=1800).stdout
    outcomes = json.loads(output.splitlines()[-1])
    assert unexplained(outcomes, REFUSALS["balanced"], is_sample=most == SAMPLE) == {}
    assert len({case.partition(",")[0] for case in outcomes}) >= BALANCED.modules
