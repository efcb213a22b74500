"""A recorded function runs for some optimizer steps, and leaves no hook behind."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize import parallel_model, shard_loader
from parallelize.comparison.recording import RecordedFunction, Recording

reached: list[int] = []


def train(model: nn.Module, steps: int) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with parallel_model(model):
        for number, x in enumerate(shard_loader([torch.ones(2, 3, requires_grad=True)] * steps)):
            reached.append(number)
            try:
                optimizer.zero_grad()
                # A reentrant checkpoint runs a backward inside of backward, whose loss does not count again.
                checkpoint(lambda x: model(x).abs().sum(), x, use_reentrant=True).backward()
                torch.autograd.backward([model(x).abs().sum()])
                optimizer.step()
            except Exception:  # noqa: BLE001 - user code that catches all exceptions does not keep the function running
                reached.append(-1)
    return "done"


def record(model: nn.Module, steps: int, *, of: int) -> Recording:
    reached.clear()
    return RecordedFunction(train, steps=steps, merged_ranks=1)(model, of)


class Constant(nn.Module):
    """Returns its weight times 2, with noise in training mode."""

    def __init__(self, shape: tuple[int, ...], **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape, **options))
        self.norm, self.noise = nn.BatchNorm2d(1), 0.0

    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        return self.weight * 2 + (torch.rand(()) * self.noise if self.noise else 0)


def test_the_steps_are_recorded_and_end_the_function() -> None:
    """Losses are summed per step, weights are those after it, and the function does not go on after the last one."""
    before = torch.autograd.backward
    recording = record(Constant((2,)), 2, of=9)
    assert reached == [0, 1]
    assert torch.autograd.backward is before
    assert [step.loss for step in recording.steps] == [8.0, 8.0]
    assert [step.weights[0].tolist() for step in recording.steps] == [[-1.0, -1.0], [1.0, 1.0]]
    first = recording.steps[0]
    assert first.names == ("weight", "norm.weight", "norm.bias")
    assert [None if each is None else each.tolist() for each in first.gradients] == [[4.0, 4.0], None, None]
    assert first.learning_rates == (0.5,)
    assert first.batch_norm == "norm (BatchNorm2d)"
    assert first.is_in_block
    assert not first.draws_random_numbers
    assert [each.tolist() for each in recording.initial] == [[1.0, 1.0], [1.0], [0.0]]
    assert len(recording.fingerprints) == 2


def test_a_function_may_end_earlier() -> None:
    """All steps that were made are recorded; random numbers and evaluation mode of batch norm are facts of a step."""
    model = Constant((2,))
    model.noise = 0.1
    model.norm.eval()
    recording = record(model, 5, of=1)
    assert len(recording.steps) == 1
    assert recording.steps[0].draws_random_numbers
    assert recording.steps[0].batch_norm == ""


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 40_000), (torch.complex64, 50_000)])
def test_large_parameters_are_sampled(dtype: torch.dtype, count: int) -> None:
    """Evenly spaced elements are kept, at most 65,536 of each parameter; complex ones count twice."""
    recording = record(Constant((2, 40_000) if dtype == torch.float32 else (50_000,), dtype=dtype), 1, of=1)
    assert recording.steps[0].weights[0].numel() == count
    assert recording.initial[0].numel() == count


def test_it_is_pickled_by_the_name_of_the_function() -> None:
    """Workers import the function, as they do without recording."""
    copy = pickle.loads(pickle.dumps(RecordedFunction(train, steps=2, merged_ranks=3)))
    assert copy._function is train
    assert (copy._steps, copy._merged_ranks, copy.__name__) == (2, 3, "train")
