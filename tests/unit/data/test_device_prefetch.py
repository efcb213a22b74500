"""Batches on their way to a device: what is moved, and in which order what is ahead comes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from parallelize.data.device_prefetch import ahead, moved

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


def test_containers_keep_their_types_and_what_is_no_tensor():
    """Tensors and objects that can move do so, in every container; the batch that came is not changed."""
    batch = {
        "list": [torch.zeros(1), "text", 3, None],
        "pair": Pair(torch.zeros(1), OrderedDict(a=torch.zeros(1))),
        "example": Example(torch.zeros(1), "name"),
        "proxy": MappingProxyType({"x": torch.zeros(1)}),
        "packed": pack_sequence([torch.zeros(2), torch.zeros(1)]),
        "custom": Custom(),
    }
    there = moved(batch, META)
    assert there["list"][0].device == META
    assert there["list"][1:] == ["text", 3, None]
    assert isinstance(there["pair"], Pair)
    assert isinstance(there["pair"].y, OrderedDict)
    assert there["pair"].y["a"].device == META
    assert isinstance(there["example"], Example)
    assert there["example"].name == "name"
    assert there["example"].x.device == META
    assert isinstance(there["proxy"], MappingProxyType)
    assert there["proxy"]["x"].device == META
    assert isinstance(there["packed"], PackedSequence)
    assert there["packed"].data.device == META
    assert there["custom"].device == META
    assert batch["list"][0].device.type == batch["example"].x.device.type == "cpu"


class Copier:
    """Records what is sent and received."""

    def __init__(self):
        self.log = []

    def send(self, batch):
        self.log.append(f"send {batch}")
        return batch

    def receive(self, batch):
        self.log.append(f"receive {batch}")
        return batch


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_batches_are_sent_while_earlier_ones_are_in_use(prefetch):
    """At any time at most `prefetch` are ahead of the one in use; after the first, always so many as there are."""
    copier = Copier()
    for number, batch in enumerate(ahead(iter(range(6)), copier, prefetch=prefetch)):
        assert batch == number
        sent = sum(line.startswith("send") for line in copier.log)
        assert sent == min(number + (prefetch if number else 1) + 1, 6)
    assert [line for line in copier.log if line.startswith("receive")] == [f"receive {each}" for each in range(6)]


def test_an_error_comes_in_its_turn():
    """What was fetched before it is given first."""

    def failing():
        yield 0
        yield 1
        raise OSError("gone")

    batches = ahead(failing(), Copier(), prefetch=2)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        next(batches)


def test_what_is_not_used_is_waited_for():
    """A loop that breaks leaves no copy under way."""
    copier = Copier()
    batches = ahead(iter(range(6)), copier, prefetch=2)
    next(batches)
    next(batches)
    batches.close()
    assert sum(line.startswith("send") for line in copier.log) == sum("receive" in line for line in copier.log) == 4
