"""`parallel_model(model).start()`: a block without `with`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import ConfigError, distributed, parallel_model, rank


def batch() -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank()))


def steps(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


def train_started(model: nn.Module) -> nn.Module:
    model = parallel_model(model).start()
    steps(model)
    return model


def train_in_with(model: nn.Module) -> nn.Module:
    with parallel_model(model):
        steps(model)
    return model


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


@pytest.mark.parametrize("options", [{"processes": 2}, {"processes": 2, "backend": "fsdp"}, {"processes": 1}], ids=str)
def test_a_started_block_trains_like_a_with_block(options: dict[str, Any]) -> None:
    """The block ends before the value and the trained model go back to the caller."""
    outcomes = []
    for function in (train_started, train_in_with):
        model = net()
        returned = distributed(**options)(function)(model)
        outcomes.append([*model.parameters(), *returned.parameters()])
        assert "forward" not in vars(model)
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)
    assert not torch.equal(outcomes[0][0], next(net().parameters()))


@pytest.mark.slow
def test_the_users_error_ends_a_started_block() -> None:
    """The caller gets the function's exception, also in the process of the caller."""

    def fail(model: nn.Module) -> None:
        parallel_model(model).start()
        raise KeyError("mine")

    for processes in (1, 2):
        with pytest.raises(KeyError, match="mine"):
            distributed(processes=processes)(fail)(net())


def test_stop_ends_the_block() -> None:
    """Afterwards the model is plain, and stopping again does nothing."""

    def check() -> None:
        model = net()
        block = parallel_model(model)
        assert block.start() is model
        assert "forward" in vars(model)
        block.stop()
        block.stop()
        assert "forward" not in vars(model)

    distributed(processes=2)(check)()


@pytest.mark.slow
def test_a_plain_script_may_start_one(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """It ends with the process, without an error."""
    script = """
import torch
from parallelize import parallel_model
model = parallel_model(torch.nn.Linear(2, 1)).start()
model(torch.ones(1, 2)).sum().backward()
print("done")
"""
    done = run_script(script)
    assert (done.stdout.strip(), done.stderr) == ("done", "")


@pytest.mark.slow
def test_a_plain_script_may_start_two(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Both end with the process, the later one first."""
    script = """
import atexit
import torch
from parallelize import parallel_model
models = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
atexit.register(lambda: print(["forward" in vars(model) for model in models]))
for model in models:
    parallel_model(model).start()
print(["forward" in vars(model) for model in models])
"""
    done = run_script(script)
    assert (done.stdout.split("\n")[:2], done.stderr) == (["[True, True]", "[False, False]"], "")


@pytest.mark.parametrize(
    "use", [lambda it: it.train(), lambda it: it(torch.ones(1)), list, lambda it: it.weight], ids=range(4)
)
def test_a_block_that_is_used_as_the_model_is_named(use: Callable[[Any], object]) -> None:
    """The error says what to write."""
    with pytest.raises(ConfigError, match=r"(?s)it is a context manager.*\.start\(\)"):
        use(parallel_model(net()))


def test_a_block_ends_with_the_function_that_has_started_it() -> None:
    """Also if another decorated function calls that one; a block that is not the last one is not stopped."""

    @distributed()
    def inner(model: nn.Module) -> None:
        parallel_model(model).start()

    def outer() -> None:
        first, second = parallel_model(net()), net()
        first.start()
        for _ in range(2):
            inner(second)
            assert "forward" not in vars(second)
        later = parallel_model(second)
        later.start()
        with pytest.raises(ConfigError, match="stop the later one first"):
            first.stop()
        later.stop()
        first.stop()

    distributed(processes=2)(outer)()
