"""Ordinary programs under fsdp, each beside one process that runs the same lines, in one world of two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from parallelize import FSDPBackend, distributed, parallel_model, rank

pytestmark = pytest.mark.slow

Program = Callable[[nn.Sequential], Any]
"""Uses a model in a block; returns tensors and numbers to compare."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def nothing(*_: Any) -> None:
    """Do nothing."""


def train(
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    *,
    penalty: Callable[[], Any] = float,
    before_step: Callable[[], Any] = nothing,
    after_step: Callable[[], Any] = nothing,
) -> list[Any]:
    """Make three steps, the first ones of SGD without a given optimizer; return what the functions return."""
    optimizer = optimizer or optim.SGD(model.parameters(), 0.1)
    seen: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        (model(batch(step)).square().mean() + penalty()).backward()
        seen.append(before_step())
        optimizer.step()
        seen.append(after_step())
    return seen


def with_optimizer(make: Callable[[Any], optim.Optimizer]) -> Program:
    return lambda model: train(model, make(model.parameters()))


def lbfgs(model: nn.Module) -> Any:
    optimizer = optim.LBFGS(model.parameters(), 0.5, max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch(0)).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(3)]


def gradients(model: nn.Module) -> list[Any]:
    return [each.grad for each in model.parameters()]


def log_statistics(model: nn.Module) -> Any:
    return train(
        model,
        before_step=lambda: [
            [
                each.norm(2).item(),
                each.data.norm(),
                each.abs().max(),
                each.min(),
                torch.where(each > 0)[0].sum(),
                each.std(),
                each.mean(),
                torch.isfinite(each).all(),
            ]
            for each in [*model.parameters(), *gradients(model)]
        ],
    )


@torch.no_grad()
def adaptive_clipping(model: nn.Module) -> None:
    for each in model.parameters():
        if each.grad is not None and each.grad.norm() > 0.1 * each.norm():
            each.grad.mul_(0.1 * each.norm() / each.grad.norm())


@torch.no_grad()
def steps_by_hand(model: nn.Module) -> None:
    for each in model.parameters():
        each.sub_(0.1 * each.grad)
        each.mul_(1 - 0.01)
        each.data.clamp_(-0.5, 0.5)
        each.mul_((each.abs() > 0.05).to(each.dtype))


def sam(model: nn.Module) -> Any:
    def perturbed() -> None:
        with torch.no_grad():
            norm = torch.stack([each.norm(2) for each in gradients(model)]).norm(2)
            steps = [each * (0.05 / norm) for each in gradients(model)]
            for each, step in zip(model.parameters(), steps, strict=True):
                each.add_(step)
        model.zero_grad()
        model(batch(9)).square().mean().backward()
        with torch.no_grad():
            for each, step in zip(model.parameters(), steps, strict=True):
                each.sub_(step)

    return train(model, before_step=perturbed)


def hooks(model: nn.Module) -> Any:
    seen: list[int] = []
    for each in model.parameters():
        each.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        each.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.numel()))
    train(model)
    return sorted(seen)


def rewritten(model: nn.Module) -> Any:
    """Gradients and weights that are assigned."""

    def change() -> None:
        for each in model.parameters():
            each.grad = each.grad * 2 + torch.ones_like(each)
            each.data = each.data * 0.9

    return train(model, before_step=change)


def frozen_for_a_time(model: nn.Sequential) -> Any:
    model[0].requires_grad_(False)
    first = train(model)
    model[0].requires_grad_(True)
    return [first, train(model)]


def snapshot(model: nn.Module) -> Any:
    """State dicts share memory with the model, as in one process; clones do not."""
    alias, best = model.state_dict(), {name: each.clone() for name, each in model.state_dict().items()}
    train(model)
    shared = {name: each.clone() for name, each in alias.items()}
    model.load_state_dict(best)
    return shared, best


def swapped(model: nn.Module) -> Any:
    """The weights of an average are used for a time, as by classes for evaluation with EMA weights."""
    shadow = {name: each.data.clone() for name, each in model.named_parameters()}
    train(model)
    backup = {}
    for name, each in model.named_parameters():
        backup[name] = each.data
        each.data = shadow[name]
    with torch.no_grad():
        found = model(batch(5))
    for name, each in model.named_parameters():
        each.data = backup[name]
    return found


