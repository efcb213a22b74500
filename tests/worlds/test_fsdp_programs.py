"""What programs do with a model under fsdp, beside one process that runs the same lines, in one world of two ranks.

Whole programs, in which ranks read different batches, are in tests/one_word; what fsdp alone has, in test_fsdp.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from one_word.optimizers import Lookahead, Shampoo
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, vector_to_parameters
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize import FSDPBackend, distributed, parallel_model, rank

pytestmark = pytest.mark.slow

Program = Callable[[nn.Sequential], Any]
"""Uses a model in a block; returns tensors and numbers to compare."""
Block = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]
Around = Callable[[nn.Sequential, Block], Any]
"""Uses a model before, in and after a block."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def nothing(*_: Any) -> None:
    """Do nothing."""


def train(
    model: nn.Module, optimizer: optim.Optimizer | None = None, *, before_step: Callable[[], Any] = nothing
) -> list[Any]:
    """Make three steps, the first ones of SGD without a given optimizer; return what `before_step` returns."""
    optimizer = optimizer or optim.SGD(model.parameters(), 0.1)
    seen: list[Any] = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, optim.LBFGS):
            seen.append(optimizer.step(closure))
            continue
        closure()
        seen.append(before_step())
        optimizer.step()
    return seen


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "sgd per tensor": lambda p: optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "adam": lambda p: optim.Adam(p, 0.1, amsgrad=True),
    "adamw foreach": lambda p: optim.AdamW(p, 0.1, foreach=True),
    "adamw per tensor": lambda p: optim.AdamW(p, 0.1, foreach=False),
    "adamw fused": lambda p: optim.AdamW(p, 0.1, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, 0.1),
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "asgd": optim.ASGD,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": optim.Rprop,
    "lbfgs": lambda p: optim.LBFGS(p, 0.5, max_iter=4, line_search_fn="strong_wolfe"),
    "adafactor": lambda p: optim.Adafactor(p, 0.1),
    "muon": lambda p: optim.Muon(matrices(p), 0.1),  # of more rows than columns, and of fewer
    "muon, as rms": lambda p: optim.Muon(matrices(p), 0.1, nesterov=False, adjust_lr_fn="match_rms_adamw"),
}


def matrices(parameters: Any) -> list[Any]:
    return [parameter for parameter in parameters if parameter.ndim == 2]


def with_optimizer(make: Callable[[Any], Any]) -> Around:
    """Let an optimizer, made before the block and with state, step in and after it on the user's parameters."""

    def around(model: nn.Sequential, block: Block) -> Any:
        parameters = list(model.parameters())
        optimizer = make(parameters)
        train(model, optimizer)
        with block(model):
            seen = train(model, optimizer)
        held = [each for group in optimizer.param_groups for each in group["params"]]
        assert held
        assert {*map(id, held)} <= {*map(id, parameters)}
        return [seen, train(model, optimizer)]

    return around


def several(model: nn.Sequential, block: Block) -> Any:
    """Two optimizers of equal options and state, and one that wraps another, whose step fails at last."""

    class Failing(Shampoo):
        is_failing = False

        def step(self, closure: Any = None) -> None:
            super().step()
            if self.is_failing:
                raise ValueError("step")

    first, second = (optim.SGD(model.parameters(), 0.05, momentum=0.9) for _ in range(2))
    wrapper = Lookahead(Failing(model.parameters(), lr=0.01))
    with block(model):
        for each in (first, second, wrapper):
            train(model, each)
        wrapper.optimizer.is_failing = True
        with pytest.raises(ValueError, match="step"):
            train(model, wrapper)
        train(model, first)
    return [[first.state[each], second.state[each], wrapper.state[each]] for each in model.parameters()]


# Called between forward and backward, as in DCGAN: what it does reaches the shards of gathered parameters.
CHANGES: dict[str, Callable[[nn.Sequential, optim.Optimizer], Any]] = {
    "zero_grad in place": lambda model, _: model.zero_grad(set_to_none=False),
    "zero_grad of a layer": lambda model, _: model[2].zero_grad(),
    "halved": lambda model, _: [each.grad.mul_(0.5) for each in model.parameters() if each.grad is not None],
}


def changed(change: Callable[[nn.Sequential, optim.Optimizer], Any]) -> Program:
    def program(model: nn.Sequential) -> None:
        optimizer = optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            loss = model(batch(step)).square().mean()
            change(model, optimizer)
            loss.backward()
            optimizer.step()

    return program


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


def kept_views(model: nn.Sequential) -> list[Any]:
    """Views of a parameter, its data, its gradient and its momentum, which later steps write to."""
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer)
    weight = model[0].weight
    momentum = optimizer.state[weight]["momentum_buffer"]
    views = [weight.detach()[0], weight.data[0], weight.grad[0], weight.grad.data[0], momentum[0]]
    before = [view.clone() for view in views]
    loss = model(batch(5)).square().mean()
    loss.backward()
    optimizer.step()
    return [before, [view.clone() for view in views]]


