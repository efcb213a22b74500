"""The models that torch tests `fully_shard` with train under backend="fsdp" what they train in one process.

They lie in `torch.testing._internal.common_fsdp` and `common_dtensor`: stacks of uneven layers, modules that return
two outputs or leave parameters unused, and transformers with tied weights, checkpointed layers and experts. Each
program runs twice on each rank, by plain torch on whole batches and in a block on this rank's half of them.
Parameters, buffers and whatever a program returns differ by at most 1e-9 in float64, and by 1e-6 of a transformer,
which returns float32.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from others.torch_databases import imported, largest_difference, outcome_of, unexplained
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from parallelize import distributed, parallel_model, rank, world_size

pytestmark = pytest.mark.slow

STEPS, BATCH, WIDTH, TOKENS = 4, 8, 6, 5


@dataclass(frozen=True)
class Entry:
    """A model of torch's tests.

    Attributes:
        make: returns the model.
        inputs: returns the inputs of a step for a generator; the batch is in the first dimension.
        tolerance: what parameters may differ by.
        batch_dim: the dimension of the batch.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]]
    tolerance: float = 1e-9
    batch_dim: int = 0


def rows(width: int = WIDTH) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: (torch.randn(BATCH, width, generator=generator, dtype=torch.float64),)


def tokens(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(8, (BATCH, TOKENS), generator=generator),)