PROGRAMS: dict[str, Program] = {
    "sgd": with_optimizer(lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1)),
    "sgd per tensor": with_optimizer(lambda p: optim.SGD(p, 0.1, momentum=0.9, foreach=False)),
    "adam": with_optimizer(lambda p: optim.Adam(p, 0.1, amsgrad=True)),
    "adamw foreach": with_optimizer(lambda p: optim.AdamW(p, 0.1, foreach=True)),
    "adamw per tensor": with_optimizer(lambda p: optim.AdamW(p, 0.1, foreach=False)),
    "adamw fused": with_optimizer(lambda p: optim.AdamW(p, 0.1, fused=True)),
    "adagrad": with_optimizer(lambda p: optim.Adagrad(p, 0.1)),
    "adadelta": with_optimizer(optim.Adadelta),
    "adamax": with_optimizer(optim.Adamax),
    "asgd": with_optimizer(optim.ASGD),
    "nadam": with_optimizer(optim.NAdam),
    "radam": with_optimizer(optim.RAdam),
    "rmsprop": with_optimizer(lambda p: optim.RMSprop(p, momentum=0.9, centered=True)),
    "rprop": with_optimizer(optim.Rprop),
    "adafactor": with_optimizer(lambda p: optim.Adafactor(p, 0.1)),
    "muon": with_optimizer(lambda p: optim.Muon([each for each in p if each.ndim == 2], 0.1)),
    "lbfgs": lbfgs,
    "clip norm": lambda m: train(m, before_step=lambda: clip_grad_norm_(m.parameters(), 0.1)),
    "clip norm one by one": lambda m: train(m, before_step=lambda: clip_grad_norm_(m.parameters(), 0.1, foreach=False)),
    "clip largest": lambda m: train(m, before_step=lambda: clip_grad_norm_(m.parameters(), 0.1, norm_type=torch.inf)),
    "clip 1-norm": lambda m: train(m, before_step=lambda: clip_grad_norm_(m.parameters(), 0.1, norm_type=1).item()),
    "clip values": lambda m: train(m, before_step=lambda: clip_grad_value_(m.parameters(), 0.01)),
    "statistics": log_statistics,
    "adaptive clipping": lambda m: train(m, before_step=lambda: adaptive_clipping(m)),
    "by hand": lambda m: train(m, before_step=lambda: steps_by_hand(m)),
    "sam": sam,
    "penalties": lambda m: train(
        m,
        penalty=lambda: sum(
            each.pow(2).sum() + 0.1 * each.abs().sum() + each.norm() + each.norm(1) + each.max()
            for each in m.parameters()
        ),
    ),
    "vector": lambda m: train(m, after_step=lambda: parameters_to_vector(m.parameters())),
    "spectral norm": lambda m: train(m, after_step=lambda: torch.linalg.matrix_norm(m[0].weight.detach(), 2)),
    "hooks": hooks,
    "rewritten": rewritten,
    "frozen for a time": frozen_for_a_time,
    "snapshot": snapshot,
    "swapped": swapped,
}


def kept_view(model: nn.Sequential) -> None:
    view = model[0].weight.view(-1)
    model[0].weight.mul_(2)
    view.add_(1)


