"""What a function can reach: its walk enters the user's own code and objects, not those of installed packages."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallelize.call.reachable import holds_state, is_user_code, walk
from parallelize.call.unreturned import UnreturnedChanges

GLOBAL = nn.Linear(1, 1)
OTHER = nn.Linear(1, 1)


def helper() -> object:
    return GLOBAL


@dataclasses.dataclass(slots=True)
class Slotted:
    net: nn.Module


class Trainer:
    shared = nn.Linear(1, 1)

    def __init__(self) -> None:
        self.parts = [{"net": nn.Linear(1, 1)}, Slotted(nn.Linear(1, 1))]
        self.partial = functools.partial(print, nn.Linear(1, 1))
        self.log = logging.getLogger("a logger holds all others")

    def fit(self) -> object:
        return self.step()

    def step(self) -> object:
        return helper()

    def evaluate(self) -> object:
        return OTHER


def reached(**roots: object) -> dict[str, object]:
    return {name: item for name, item in walk(roots) if isinstance(item, nn.Module)}


def test_arguments_attributes_containers_and_classes() -> None:
    """Each is named by its way from the root."""
    found = reached(trainer=Trainer())
    assert {"trainer.parts[0]['net']", "trainer.parts[1].net", "trainer.partial.args[0]", "Trainer.shared"} <= {*found}


def test_methods_are_entered_if_a_function_mentions_them() -> None:
    """A class may have methods that the call does not use, with globals that the workers do not need."""
    found = reached(trainer=Trainer(), fit=Trainer.fit)
    assert found["GLOBAL"] is GLOBAL
    assert "OTHER" not in found
    assert "GLOBAL" not in reached(trainer=Trainer())


def test_closures() -> None:
    """Also a function that a container holds."""
    net = nn.Linear(1, 1)

    def inner() -> object:
        return net

    assert reached(inner=[inner])["net"] is net


def test_each_object_is_yielded_once_and_cycles_end() -> None:
    """The first name that leads to it counts."""
    box: list[Any] = [GLOBAL]
    box.append(box)
    assert [name for name, _ in walk({"box": box, "again": GLOBAL}, follows_code=False)] == ["box", "again"]


def test_installed_packages_are_not_entered() -> None:
    """Loggers and modules of torch lead everywhere."""
    assert not is_user_code(logging.__name__)
    assert not is_user_code(torch.__name__)
    assert not is_user_code("parallelize.model")
    assert is_user_code(__name__)
    names = [name for name, _ in walk({"log": logging.getLogger("a"), "log_function": logging.info})]
    assert names == ["log"]


class Unbound:
    """As a proxy of a request outside of a request: every attribute raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("working outside of a request")


class BadDict(dict[Any, Any]):
    def __len__(self) -> int:
        raise RuntimeError("no length")


class BadText:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("make", [Unbound, BadDict, lambda: {BadText(): 1}, lambda: [Unbound()]])
def test_objects_that_raise_when_they_are_read(make: Callable[[], object]) -> None:
    """They are passed over: what is beside them is found."""
    value = make()
    assert id(GLOBAL) in [id(item) for _, item in walk({"box": [value, GLOBAL]})]
    UnreturnedChanges({"box": [value]}, returned=[]).names()


def test_a_search_through_much_data_ends() -> None:
    """It is breadth first, so that models are found before the data."""
    data = [[[number] for number in range(900)] for _ in range(100)]
    found = [item for _, item in walk({"data": data, "box": {"model": GLOBAL}})]
    assert GLOBAL in found
    assert len(found) <= 10_000


@pytest.mark.parametrize(
    ("value", "does"),
    [
        (GLOBAL, True),
        ({"a": [torch.optim.SGD(GLOBAL.parameters(), lr=1.0)]}, True),
        ([*GLOBAL.parameters()], True),
        (GLOBAL.forward, True),
        (functools.partial(print, GLOBAL), True),
        (helper, False),
        (Trainer, False),
        (torch.zeros(2), False),
        (["text", 1, None], False),
    ],
)
def test_what_holds_state(value: object, does: bool) -> None:
    """Modules, optimizers and trainable tensors, wherever they are held; functions and classes are code."""
    assert holds_state(value) is does


class Vague:
    """Raises an error of its own whenever its class is asked for."""

    @property
    def __class__(self) -> type:  # type: ignore[override]  # as a broken proxy
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, value: type) -> None: ...


def test_an_object_that_does_not_tell_its_class_holds_no_state() -> None:
    """A proxy, for example, whose object is gone."""
    assert not holds_state([Vague()])
