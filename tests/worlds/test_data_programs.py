"""Common loops over data: processes together read each sample as often as one process does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import keep_sigchld_handler
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    StackDataset,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from parallelize import ConfigError, barrier, distributed, rank, shard_loader, world_size

pytestmark = pytest.mark.slow

N = 23
DATA = TensorDataset(torch.arange(N))
EVEN = TensorDataset(torch.arange(48))  # divides by 4 samples for each of 1 to 4 processes


@pytest.fixture(scope="module", autouse=True)
def workers_may_start() -> None:
    keep_sigchld_handler()


def flat(batches: Any) -> list[int]:
    tensors = [batch[0] if isinstance(batch, (list, tuple)) else batch for batch in batches]
    return [value for each in tensors for value in each.reshape(-1).tolist()]


class ByWorker(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return iter(range(N)) if info is None else iter(range(info.id, N, info.num_workers))


class ByProcess(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(rank(), N, world_size()))


class WithEpoch(Dataset[Any]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index + 100 * self.epoch])


def once(loader: Any, **options: Any) -> list[int]:
    return flat(shard_loader(loader, tail="exact", **options))


def two_epochs_of_kept_workers() -> list[int]:
    loader = DataLoader(DATA, 4, shuffle=True, num_workers=2, persistent_workers=True)
    with shard_loader(loader, tail="exact") as sharded:
        return [*flat(sharded), *flat(sharded)]


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


def epochs_told_to_the_dataset() -> list[int]:
    sharded = shard_loader(DataLoader(WithEpoch(), 4), tail="exact")
    return [value for _ in range(3) for value in flat(sharded)]


def own_distributed_sampler() -> list[int]:
    sampler = DistributedSampler(DATA, world_size(), rank(), drop_last=True)
    loader, found = DataLoader(DATA, 4, sampler=sampler), []
    for epoch in (3, 4):
        sampler.set_epoch(epoch)
        found += flat(shard_loader(loader))
    expected = [index for epoch in (3, 4) for index in own_order(epoch)]
    assert found == expected
    return []


def own_order(epoch: int) -> list[int]:
    sampler = DistributedSampler(DATA, world_size(), rank(), drop_last=True)
    sampler.set_epoch(epoch)
    return list(sampler)


def evaluation_inside_of_training() -> list[int]:
    training, evaluation, found = shard_loader(DataLoader(DATA, 4)), shard_loader(DataLoader(DATA, 4)), []
    for step, _ in enumerate(training):
        with torch.no_grad():
            found += flat(evaluation) if step == 0 else []
    return found


PROGRAMS: dict[str, Callable[[], list[int]]] = {
    "stacked": lambda: flat(
        batch["a"] for batch in shard_loader(DataLoader(StackDataset(a=range(N), b=range(N)), 4), tail="exact")
    ),
    "collate_fn": lambda: once(DataLoader(range(N), 4, collate_fn=lambda samples: torch.tensor(samples) * 10)),
    "by worker": lambda: once(DataLoader(ByWorker(), 4, num_workers=2)),
    "by process": lambda: once(DataLoader(ByProcess(), 4), divides="processes"),
    "data pipe": lambda: once(DataLoader(IterableWrapper(range(N)).shuffle().sharding_filter(), 4)),
    "list of dicts": lambda: flat(
        each["x"] for each in shard_loader([{"x": torch.tensor([i])} for i in range(N)], tail="exact")
    ),
    "stream of batches": lambda: once(torch.tensor([each]) for each in range(N)),
    "global batch": lambda: once(DataLoader(DATA, 6, shuffle=True), batch="global"),
    "drop": lambda: flat(shard_loader(DataLoader(EVEN, 4, drop_last=True), tail="drop")),
    "inference mode": lambda: without_gradients(torch.inference_mode),
    **{
        each.__name__: each
        for each in (
            two_epochs_of_kept_workers,
            without_gradients,
            means_and_rows,
            begun_again_at_its_end,
            two_loaders_at_once,
            epochs_told_to_the_dataset,
            own_distributed_sampler,
            evaluation_inside_of_training,
        )
    },
}


@distributed(seed=0)
def read() -> dict[str, list[int]]:
    found = {}
    for name, program in PROGRAMS.items():
        found[name] = program()
        barrier(name)
    return found


@pytest.fixture(scope="module")
def read_alone() -> dict[str, list[int]]:
    return read.options(processes=1)()


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_processes_read_what_one_does(processes: int, read_alone: dict[str, list[int]]) -> None:
    """Each sample as often, whatever makes the batches and however the loop is written."""
    together = read.options(processes=processes).all_ranks()
    for name in PROGRAMS:
        assert sum((Counter(each[name]) for each in together), Counter()) == Counter(read_alone[name]), name


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
