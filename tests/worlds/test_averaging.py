"""Programs whose gradients arrive in every way that torch knows train the weights of one process."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from ranks import outcomes_of
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import ZOO, Branched

from parallelize import DDPBackend, all_reduce, distributed, no_sync, parallel_model, rank, world_size

WORLD = 2
STEPS = 4

# Trains models inside `block` and returns what it has trained.
Program = Callable[[Any], list[Any]]
# model, this rank's batch of a step, the step -> runs backward
Backward = Callable[[Any, Tensor, int], None]

PROGRAMS: dict[str, Program] = {}


def batch(step: int) -> Tensor:
    """Return this rank's part of a batch; one process gets all."""
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return whole.chunk(world_size())[rank()]


def tokens(step: int) -> Tensor:
    whole = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(step))
    return whole.chunk(world_size())[rank()]


def parts(x: Tensor) -> list[tuple[int, Tensor]]:
    """Return (rank, batch) of this rank; of both ranks in one process."""
    return [(rank(), x)] if world_size() > 1 else list(enumerate(x.chunk(WORLD)))


def local(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    return no_sync(model) if world_size() > 1 else contextlib.nullcontext()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head, self.other = nn.Linear(8, 2), nn.Linear(8, 2)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor, use_other: bool = False) -> Tensor:
        output = self.head(self.encode(x))
        return output + self.other(self.encode(x)) if use_other else output


class Checkpointed(Net):
    """A layer called twice under reentrant checkpoints, and once without."""

    def forward(self, x: Tensor, use_other: bool = False) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda given: self.body(given)[:, :6], x, use_reentrant=True)
        return self.head(self.body(x)) if not use_other else self.other(self.body(x))


class TrainsItself(Net):
    def forward(self, x: Tensor, use_other: bool = False) -> Any:
        loss = super().forward(x, use_other).square().mean()
        loss.backward()
        return loss.detach()


class Centered(Net):
    """A collective in backward, before the last layer of which rank 1 alone has a gradient."""

    def forward(self, x: Tensor, use_other: bool = False) -> Tensor:
        features = self.encode(x)
        features = features - all_reduce(features.mean(0), "mean")
        output = self.head(features)
        uses = torch.arange(len(x)) >= len(x) // 2 if world_size() == 1 else torch.full((len(x),), rank() == 1)
        return output.index_add(0, uses.nonzero().flatten(), self.other(features[uses])) if uses.any() else output


class Recursive(Net):
    """Calls itself inside its forward, also by the name of the method."""

    def forward(self, x: Tensor, use_other: bool = False, depth: int = 2) -> Tensor:
        if depth == 0:
            return super().forward(x, use_other)
        return self(x, depth=depth - 1) + self.forward(x, depth=0)


class Quantized(Net):
    """Frozen weights in packed integers, as under QLoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapped(Net):
    def forward(self, x: Tensor, use_other: bool = False) -> Any:
        return Opaque(super().forward(x, use_other))


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    parameters = {each: None for model in models for each in model.parameters()}
    return torch.optim.SGD(list(parameters), 0.1, momentum=0.9, weight_decay=0.01)


def steps(make: Callable[[], nn.Module] = Net, *, name: str = "") -> Callable[[Backward], Backward]:
    """Make a program, of the function's name or another, of a function that runs the backward of each step."""

    def register(backward: Backward) -> Backward:
        def train(block: Any) -> list[Any]:
            model = make()
            optimizer = sgd(model)
            with block(model):
                for step in range(STEPS):
                    optimizer.zero_grad()
                    backward(model, batch(step), step)
                    optimizer.step()
            return [model]

        PROGRAMS[name or backward.__name__] = train
        return backward

    return register


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def tied_embedding() -> nn.Module:
    model = nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 11, bias=False))
    model[1].weight = model[0].weight
    return model


def plain(model: Any, x: Tensor, _: int) -> Tensor:
    return square(model(x))


