"""Common loops over data: processes together read each sample as often as one process does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

from parallelize import ConfigError, barrier, distributed, rank, shard_loader, world_size

pytestmark = pytest.mark.slow

N = 23
DATA = TensorDataset(torch.arange(N))
EVEN = TensorDataset(torch.arange(48))  # divides by 4 samples for each of 1 to 4 processes


def flat(batches: Any) -> list[int]:
    tensors = [batch[0] if isinstance(batch, (list, tuple)) else batch for batch in batches]
    return [value for each in tensors for value in each.reshape(-1).tolist()]


def without_gradients(mode: Any = torch.no_grad) -> list[int]:
    sharded = shard_loader(DataLoader(DATA, 4, shuffle=True))
    with mode():
        batches = list(sharded)
        assert len(sharded) == len(batches)
    return flat(batches)


def means_and_rows() -> list[int]:
    sharded = shard_loader(DataLoader(DATA, 4, shuffle=True))
    with torch.no_grad():
        batches = [x for (x,) in sharded]
    assert sharded.mean([x.double().mean() for x in batches]) == pytest.approx(11)
    assert sharded.mean(torch.cat(batches).double().mean()) == pytest.approx(11)
    rows = sharded.gather(torch.cat(batches)).tolist()
    assert rows == list(range(N))
    return rows if rank() == 0 else []


def begun_again_at_its_end() -> list[int]:
    sharded, found = shard_loader(DataLoader(EVEN, 4, shuffle=True)), []
    batches = iter(sharded)
    for _ in range(24 // world_size()):
        try:
            found.append(next(batches))
        except StopIteration:
            batches = iter(sharded)
            found.append(next(batches))
    return flat(found)


def two_loaders_at_once() -> list[int]:
    first = shard_loader(DataLoader(EVEN, 4, shuffle=True))
    second = shard_loader(DataLoader(TensorDataset(torch.arange(100, 148)), 4))
    return [value for (x,), (y,) in zip(first, second, strict=True) for value in [*x.tolist(), *y.tolist()]]


def evaluation_inside_of_training() -> list[int]:
    training, evaluation, found = shard_loader(DataLoader(DATA, 4)), shard_loader(DataLoader(DATA, 4)), []
    for step, _ in enumerate(training):
        with torch.no_grad():
            found += flat(evaluation) if step == 0 else []
    return found


def without_gradients_or_inference() -> list[int]:
    return without_gradients(torch.inference_mode)


PROGRAMS = (
    without_gradients,
    without_gradients_or_inference,
    means_and_rows,
    begun_again_at_its_end,
    two_loaders_at_once,
    evaluation_inside_of_training,
)


@distributed(seed=0)
def read() -> dict[str, list[int]]:
    found = {}
    for program in PROGRAMS:
        found[program.__name__] = program()
        barrier(program.__name__)
    return found


@pytest.fixture(scope="module")
def read_alone() -> dict[str, list[int]]:
    return read.options(processes=1)()


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_processes_read_what_one_does(processes: int, read_alone: dict[str, list[int]]) -> None:
    """Each sample as often, however the loop is written; tests/every_sample.py has kinds of loaders."""
    together = read.options(processes=processes).all_ranks()
    for name, expected in read_alone.items():
        assert sum((Counter(each[name]) for each in together), Counter()) == Counter(expected), name


@distributed(processes=2)
def one_epoch(loader: Any) -> list[int]:
    return [*flat(shard_loader(loader)), *flat(shard_loader(DataLoader(DATA, 4, shuffle=True)))]


def test_calls_of_one_epoch_read_another_order_each() -> None:
    """Also of a loader that the call makes anew, and not under a seed, which makes calls repeatable."""
    loader = DataLoader(DATA, 4, shuffle=True)
    assert len({tuple(one_epoch(loader)) for _ in range(3)}) == 3
    seeded = one_epoch.options(seed=0)
    assert len({tuple(seeded(loader)) for _ in range(2)}) == 1


@distributed(processes=2)
def incomplete() -> None:
    list(shard_loader(DataLoader(DATA, 16, drop_last=True)))


def test_an_epoch_without_a_batch_is_refused() -> None:
    """One process would make a step."""
    with pytest.raises(ConfigError, match="no process gets a batch: 23 samples, 32 in a step of all") as caught:
        incomplete()
    assert "batch size of at most 11" in caught.value.faults[0].fix
