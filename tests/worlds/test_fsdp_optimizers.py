"""Tests of optimizers under fsdp: with state, wrapped, and stepping on whole matrices."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import FSDPBackend, distributed, parallel_model, rank

pytestmark = pytest.mark.slow

WORLD = 2


class Stack(nn.Module):
    """A model of repeated blocks, whose widths are not divisible by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 5, bias=False)
        self.layers = nn.ModuleList([nn.Linear(5, 5, bias=False) for _ in range(2)])
        self.head = nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as published: an optimizer around another one, which shares its groups."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = self.param_groups[0]["rho"] / (torch.norm(torch.stack(norms), p=2) + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """A wrapper that does not call Optimizer.__init__, so no hooks run; slow weights are in its own state."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 2) -> None:
        self.optimizer, self.k, self.count = optimizer, k, 0
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [each for group in self.param_groups for each in group["params"]]
        for each in held:
            self.state[each].setdefault("slow", each.clone())
        self.optimizer.step()
        self.count += 1
        for each in held if self.count % self.k == 0 else ():
            slow = self.state[each]["slow"]
            each.copy_(slow.add_(each - slow, alpha=0.5))


class Shampoo(torch.optim.Optimizer):
    """Mixes full matrices of its own with the parameters, and transposes gradients in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                update = p.grad.clone()
                for dim, size in enumerate(p.grad.size()):
                    factor = state.setdefault(dim, torch.eye(size, dtype=p.dtype) * 1e-3)
                    update.transpose_(0, dim)
                    factor.add_(update @ update.t())
                    values, vectors = torch.linalg.eigh(factor)
                    update = (vectors @ torch.diag(values.clamp(min=1e-8) ** -0.25) @ vectors.t() @ update).t()
                    update = update.t() if dim == 0 else update
                p.data.add_(update.view_as(p), alpha=-group["lr"])


def sam(model: nn.Module) -> SAM:
    return SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def groups(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        [{"params": model.stem.parameters(), "lr": 0.1}, {"params": model.layers.parameters()}], lr=0.01
    )


MAKERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
    "groups": groups,
    "sam": sam,
    "lookahead": lambda model: Lookahead(torch.optim.Adam(model.parameters(), lr=0.05)),
    "muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.05),
    "shampoo": lambda model: Shampoo(model.parameters()),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4),
    "strong Wolfe": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe"),
}


def seeded() -> Stack:
    torch.manual_seed(7)
    return Stack().double()


def batch_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(WORLD * 4, 6, generator=generator, dtype=torch.float64).chunk(WORLD)[rank % WORLD]


def train(model: nn.Module, optimizer: Any, *, steps: range, whole: bool = False) -> None:
    """Train on this rank's batches, or on those of all ranks."""
    for step in steps:
        x = torch.cat([batch_of(each, step) for each in range(WORLD)]) if whole else batch_of(rank(), step)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :3]).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, (SAM, torch.optim.LBFGS)):
            closure()
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_optimizers_train() -> None:
    """Each kind keeps the user's parameters, and trains what one process trains, wherever it is made."""
    cases = list(itertools.product(MAKERS, ("before", "inside", "with state")))

    @distributed(processes=WORLD)
    def run() -> dict[tuple[str, str], Any]:
        results = {}
        for name, made in cases:
            make = MAKERS[name]
            model = seeded()
            parameters = list(model.parameters())
            optimizer = None if made == "inside" else make(model)
            if made == "with state":
                train(model, optimizer, steps=range(1), whole=True)
            with parallel_model(model, backend="fsdp"):
                optimizer = optimizer or make(model)
                train(model, optimizer, steps=range(made == "with state", 4))
            held = [each for group in optimizer.param_groups for each in group["params"]]
            assert held
            assert all(any(each is one for one in parameters) for each in held)
            train(model, optimizer, steps=range(4, 6), whole=True)
            results[name, made] = dict(model.state_dict())
        return results

    expected = {}
    for name, make in MAKERS.items():
        model = seeded()
        train(model, make(model), steps=range(6), whole=True)
        expected[name] = dict(model.state_dict())
    for found in run.all_ranks():
        for name, made in cases:
            if name == "muon":  # bfloat16 amplifies the rounding of averaged gradients
                torch.testing.assert_close(found[name, made], expected[name], rtol=0.02, atol=0.02)
            else:
                assert_equal(found[name, made], expected[name])


