"""Plans: profiling, printing, and models that are not worth splitting."""

from __future__ import annotations

import copy
import logging
import time
import weakref
from typing import Any, ClassVar

import pytest
import torch
from balanced.models import assert_equal_gradients, loss_of, rows, seeded
from torch import nn

from parallelize import parallel_model
from parallelize.backends.balanced.plan import plan
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.errors import ConfigError

pytestmark = pytest.mark.slow


class Slow(nn.Module):
    """Takes time in proportion to the samples."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x))
        return self.layer(x)


@pytest.mark.parametrize("model", [nn.MultiheadAttention(4, 2, batch_first=True), nn.Bilinear(4, 4, 3)])
def test_submodules_that_are_not_called(model: nn.Module) -> None:
    """Attention computes with the parameters of its projection: there is nowhere to split it, as the plan says."""
    x = torch.randn(8, 4, 4)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        loss_of(model(*(x,) * (3 if isinstance(model, nn.MultiheadAttention) else 2))).backward()
        assert not plan(model).is_split
        assert "forward calls no submodules" in str(plan(model))


def test_the_slowest_submodule_gets_its_own_device() -> None:
    """Stages are chosen by measured time, not by parameters: three fast layers balance one slow layer."""
    model = nn.Sequential(*(Slow(seconds) for seconds in (0.02, 0.02, 0.02, 0.06)))
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        loss_of(model(torch.randn(4, 4))).backward()
    found = plan(model)
    assert found.bounds == (0, 3, 4)
    assert found.units == ("0", "1", "2", "3")


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cpu",)], ids="+".join)
def test_no_speedup_leaves_the_model_unsplit(devices: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A tiny model is not split: a warning gives the reason, and forward is the plain one."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with caplog.at_level(logging.WARNING), parallel_model(model, backend=BalancedBackend(devices=devices)):
        output = model(*rows(8)[0])
        loss_of(output).backward()
        assert type(output.grad_fn).__name__ == "AddmmBackward0"
    assert not plan(model).is_split
    assert f"no gain: {plan(model).why.removeprefix('no gain: ')}" in caplog.text
    assert "ms on one device" in plan(model).why
    assert "ms if split" in plan(model).why
    assert "backend='ddp'" in str(plan(model))


@pytest.mark.parametrize(("samples", "microbatches", "memory"), [(32, 8, 9600), (3, 3, 4000)])
def test_a_stage_has_four_micro_batches(samples: int, microbatches: int, memory: int) -> None:
    """Without `microbatches=`, there are four for each device; and at most as many as samples."""
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(samples, 8)
    alone = copy.deepcopy(model)
    # One device is too small for the model.
    backend = BalancedBackend(devices=("cpu", "cpu"), memory=memory)
    with parallel_model(model, backend=backend):
        loss_of(model(x)).backward()
    assert (plan(model).is_split, plan(model).microbatches) == (True, microbatches)
    assert plan(model).unsplit_s is None
    loss_of(alone(x)).backward()
    assert_equal_gradients(model, alone)


@pytest.mark.parametrize(("trains", "samples", "microbatches"), [(True, 8, 4), (False, 8, 8), (True, 3, 1)])
def test_batch_norm_trains_on_two_samples(trains: bool, samples: int, microbatches: int) -> None:
    """In evaluation it does not need them, and a batch that is one micro-batch is not split."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).train(trains)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=8)):
        loss_of(model(torch.randn(samples, 8))).backward()
    assert (plan(model).microbatches, plan(model).is_split) == (microbatches, microbatches > 1)
    assert "in a trial" not in plan(model).why


class Constant(nn.Module):
    """Reads a number of samples from its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.view(32, 8))


def test_an_error_of_a_trial_is_the_trials() -> None:
    """The reason why a batch runs whole tells that a part of it has failed, and which."""
    model = Constant()
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=8)):
        model(torch.randn(32, 8))
    assert "runs whole: in a trial with 4 of 32 samples: shape '[32, 8]'" in plan(model).why


class Selecting(nn.Module):
    """Overrides `parameters` for its optimizer, as a list, and with an argument of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def parameters(self, name: str) -> list[nn.Parameter]:  # type: ignore[override]  # as users do
        return [*getattr(self, name).parameters()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def test_a_model_that_overrides_parameters() -> None:
    """All of its parameters are planned and trained."""
    model, x = seeded(Selecting), torch.randn(8, 8)
    alone = copy.deepcopy(model)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=2)):
        loss_of(model(x)).backward()
    assert (plan(model).units, plan(model).bounds) == (("first", "last"), (0, 1, 2))
    loss_of(alone(x)).backward()
    assert_equal_gradients(model, alone)


def test_planning_leaves_no_trace() -> None:
    """Planning restores buffers, RNG state and modes, and leaves no gradients."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model[1].eval()
    x = torch.randn(8, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=2)), torch.no_grad():
        torch.manual_seed(0)
        before = torch.get_rng_state()
        model(x)  # is planned and validated
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        model(x)
        assert torch.equal(torch.get_rng_state(), after)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert [module.training for module in model] == [True, False, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())


class Scarce(nn.Module):
    """Runs out of memory with more than `most` samples, as an accelerator does, or if its tensors are still there."""

    kept: ClassVar[list[Any]] = []

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            y = self.layers(x)
            Scarce.kept.append(weakref.ref(y))
            raise torch.OutOfMemoryError(f"{len(y)} samples")
        if any(each() is not None for each in Scarce.kept):
            raise torch.OutOfMemoryError("what has run out of memory is not freed")
        return self.layers(x)


@pytest.mark.parametrize("most", [2, 16])
def test_running_out_of_memory_is_a_measurement(most: int) -> None:
    """A batch that fits in micro-batches only is planned, compared on as many samples as fit, and trains."""
    model, x = seeded(lambda: Scarce(most)), torch.randn(32, 8)
    alone = copy.deepcopy(model.layers)
    loss_of(alone(x)).backward()
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=32 // most)):
        loss_of(model(x)).backward()
    assert (plan(model).is_split, plan(model).samples) == (True, 32)
    assert_equal_gradients(model.layers, alone)


def test_a_model_of_which_no_sample_fits() -> None:
    """An error tells the number of samples."""
    model = Scarce(0)
    with (
        parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)),
        pytest.raises(ConfigError, match="a forward of 1 samples does not fit"),
    ):
        model(torch.randn(32, 8))
