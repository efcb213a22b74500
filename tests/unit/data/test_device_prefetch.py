"""device_prefetch: which leaves of a batch are moved, and in which order prefetched batches arrive."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
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


class Graph(Custom):
    """As PyG's Data: `to` can copy asynchronously."""

    def to(self, device, *args, non_blocking=False):
        moved = Graph(device)
        moved.is_asynchronous = non_blocking
        return moved


class Encoding(UserDict):
    """As Hugging Face's BatchEncoding: a mapping whose `to` copies each tensor and waits for it."""

    def to(self, device):
        raise AssertionError("its tensors are moved one by one")


def test_containers_keep_their_types_and_their_other_leaves():
    """Tensors and objects with `to` are moved, in every container; the original batch is not changed."""
    batch = {
        "list": [torch.zeros(1), "text", 3, None],
        "pair": Pair(torch.zeros(1), OrderedDict(a=torch.zeros(1))),
        "example": Example(torch.zeros(1), "name"),
        "proxy": MappingProxyType({"x": torch.zeros(1)}),
        "packed": pack_sequence([torch.zeros(2), torch.zeros(1)]),
        "custom": Custom(),
        "encoding": Encoding(x=torch.zeros(1), text="text"),
    }
    moved = move_to_device(batch, META)
    assert isinstance(moved["encoding"], Encoding)
    assert moved["encoding"]["x"].device == META
    assert moved["encoding"]["text"] == "text"
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


@pytest.mark.parametrize("non_blocking", [False, True])
def test_objects_are_copied_asynchronously_if_their_memory_is_not_reused(non_blocking):
    """An object's `to` gets non_blocking= if it takes it."""
    graph, custom = move_to_device((Graph(), Custom()), META, non_blocking=non_blocking)
    assert graph.is_asynchronous == non_blocking
    assert graph.device == custom.device == META


class Copier:
    """Records which copies are started and waited for; batches in `shared` may be overwritten by the loader."""

    def __init__(self, shared=()):
        self.log = []
        self.shared = shared

    def start(self, batch):
        self.log.append(f"start {batch}")
        return SimpleNamespace(batch=batch, is_shared=batch in self.shared)

    def wait(self, copy):
        self.log.append(f"wait {copy.batch}")
        return copy.batch


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_copies_start_while_earlier_batches_are_in_use(prefetch):
    """No copy is ahead of the first batch, which does not wait for others; then one more at each, up to `prefetch`."""
    copier = Copier()
    for number, batch in enumerate(prefetch_batches(iter(range(6)), copier, prefetch=prefetch)):
        assert batch == number
        started = sum(line.startswith("start") for line in copier.log)
        assert started == min(number + min(number, prefetch) + 1, 6)
    assert [line for line in copier.log if line.startswith("wait")] == [f"wait {each}" for each in range(6)]


def test_nothing_is_fetched_ahead_of_a_shared_batch():
    """A batch that the loader may overwrite is used before the next one is fetched; others are prefetched again."""
    fetched = []
    loader = iter(lambda: fetched.append(len(fetched)) or fetched[-1], 8)
    batches = prefetch_batches(loader, Copier({3, 4}), prefetch=2)
    ahead = [len(fetched) - 1 - number for number in batches]
    assert ahead == [0, 1, 1, 0, 0, 2, 2, 1]


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
    assert sum(line.startswith("start") for line in copier.log) == sum("wait" in line for line in copier.log) == 3
