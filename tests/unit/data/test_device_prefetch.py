"""device_prefetch: which leaves of a batch are moved, and in which order prefetched batches arrive."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from parallelize.data.device_prefetch import move_to_device, prefetch_batches

META = torch.device("meta")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Example:
    x: Any
    name: str


class Custom:
    def __init__(self, device="cpu"):
        self.device = device

    def to(self, device):
        return Custom(device)


def test_containers_keep_their_types_and_their_other_leaves():
    """Tensors and objects with `to` are moved, in every container; the original batch is not changed."""
    batch = {
        "list": [torch.zeros(1), "text", 3, None],
        "pair": Pair(torch.zeros(1), OrderedDict(a=torch.zeros(1))),
        "example": Example(torch.zeros(1), "name"),
        "proxy": MappingProxyType({"x": torch.zeros(1)}),
        "packed": pack_sequence([torch.zeros(2), torch.zeros(1)]),
        "custom": Custom(),
    }
    moved = move_to_device(batch, META)
    assert moved["list"][0].device == META
    assert moved["list"][1:] == ["text", 3, None]
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["pair"].y, OrderedDict)
    assert moved["pair"].y["a"].device == META
    assert isinstance(moved["example"], Example)
    assert moved["example"].name == "name"
    assert moved["example"].x.device == META
    assert isinstance(moved["proxy"], MappingProxyType)
    assert moved["proxy"]["x"].device == META
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].data.device == META
    assert moved["custom"].device == META
    assert batch["list"][0].device.type == batch["example"].x.device.type == "cpu"


class Copier:
    """Records which copies are started and waited for."""

    def __init__(self):
        self.log = []

    def start(self, batch):
        self.log.append(f"start {batch}")
        return batch

    def wait(self, batch):
        self.log.append(f"wait {batch}")
        return batch


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_copies_start_while_earlier_batches_are_in_use(prefetch):
    """One copy is ahead of the first batch, and `prefetch` copies of every later one, as far as batches exist."""
    copier = Copier()
    for number, batch in enumerate(prefetch_batches(iter(range(6)), copier, prefetch=prefetch)):
        assert batch == number
        started = sum(line.startswith("start") for line in copier.log)
        assert started == min(number + (prefetch if number else 1) + 1, 6)
    assert [line for line in copier.log if line.startswith("wait")] == [f"wait {each}" for each in range(6)]


def test_an_error_is_raised_after_earlier_batches():
    """Batches that were fetched before the error are yielded first."""

    def failing():
        yield 0
        yield 1
        raise OSError("gone")

    batches = prefetch_batches(failing(), Copier(), prefetch=2)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        next(batches)


def test_unused_copies_are_waited_for():
    """A loop that breaks leaves no copy running."""
    copier = Copier()
    batches = prefetch_batches(iter(range(6)), copier, prefetch=2)
    next(batches)
    next(batches)
    batches.close()
    assert sum(line.startswith("start") for line in copier.log) == sum("wait" in line for line in copier.log) == 4