# a model, and the loss of a step
LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor, int], Tensor]]] = {
    "plain": (Net, plain),
    "collective_in_backward": (Centered, plain),
    "integer_parameters": (Quantized, plain),
    "recursive_forward": (Recursive, plain),
    "opaque_output": (Wrapped, lambda model, x, _: square(model(x).value)),
    "submodule": (Net, lambda model, x, _: square(model.head(model.body(x)))),
    "parameter_alone": (Net, lambda model, x, _: model.head.weight.pow(2).sum() * x.mean()),
    "reentrant_layer_called_thrice": (Checkpointed, lambda model, x, _: square(model(x.clone().requires_grad_()))),
    "sparse_and_dense_gradients_of_one_weight": (tied_embedding, lambda model, _, step: square(model(tokens(step)))),
}
for each_name, (each_make, each_loss) in LOSSES.items():
    steps(each_make, name=each_name)(lambda model, x, step, loss=each_loss: loss(model, x, step).backward())


@steps()
def two_backwards(model: Any, x: Tensor, _: int) -> None:
    first, second = square(model(x)), model(x + 1).mean()
    first.backward()
    second.backward()


@steps()
def mixed_backwards(model: Any, x: Tensor, _: int) -> None:
    square(model.encode(x)).backward()
    square(model.head(x.cos() @ x.new_ones(6, 8))).backward()
    model(x).sin().mean().backward()


@steps()
def inputs_of_backward(model: Any, x: Tensor, _: int) -> None:
    square(model(x)).backward(inputs=list(model.head.parameters()))


@steps()
def unused_on_one_rank(model: Any, x: Tensor, step: int) -> None:
    each = [square(model(part, use_other=number == 1 and step % 2 == 0)) for number, part in parts(x)]
    (sum(each) / len(each)).backward()