def test_groups_schedules_and_loaded_state() -> None:
    """Parameters added to an optimizer in the block, a second optimizer, a scheduler, and state of an earlier step."""

    def fit(model: Stack, backend: str) -> dict[str, Any]:
        whole = backend == "one process"
        parameters = list(model.parameters())
        optimizer = torch.optim.Adam(parameters[:1], lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        with contextlib.nullcontext() if whole else parallel_model(model, backend=backend):
            train(model, optimizer, steps=range(1), whole=whole)
            optimizer.add_param_group({"params": parameters[1:], "lr": 0.02})
            scheduler.base_lrs.append(0.02)
            late = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
            for step in range(1, 4):
                train(model, optimizer, steps=range(step, step + 1), whole=whole)
                late.step()
                scheduler.step()
                if step == 1:
                    saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
            train(model, optimizer, steps=range(4, 5), whole=whole)
        train(model, optimizer, steps=range(5, 7), whole=True)
        late.step()
        return dict(model.state_dict())

    @distributed(processes=WORLD)
    def run() -> dict[str, Any]:
        return fit(seeded(), "fsdp")

    expected = fit(seeded(), "one process")
    for found in run.all_ranks():
        assert_equal(found, expected)


def test_optimizers_of_one_model_keep_their_own_state() -> None:
    """Several with equal options and state, one that wraps a whole-matrix optimizer, and one whose step has failed."""

    class Failing(Shampoo):
        is_failing = False

        def step(self, closure: Any = None) -> None:
            super().step()
            if self.is_failing:
                raise ValueError("step")

    def fit(model: Stack, *, whole: bool) -> list[Any]:
        first, second = (torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for _ in range(2))
        wrapper = Lookahead(Failing(model.parameters()))
        with contextlib.nullcontext() if whole else parallel_model(model, backend="fsdp"):
            for step in range(3):
                train(model, first, steps=range(step, step + 1), whole=whole)
                train(model, second, steps=range(step + 1, step + 2), whole=whole)
                train(model, wrapper, steps=range(step, step + 1), whole=whole)
            wrapper.optimizer.is_failing = True
            with pytest.raises(ValueError, match="step"):
                train(model, wrapper, steps=range(3, 4), whole=whole)
            train(model, first, steps=range(5, 6), whole=whole)
        states = [[first.state[each], second.state[each], wrapper.state[each]] for each in model.parameters()]
        return [states, dict(model.state_dict())]

    @distributed(processes=WORLD)
    def run() -> list[Any]:
        return fit(seeded(), whole=False)

    expected = fit(seeded(), whole=True)
    for found in run.all_ranks():
        assert_equal(found, expected)


def zero_model(model: nn.Module, _optimizer: Any) -> None:
    model.zero_grad()


def zero_in_place(model: nn.Module, _optimizer: Any) -> None:
    model.zero_grad(set_to_none=False)


def zero_optimizer(_model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def zero_head(model: Any, _optimizer: Any) -> None:
    for each in model.head.parameters():
        each.grad = None


def halve(model: nn.Module, _optimizer: Any) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad.mul_(0.5)


def test_gradients_changed_between_forward_and_backward() -> None:
    """The order of DCGAN (forward, zero_grad, backward) reaches the shards of gathered parameters."""

    def fit(model: Stack, change: Any, *, whole: bool) -> dict[str, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with contextlib.nullcontext() if whole else parallel_model(model, backend="fsdp"):
            for step in range(3):
                x = torch.cat([batch_of(each, step) for each in range(WORLD)]) if whole else batch_of(rank(), step)
                loss = model(x).square().mean()
                change(model, optimizer)
                loss.backward()
                optimizer.step()
        return dict(model.state_dict())

    changes = (zero_model, zero_in_place, zero_optimizer, zero_head, halve)

    @distributed(processes=WORLD)
    def run() -> list[Any]:
        return [fit(seeded(), change, whole=False) for change in changes]

    expected = [fit(seeded(), change, whole=True) for change in changes]
    for found in run.all_ranks():
        assert_equal(found, expected)


def test_a_step_in_two_copies_of_two_ranks() -> None:
    """With shard_over=2 on four ranks, element-wise and whole-matrix optimizers from before the block train as one."""
    names = ("adamw", "sam", "shampoo", "adafactor", "strong Wolfe")

    def fit(name: str, *, whole: bool) -> dict[str, Any]:
        model = seeded()
        optimizer = MAKERS[name](model)
        backend = FSDPBackend(shard_over=2)
        with contextlib.nullcontext() if whole else parallel_model(model, backend=backend):
            train(model, optimizer, steps=range(3), whole=whole)
        return dict(model.state_dict())

    @distributed(processes=4)
    def run() -> list[Any]:
        return [fit(name, whole=False) for name in names]

    expected = [fit(name, whole=True) for name in names]
    for found in run.all_ranks():
        assert_equal(found, expected)