def two_sequences(generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return sources and targets, T B."""
    return tuple(torch.randint(23, (length, BATCH), generator=generator) for length in (6, 4))


def models() -> dict[str, Entry]:
    """Return the models by name."""
    fsdp = imported("torch.testing._internal.common_fsdp")
    dtensor = imported("torch.testing._internal.distributed._tensor.common_dtensor")

    def transformer(**options: Any) -> Entry:
        arguments = dtensor.ModelArgs(dropout_p=0.0, **options)
        return Entry(functools.partial(dtensor.Transformer, arguments), tokens, tolerance=1e-6)

    def with_shared_parameters() -> nn.Module:
        return fsdp.TransformerWithSharedParams(
            torch.distributed.group.WORLD, fsdp.DEVICEInitMode.DEVICE_NEVER, add_bn=False, deterministic=True
        )

    return {
        "MLP": Entry(lambda: fsdp.MLP(WIDTH), rows()),
        "MLP with a buffer": Entry(lambda: fsdp.MLP(WIDTH, with_buffer=True), rows()),
        "MLP without biases": Entry(lambda: fsdp.MLP(WIDTH, bias=False), rows()),
        "MLPStack": Entry(lambda: fsdp.MLPStack(WIDTH), rows()),
        "MLPStack with a norm": Entry(lambda: fsdp.MLPStack(WIDTH, with_seq_parallel=True), rows()),
        "DoubleLinear": Entry(lambda: fsdp.DoubleLinear(5), rows(5)),
        "DoubleLinear with an unused module": Entry(lambda: fsdp.DoubleLinear(5, use_second_linear=False), rows(5)),
        "SkipModule": Entry(fsdp.SkipModule, rows(10)),
        "NestedLinear": Entry(lambda: fsdp.NestedLinear(fsdp_wrap=False), rows(10)),
        "TransformerWithSharedParams": Entry(with_shared_parameters, two_sequences, batch_dim=1),
        "MLPStacked": Entry(lambda: dtensor.MLPStacked("cpu"), rows(10)),
        "Transformer with tied weights": transformer(),
        "Transformer": transformer(weight_tying=False),
        "Transformer with checkpointed layers": transformer(checkpoint_activations=True),
        "Transformer with experts": transformer(num_experts=3),
    }


Batches = Sequence[tuple[Tensor, ...]]


def loss_of(output: Any) -> Tensor:
    losses = [(leaf.double() - 0.3).square().mean() for leaf in tree_leaves(output)]
    return torch.stack(losses).sum()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    for inputs in batches:
        optimizer.zero_grad()
        loss_of(model(*inputs)).backward()
        optimizer.step()


def training(model: nn.Module, batches: Batches) -> Any:
    """Take plain steps."""
    take_steps(model, optimizer_of(model), batches)


def frozen_parameters(model: nn.Module, batches: Batches) -> Any:
    """Train every second parameter, and then the others, too."""
    parameters = list(model.parameters())
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)
    if len(parameters) > 1:
        take_steps(model, optimizer_of(model), batches[:2])
    for parameter in parameters:
        parameter.requires_grad_(True)
    take_steps(model, optimizer_of(model), batches[2:])


def accumulation(model: nn.Module, batches: Batches) -> Any:
    """Make two backward passes before each step."""
    optimizer = optimizer_of(model)
    for number, inputs in enumerate(batches):
        (loss_of(model(*inputs)) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def clipping(model: nn.Module, batches: Batches) -> Any:
    """Clip gradients by their norm and by their values; return the norms."""
    optimizer = optimizer_of(model)
    norms = []
    for inputs in batches:
        optimizer.zero_grad()
        loss_of(model(*inputs)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).detach().clone())
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return norms


def state_dicts(model: nn.Module, batches: Batches) -> Any:
    """Go on from state dicts of the middle; return those of the end."""
    optimizer = optimizer_of(model)
    take_steps(model, optimizer, batches[:2])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    take_steps(model, optimizer, batches[2:])
    end = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    take_steps(model, optimizer, batches[2:])
    return whole(end), whole(saved)


def weights_outside_of_forward(model: nn.Module, batches: Batches) -> Any:
    """Add a penalty of all weights, read and scale them between the steps, and evaluate."""
    optimizer = optimizer_of(model)
    facts = []
    for inputs in batches:
        optimizer.zero_grad()
        penalty = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        (loss_of(model(*inputs)) + 0.01 * penalty).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
                facts += [parameter.norm().clone(), parameter[0].clone(), parameter.flatten()[-1].clone()]
    first = next(parameter for parameter in model.parameters() if parameter.ndim > 1)
    facts.append(F.linear(torch.ones(2, first.shape[-1], dtype=torch.float64), first).detach())
    return whole(facts)


def evaluation_between(model: nn.Module, batches: Batches) -> Any:
    """Evaluate between the steps, in evaluation mode and without gradients."""
    optimizer = optimizer_of(model)
    losses = []
    for inputs in batches:
        was_training = model.training
        take_steps(model, optimizer, [inputs])
        model.eval()
        with torch.no_grad():
            # Each rank evaluates the same samples.
            first = [tensor.new_ones(tensor.shape) for tensor in inputs]
            losses.append(loss_of(model(*first)))
        model.train(was_training)
    return losses


PROGRAMS: tuple[Callable[[nn.Module, Batches], Any], ...] = (
    training,
    frozen_parameters,
    accumulation,
    clipping,
    state_dicts,
    weights_outside_of_forward,
    evaluation_between,
)


def whole(value: Any) -> list[Tensor]:
    """Return copies of the tensors in a value, with all of their elements."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone() for tensor in tensors]


def difference(entry: Entry, program: Callable[[nn.Module, Batches], Any]) -> float:
    """Run a program both ways; return the largest difference that is above the tolerance, else 0."""
    generator = torch.Generator().manual_seed(3)
    batches = [entry.inputs(generator) for _ in range(STEPS)]

    def share(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.chunk(world_size(), entry.batch_dim)[rank()] for tensor in inputs)

    shares = [share(inputs) for inputs in batches]
    torch.manual_seed(0)
    model = entry.make().double()
    expected_model = copy.deepcopy(model)
    expected = program(expected_model, batches)
    with parallel_model(model):
        returned = program(model, shares)
    pairs = [(whole(returned), whole(expected))]
    pairs.append((list(model.state_dict().values()), list(expected_model.state_dict().values())))
    largest = 0.0
    for found, wanted in pairs:
        for pair in zip(found, wanted, strict=True):
            largest = max(largest, largest_difference(*pair))
    return largest if largest > entry.tolerance else 0.0


def outcomes_of_models(*, is_sample: bool) -> dict[str, str]:
    """Return what each program ends with for each model; of a sample, for every third model."""
    warnings.filterwarnings("ignore")
    outcomes = {}
    for model_number, (name, entry) in enumerate(models().items()):
        for program_number, program in enumerate(PROGRAMS):
            if is_sample and (model_number + program_number) % 3:
                continue
            check = functools.partial(difference, entry, program)
            outcomes[f"{name}: {program.__name__}"] = outcome_of(check)
    return outcomes


@pytest.mark.parametrize("is_sample", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["sample", "whole"])
def test_models_of_fsdp(is_sample: bool) -> None:
    """All programs equal one process for all models."""
    run = distributed(processes=2, backend="fsdp")(outcomes_of_models)
    for outcomes in run.all_ranks(is_sample=is_sample):
        assert unexplained(outcomes, {}, is_sample=is_sample) == {}
        assert len(outcomes) > 30