@steps()
def hook_of_the_user_after_the_first_pass(model: Any, x: Tensor, step: int) -> None:
    def halve(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    if step == 1:
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(halve)
    square(model(x, use_other=True)).backward()


@steps(Branched)
def branches_in_turn(model: Any, x: Tensor, step: int) -> None:
    each = [square(model(part, right=(number + step) % 2 == 0)) for number, part in parts(x)]
    (sum(each) / len(each)).backward()


@steps(Branched)
def branch_used_under_no_sync(model: Any, x: Tensor, _: int) -> None:
    with local(model):
        square(model(x, right=True)).backward()
    model(x).mean().backward()


@steps()
def accumulation(model: Any, x: Tensor, _: int) -> None:
    for number, micro in enumerate((x, x + 1, x.sin())):
        with local(model) if number < 2 else contextlib.nullcontext():
            (square(model(micro)) / 3).backward()


@steps()
def averaged_by_hand_under_no_sync(model: Any, x: Tensor, _: int) -> None:
    with local(model):
        square(model(x)).backward()
    for each in model.parameters():
        each.grad = all_reduce(each.grad, "mean") if each.grad is not None else None


@steps()
def gradient_penalty_alone(model: Any, x: Tensor, _: int) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    slope.square().sum(1).mean().backward()


@steps()
def penalty_alone(model: Any, x: Tensor, _: int) -> None:
    square(model(x)).backward()
    sum(each.square().sum() for each in model.parameters()).backward()


@steps()
def gradients_with_a_graph(model: Any, x: Tensor, _: int) -> None:
    """A penalty differentiates the averaged gradients, which are linear in each rank's."""
    square(model(x, use_other=True)).backward(create_graph=True)
    sum(each.grad.square().sum() for each in model.parameters()).backward()


@steps()
def functional_weights(model: Any, x: Tensor, _: int) -> None:
    square(functional_call(model, {name: 2.0 * each for name, each in model.named_parameters()}, (x,))).backward()


@steps()
def functional_weights_per_sample(model: Any, x: Tensor, _: int) -> None:
    weights = dict(model.named_parameters())
    square(torch.func.vmap(lambda sample: functional_call(model, weights, (sample,)))(x)).backward()


@steps()
def functional_while_freezing(model: Any, x: Tensor, step: int) -> None:
    model.body.requires_grad_(step % 2 == 1)
    for number in range(2):
        scaled = {name: each * 1.1 for name, each in model.named_parameters()}
        with local(model) if number == 0 else contextlib.nullcontext():
            square(functional_call(model, scaled, (x + number,))).backward()


@steps(TrainsItself)
def backward_in_forward(model: Any, x: Tensor, _: int) -> None:
    model(x)


@steps()
def unfrozen_and_trained_without_a_forward(model: Any, x: Tensor, step: int) -> None:
    model.head.requires_grad_(False)
    square(model(x)).backward()
    model.head.requires_grad_(step > 0)
    if step > 0:
        square(model.head(x.cos() @ x.new_ones(6, 8))).backward()


@steps()
def freezing_between_forward_and_backward(model: Any, x: Tensor, step: int) -> None:
    model.requires_grad_(True)
    model.head.requires_grad_(step > 0)
    output = model(x)
    model.head.requires_grad_(True)
    square(output).backward()


@steps()
def alternately_frozen(model: Any, x: Tensor, step: int) -> None:
    for number, each in enumerate(model.children()):
        each.requires_grad_((step + number) % 3 != 0)
    for micro in (x, x + 1):
        with local(model) if micro is x else contextlib.nullcontext():
            square(model(micro, use_other=step % 2 == 0)).backward()


@program
def replaced_parameters(block: Any) -> list[Any]:
    model = Net()
    with block(model):
        square(model(batch(0))).backward()
        weights = copy.deepcopy(model.state_dict())
        model.head = nn.Linear(8, 2)
        nn.init.constant_(model.head.weight, 1.0 + rank())  # all ranks get rank 0's
        model.head.bias.data.zero_()
        for step in range(2 * STEPS):
            if step == STEPS:
                model.load_state_dict(weights, assign=True)
                model.requires_grad_(True)
            model.zero_grad()
            square(model(batch(step))).backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
    return [model]


@program
def shared_layers(block: Any) -> list[Any]:
    """Two models share a layer, which backwards of each, of both, and under no_sync reach."""
    first, second = Net(), Net()
    second.body = first.body
    optimizer = sgd(first, second)
    with block(first, second):
        for step in range(2 * STEPS):
            x = batch(step)
            optimizer.zero_grad()
            first.body.requires_grad_(step % 3 != 2)
            with local(first) if step % 2 else contextlib.nullcontext():
                square(first(x)).backward()
            second(x).sin().mean().backward()
            (square(first(x)) + F.softplus(second(x)).mean()).backward()
            optimizer.step()
    return [first, second]


@program
def nested_blocks(block: Any) -> list[Any]:
    """A rank lacks gradients in the model of the inner block."""
    outer, inner = Net(), Net()
    optimizer = sgd(outer, inner)
    with block(outer), block(inner):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = square(outer(batch(step), use_other=True))
            losses = [square(inner(part, use_other=number == 1)) for number, part in parts(batch(step))]
            (loss + sum(losses) / len(losses)).backward()
            optimizer.step()
    return [outer, inner]


@program
def tensor_beside_a_model(block: Any) -> list[Any]:
    """SAC trains the logarithm of its temperature."""
    actor, temperature = Net(), torch.zeros((), requires_grad=True)
    of_actor, of_temperature = sgd(actor), torch.optim.Adam([temperature], 0.1)
    with block(actor, temperature):
        for step in range(STEPS):
            of_actor.zero_grad()
            of_temperature.zero_grad()
            output = actor(batch(step))
            (square(output) * temperature.exp().detach()).backward()
            (temperature * output.detach().mean()).backward()
            of_actor.step()
            of_temperature.step()
    return [actor, temperature]


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(name: str, block: Any) -> list[Tensor]:
    """Return the weights that a program trains in double precision."""
    torch.manual_seed(7)
    with in_double():
        things = PROGRAMS[name](block)
    tensors = [[each] if isinstance(each, Tensor) else each.parameters() for each in things]
    return [each.detach().clone() for found in tensors for each in found]


@functools.cache
def expected(name: str) -> list[Tensor]:
    return trained(name, by_one_process)


def by_one_process(*_: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def errors_of_two_ranks(names: Iterable[str], *, tolerance: float, block: Any) -> dict[str, str]:
    """Run programs in one launch; return what is wrong with those that differ from one process, or raise."""
    run = distributed(processes=WORLD)(outcomes_of)
    first, second = run.all_ranks({name: functools.partial(trained, name, block) for name in names})
    wrong = {}
    for name in names:
        if isinstance(first[name], str) or isinstance(second[name], str):
            wrong[name] = f"{first[name]} / {second[name]}"
            continue
        off = max((one - other).abs().max().item() for one, other in zip(first[name], expected(name), strict=True))
        if not all(map(torch.equal, first[name], second[name])) or not off <= tolerance:
            wrong[name] = f"ranks differ, or one process by {off}"
    return wrong


NEEDLESS = DDPBackend(
    find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True, batched_grad_copy=True
)


COMPRESSED = (
    "plain",
    "two_backwards",
    "unused_on_one_rank",
    "accumulation",
    "alternately_frozen",
    "submodule",
    "functional_weights",
)


@pytest.mark.parametrize(
    ("names", "tolerance", "backend"),
    [
        pytest.param(PROGRAMS, 1e-9, DDPBackend(), id="defaults"),
        pytest.param(PROGRAMS, 1e-9, NEEDLESS, id="needless", marks=pytest.mark.slow),
        pytest.param(PROGRAMS, 1e-9, DDPBackend(bucket_cap_mb=0.0002), id="small buckets", marks=pytest.mark.slow),
        pytest.param(COMPRESSED, 0.02, DDPBackend(comm_hook="bf16"), id="bf16"),
        pytest.param(COMPRESSED, 0.02, DDPBackend(comm_hook="fp16"), id="fp16"),
    ],
)
@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True:UserWarning")
def test_every_program_equals_one_process(names: Iterable[str], tolerance: float, backend: DDPBackend) -> None:
    """The gradients of all ranks are averaged exactly once, however they arrive; compressed ones are close to that."""
    block = functools.partial(parallel_model, backend=backend)
    wrong = errors_of_two_ranks(names, tolerance=tolerance, block=block)
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())


def test_without_a_block_the_table_is_wrong() -> None:
    """Meta-test: the comparison finds gradients that are not averaged."""
    names = ["plain", "submodule", "parameter_alone", "tensor_beside_a_model"]
    wrong = errors_of_two_ranks(names, tolerance=1e-9, block=by_one_process)
    assert list(wrong) == names


def test_models_train_as_with_hand_written_ddp() -> None:
    """Weights and buffers are bitwise those of torch's DistributedDataParallel on the same batches."""

    @distributed(processes=WORLD)
    def run() -> dict[str, list[dict[str, Tensor]]]:
        def fit(name: str, model: nn.Module, called: nn.Module) -> dict[str, Tensor]:
            torch.manual_seed(rank())
            optimizer = sgd(model)
            for _ in range(STEPS):
                optimizer.zero_grad()
                ZOO[name].loss(called(*ZOO[name].batch(4))).backward()
                optimizer.step()
            return copy.deepcopy(model.state_dict())

        found = {}
        for name, entry in ZOO.items():
            torch.manual_seed(7)
            ours = entry.make()
            theirs = copy.deepcopy(ours)
            with parallel_model(ours, buffers="rank0"):
                mine = fit(name, ours, ours)
            found[name] = [mine, fit(name, theirs, nn.parallel.DistributedDataParallel(theirs))]
        return found

    for found in run.all_ranks():
        for mine, theirs in found.values():
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