def kept_data(model: nn.Sequential) -> list[Any]:
    """Data of before `p.data = ...` stay, as in SAM; those of after it change with the parameter."""
    weight = model[0].weight
    before = weight.data
    weight.data = weight.data * 2
    after = weight.data
    with torch.no_grad():
        weight.add_(1)
    return [before.clone(), after.clone(), weight.detach().clone(), before[0].clone(), after[0].clone()]


def rounded(model: nn.Sequential) -> list[Any]:
    """Norms in half precision, by which Muon divides, and sums are rounded once."""
    tensors = [(model[0].weight.detach().abs() + number).bfloat16() for number in range(50)]
    return [[tensor.norm(), tensor.sum()] for tensor in tensors]


def deleted_gradients(model: nn.Sequential) -> list[Any]:
    for step in range(2):
        model(batch(step)).square().mean().backward()
        before = [gradient.clone() for gradient in gradients(model)]
        for parameter in model.parameters():
            del parameter.grad
    return [before, gradients(model)]


def hooks_of_steps(model: nn.Sequential) -> list[float]:
    """An optimizer's own hooks see full tensors, whether they were registered before its first step or after it."""
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    norms: list[float] = []

    def log(*_: Any) -> None:
        norms.append(model[0].weight.detach().norm().item())

    for _ in range(2):
        optimizer.register_step_pre_hook(log)
        optimizer.register_step_post_hook(log)
        train(model, optimizer)
    return norms


def failed_step(model: nn.Sequential) -> None:
    """Another optimizer makes the step after one that has failed."""
    failing, optimizer = (optim.SGD(model.parameters(), 0.1, momentum=0.9) for _ in range(2))
    train(model, failing)
    failing.param_groups[0]["lr"] = "none"
    model(batch(3)).square().mean().backward()
    with contextlib.suppress(TypeError, RuntimeError):
        failing.step()
    optimizer.step()
    train(model, optimizer)


def sparse(model: nn.Sequential) -> list[Any]:
    return [model[0].weight.detach().to_sparse().to_dense()]


def view_as_gradient(model: nn.Sequential) -> list[Any]:
    model(batch(0)).square().mean().backward()
    weight = model[0].weight
    view = weight.grad.view(6, 4)
    weight.grad.mul_(2)
    weight.grad = view
    return [weight.grad.clone()]


def read_only_arrays(model: nn.Sequential) -> list[Any]:
    """Arrays of a parameter are read only in the block, except copies."""
    weight = model[0].weight.detach()
    copied = np.asarray(weight, dtype=np.float32)
    copied[0] = 1
    is_plain = not hasattr(weight, "shard")
    arrays = [weight.numpy(), np.asarray(weight)]
    return [torch.from_numpy(copied), [array.flags.writeable == is_plain for array in arrays]]


PROGRAMS: dict[str, Program] = {
    "rounded": rounded,
    "deleted gradients": deleted_gradients,
    "hooks of steps": hooks_of_steps,
    "failed step": failed_step,
    "sparse": sparse,
    "view as gradient": view_as_gradient,
    "read-only arrays": read_only_arrays,
    "kept views": kept_views,
    "kept data": kept_data,
    "clip 1-norm": lambda m: train(m, before_step=lambda: clip_grad_norm_(m.parameters(), 0.1, norm_type=1).item()),
    "clip values": lambda m: train(m, before_step=lambda: clip_grad_value_(m.parameters(), 0.01)),
    "statistics": log_statistics,
}


def kept_view(model: nn.Sequential) -> None:
    view = model[0].weight.view(-1)
    model[0].weight.mul_(2)
    view.add_(1)


WRITES: dict[str, Callable[[nn.Sequential], Any]] = {
    "row": lambda m: m[0].weight[0].fill_(0.5),
    "column": lambda m: m[0].weight[:, 1].zero_(),
    "transposed": lambda m: m[0].weight.t().mul_(2),
    "mask": lambda m: m[0].weight.__setitem__(m[0].weight.abs() < 0.2, 0.0),
    "plain tensor": lambda m: m[0].weight.mul_(torch.tril(torch.ones(6, 4))),
    "out=": lambda m: torch.mul(m[0].weight, 2, out=m[0].weight),
    "vector": lambda m: vector_to_parameters(torch.arange(51.0, dtype=torch.float64), m.parameters()),
    "saved": lambda m: m[0].weight.copy_(torch.arange(24.0).view(6, 4)),
    "saved row": lambda m: m[0].weight.copy_(torch.arange(4.0)),
    "list": lambda m: torch._foreach_copy_(list(m.parameters()), [torch.ones_like(p) * 3 for p in m.parameters()]),
    "list of full tensors": lambda m: torch._foreach_copy_(
        list(m.parameters()), [torch.ones(p.shape) / 3 for p in m.parameters()]
    ),
    "new list": lambda m: torch._foreach_copy_(
        list(m.parameters()), torch._foreach_addcdiv(list(m.parameters()), list(m.parameters()), list(m.parameters()))
    ),
    "data": lambda m: setattr(m[0].weight, "data", torch.where(m[0].weight > 0, m[0].weight, 0.0)),
    "kept view": kept_view,
    "foreach": lambda m: torch._foreach_mul_(list(m.parameters()), 0.5),
    "orthogonal": lambda m: nn.init.orthogonal_(m[0].weight),
    "reset": lambda m: m[0].reset_parameters(),
    "noise of its own": lambda m: m[0].weight.add_(torch.randn(6, 4)),
}