WRITES: dict[str, Callable[[nn.Sequential], Any]] = {
    "row": lambda m: m[0].weight[0].fill_(0.5),
    "row of data": lambda m: m[0].weight.data[5].mul_(2),
    "item": lambda m: m[0].weight.__setitem__((0, 1), 3.0),
    "column": lambda m: m[0].weight[:, 1].zero_(),
    "view": lambda m: m[2].weight.view(-1)[3:5].zero_(),
    "transposed": lambda m: m[0].weight.t().mul_(2),
    "mask": lambda m: m[0].weight.__setitem__(m[0].weight.abs() < 0.2, 0.0),
    "masked_fill_": lambda m: m[0].weight.masked_fill_(m[0].weight.abs() < 0.2, 0.0),
    "diagonal": lambda m: torch.diagonal(m[0].weight).add_(1),
    "chunk": lambda m: m[0].weight.chunk(2)[1].mul_(2),
    "slice": lambda m: m[0].weight[2:4].copy_(torch.ones(2, 4)),
    "plain tensor": lambda m: m[0].weight.mul_(torch.tril(torch.ones(6, 4))),
    "out=": lambda m: torch.mul(m[0].weight, 2, out=m[0].weight),
    "vector": lambda m: vector_to_parameters(torch.arange(51.0, dtype=torch.float64), m.parameters()),
    "index_fill_": lambda m: m[0].weight.index_fill_(0, torch.tensor([0, 5]), 1.0),
    "sorted": lambda m: m[0].weight.copy_(m[0].weight.sort(0).values),
    "data": lambda m: setattr(m[0].weight, "data", torch.where(m[0].weight > 0, m[0].weight, 0.0)),
    "max norm": lambda m: m[0].weight.copy_(torch.renorm(m[0].weight, 2, 0, 0.5)),
    "kept view": kept_view,
    "foreach": lambda m: torch._foreach_mul_(list(m.parameters()), 0.5),
    "uniform": lambda m: nn.init.kaiming_uniform_(m[0].weight),
    "orthogonal": lambda m: nn.init.orthogonal_(m[0].weight),
    "truncated": lambda m: nn.init.trunc_normal_(m[0].weight),
    "reset": lambda m: m[0].reset_parameters(),
    "noise": lambda m: m[0].weight.add_(torch.randn_like(m[0].weight)),
    "noise of its own": lambda m: m[0].weight.add_(torch.randn(6, 4)),
    "dropout": lambda m: m[0].weight.copy_(F.dropout(m[0].weight, 0.5)),
}


def written(write: Callable[[nn.Sequential], Any]) -> Program:
    def program(model: nn.Sequential) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(3 + rank())  # rank 0's numbers count
            write(model)

    return program


ALL: dict[str, Program] = {**PROGRAMS, **{f"write {name}": written(each) for name, each in WRITES.items()}}


@distributed(processes=2)
def differences() -> dict[str, Any]:
    """Return, for each program, what differs from one process in the block and after it."""
    found: dict[str, Any] = {}
    for name, program in ALL.items():
        expected_model, model = net(), net()
        expected = program(expected_model)
        with parallel_model(model, backend=FSDPBackend(blocks=[nn.Linear])):
            results = program(model)
        found[name] = (expected, results), (dict(expected_model.named_parameters()), dict(model.named_parameters()))
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return differences()


@pytest.mark.parametrize("name", ALL)
def test_a_program_computes_what_one_process_does(name: str, results: dict[str, Any]) -> None:
    """In its results, and in the weights after the block."""
    for expected, found in results[name]:
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_copies_follow_the_model() -> None:
    """Averages by parameters, by torch and by state dicts, made before the block or inside it."""

    def run(model: nn.Module, enter: Callable[[], Any]) -> list[Any]:
        before, averaged_before = copy.deepcopy(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        with enter():
            inside, averaged = copy.deepcopy(model), AveragedModel(model)
            values = {name: each.detach().clone() for name, each in model.named_parameters()}

            def update() -> Any:
                averaged.update_parameters(model)
                averaged_before.update_parameters(model)
                with torch.no_grad():
                    for copied in (before, inside):
                        for one, other in zip(copied.parameters(), model.parameters(), strict=True):
                            one.mul_(0.9).add_(other, alpha=0.1)
                    for one, other in zip(inside.state_dict().values(), model.state_dict().values(), strict=True):
                        one.copy_(one * 0.9 + other * 0.1)
                    for name, each in model.named_parameters():
                        values[name].lerp_(each, 0.1)
                    return [each(batch(7)) for each in (before, inside, averaged, averaged_before)]

            seen = train(model, optim.AdamW(model.parameters(), 0.1), after_step=update)
        averages = [dict(each.named_parameters()) for each in (before, inside, averaged, averaged_before)]
        assert {type(each) for average in averages for each in average.values()} == {nn.Parameter}
        assert {type(each) for each in values.values()} == {torch.Tensor}
        return [seen, averages, values]

    @distributed(processes=2)
    def call() -> Any:
        expected_model, model = net(), net()
        backend = FSDPBackend(blocks=[nn.Linear])
        return run(expected_model, torch.enable_grad), run(model, lambda: parallel_model(model, backend=backend))

    for expected, found in call.all_ranks():
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
