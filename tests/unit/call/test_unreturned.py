"""Names of what a call changes and the caller does not get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from parallelize.call.module_sync import signature
from parallelize.call.unreturned import UnreturnedChanges, describe

counter = 0


def count() -> None:
    global counter  # noqa: PLW0603 - the change that is looked for
    counter += 1


class Cached(Dataset[int]):
    def __init__(self) -> None:
        self.cache: dict[int, int] = {}


class Counting(torch.optim.SGD):
    count = 0


class Trainer:
    steps = 0

    def __init__(self) -> None:
        self.history: list[float] = [0.5]
        self.best = {"loss": float("nan"), "nested": [1]}
        self.epoch, self.rate, self.nan = 300, 0.5, float("nan")
        self.device = torch.device("cpu")
        self.generator = torch.Generator()
        self.tensor = torch.zeros(2)
        self.model = nn.Linear(1, 1)
        self.optimizer = Counting(self.model.parameters(), lr=1.0)
        self.data = Cached()
        self._private = [0]


def add_attribute(trainer: Trainer) -> None:
    vars(trainer).update(new=1)


def count_on_the_class(trainer: Trainer) -> None:
    type(trainer).steps += 1


def mask(value: Any) -> None:
    with torch.no_grad():
        value.mul_(2)


CHANGES: dict[str, tuple[Callable[[Trainer], object], list[str]]] = {
    "append": (lambda it: it.history.append(0.1), ["it.history"]),
    "item": (lambda it: it.history.__setitem__(0, 0.1), ["it.history"]),
    "key": (lambda it: it.best.update(loss=0.1), ["it.best"]),
    "nested": (lambda it: it.best["nested"].append(1), ["it.best['nested']"]),
    "number": (lambda it: setattr(it, "epoch", it.epoch + 1), ["it.epoch"]),
    "new attribute": (add_attribute, ["it.new"]),
    "class attribute": (count_on_the_class, ["Trainer.steps"]),
    "global": (lambda _: count(), ["counter"]),
    "tensor in place": (lambda it: it.tensor.add_(1), ["it.tensor"]),
    "new model": (lambda it: setattr(it, "model", nn.Linear(1, 1)), ["it.model"]),
    "optimizer's own": (lambda it: setattr(it.optimizer, "count", 1), ["it.optimizer.count"]),
    "generator": (lambda it: torch.rand(1, generator=it.generator), ["it.generator"]),
    "tensor by data": (lambda it: it.tensor.data.add_(1), ["it.tensor"]),
    "equal number": (lambda it: setattr(it, "rate", float("0.5")), []),
    "equal nan": (lambda it: setattr(it, "nan", float("nan")), []),
    "equal device": (lambda it: setattr(it, "device", torch.device("cpu")), []),
    "private": (lambda it: it._private.append(1), []),
    "dataset": (lambda it: it.data.cache.update({1: 1}), []),
    "weights come back": (lambda it: mask(it.model.weight), []),
    "mode comes back": (lambda it: it.model.eval(), []),
    "optimizer comes back": (lambda it: it.optimizer.param_groups[0].update(lr=2.0), []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_named(name: str) -> None:
    """By the way from an argument, a class or the function's globals; not what comes back, nor what nobody reads."""
    change, names = CHANGES[name]
    it = Trainer()
    changes = UnreturnedChanges({"it": it, "count": count}, returned=[it.model, it.optimizer])
    assert changes.names() == []
    change(it)
    assert changes.names() == names


imported = {"net": nn.Linear(1, 1)}


class Shared:
    net = nn.Linear(1, 1)


def test_models_that_the_workers_imported_are_named() -> None:
    """A model that the function made is the function's own."""
    changes = UnreturnedChanges({}, returned=[])
    made = nn.Linear(1, 1)
    assert changes.unreturned_models([imported["net"], made]) == ([f"{__name__}.imported['net']"], [signature(made)])
    assert changes.unreturned_models([Shared.net]) == ([f"{__name__}.Shared.net"], [])
    assert UnreturnedChanges({}, returned=[imported["net"]]).unreturned_models([imported["net"]]) == ([], [])


def test_the_warning_names_five() -> None:
    """One warning for all."""
    assert describe([]) == []
    [text] = describe([f"x{index}" for index in range(7)])
    assert text.startswith("x0, x1, x2, x3, x4 and 2 more changed in the workers and do not come back: ")