def written(write: Callable[[nn.Sequential], Any]) -> Program:
    def program(model: nn.Sequential) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(3 + rank())  # rank 0's numbers count
            write(model)

    return program


def inside(program: Program) -> Around:
    def around(model: nn.Sequential, block: Block) -> Any:
        with block(model):
            return program(model)

    return around


ALL: dict[str, Around] = {
    **{name: inside(each) for name, each in PROGRAMS.items()},
    **{f"write {name}": inside(written(each)) for name, each in WRITES.items()},
    **{f"forward, {name}, backward": inside(changed(each)) for name, each in CHANGES.items()},
    **{f"{name} with state": with_optimizer(each) for name, each in OPTIMIZERS.items()},
    "several": several,
}


@distributed(processes=2)
def differences() -> dict[str, Any]:
    """Return, for each program, what differs from one process in the block and after it."""
    found: dict[str, Any] = {}
    for name, around in ALL.items():
        expected_model, model = net(), net()
        expected = around(expected_model, lambda _: contextlib.nullcontext())
        results = around(model, lambda each: parallel_model(each, backend=FSDPBackend(blocks=[nn.Linear])))
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


class Collectives(TorchDispatchMode):
    """Counts the collectives of sharded tensors, and those that gather."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "wait" not in str(func) and "wrap" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def sent(write: Callable[[], Any]) -> list[str]:
    with torch.no_grad(), Collectives() as collectives:
        write()
    return collectives.names


@distributed(processes=2)
def messages() -> dict[str, Any]:
    """Return the collectives of some writes, and of forwards after a step of another model."""
    first, second = net(), net()
    unsharded = FSDPBackend(blocks=10**6, reshard_after_forward=False)
    with parallel_model(first, second, backend=unsharded):
        weight, full = first[0].weight, torch.ones(6, 4, dtype=torch.float64)
        found: dict[str, Any] = {
            "by element": sent(lambda: weight.mul_(2).add_(weight)),
            "full operand": sent(lambda: weight.mul_(full)),
            "product": sent(lambda: weight @ weight.T),
        }
        for model in (first, second):
            model(batch(0))
        found["nothing changed"] = sent(lambda: first(batch(1)))
        with torch.no_grad():
            second[0].weight.mul_(2)
        found["other model changed"] = sent(lambda: first(batch(1)))
        found["model changed"] = sent(lambda: second(batch(1)))
        with torch.no_grad():
            nn.functional.relu(second[0].weight, inplace=True)
        found["model changed by inplace=True"] = sent(lambda: second(batch(1)))
    return found


def test_what_is_sent() -> None:
    """A write to a shard makes its own model gather again, and no other; a full operand is only cut."""
    found = messages()
    gathers = {name: [each for each in names if "_allgather_base" in each] for name, names in found.items()}
    assert found["by element"] == []
    assert found["full operand"] == ["c10d.scatter_.default"]
    assert len(found["product"]) == 1
    assert gathers["nothing changed"] == gathers["other model changed"] == []
    assert len(gathers["model changed"]) == len(gathers["model changed by inplace=True"]) == 1


@distributed(processes=2)
def copies_of_few_rows() -> list[Any]:
    """Change a copy of a bias of which the last rank has no rows, and return what the parameter is used for then."""
    model = nn.Linear(4, 1)
    with parallel_model(model, backend=FSDPBackend(reshard_after_forward=False)):
        model(torch.ones(2, 4))
        view = model.bias.detach()[0]
        before = view.item()
        average = model.bias.detach().clone()
        average.lerp_(model.bias.detach() + 1, 0.5)
        return [before == view.item(), model(torch.ones(2, 4)).shape]


def test_a_copy_is_not_its_parameter() -> None:
    """Where a rank has no rows, too: it alone would gather again, and wait for the others."""
    assert copies_of_few_rows() == [True, (2, 1)]
