"""One process reads the batches of all ranks: a merged batch holds what the ranks read in a step, in rank order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import as_rank
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from parallelize import ConfigError, shard_loader
from parallelize.data.select_source import MergedRanks

DATA = list(torch.arange(22.0))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(DATA)


def batches() -> list[torch.Tensor]:
    return list(torch.arange(24.0).split(3))


LOADERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "pad": (lambda: DataLoader(DATA, batch_size=4, shuffle=True), {}),
    "drop": (lambda: DataLoader(DATA, batch_size=4, drop_last=True), {"tail": "drop"}),
    "global": (lambda: DataLoader(DATA, batch_size=4), {"batch": "global"}),
    "limit": (lambda: DataLoader(DATA, batch_size=2), {"limit": 3}),
    "batch sampler": (lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, False)), {}),
    "iterable dataset": (lambda: DataLoader(Stream(), batch_size=3), {}),
    "list of batches": (batches, {}),
    "generator of batches": (lambda: (batch for batch in batches()), {}),
}


def merged(loader: Any, log: list[Any], **options: Any) -> list[Any]:
    with MergedRanks(range(2), 2, log.append).active():
        return [list(shard_loader(loader, **options)) for _ in range(1 if isinstance(loader, Iterator) else 2)]


def of_rank(rank: int, loader: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    log: list[Any] = []
    with as_rank(rank, 2), MergedRanks([rank], 2, log.append).active():
        epochs = [list(shard_loader(loader, **options)) for _ in range(1 if isinstance(loader, Iterator) else 2)]
    return epochs, log


@pytest.mark.parametrize("kind", LOADERS)
def test_a_merged_batch_holds_the_batches_of_all_ranks(kind: str) -> None:
    """In every epoch, one process reads in step k what the two ranks read in step k, and the hashes agree."""
    make, options = LOADERS[kind]
    log: list[Any] = []
    epochs = merged(make(), log, **options)
    (first, first_log), (second, second_log) = (of_rank(rank, make(), **options) for rank in range(2))
    assert len(epochs[0]) > 1
    for batches, *shards in zip(epochs, first, second, strict=True):
        assert len(batches) == len(shards[0])
        for batch, *parts in zip(batches, *shards, strict=True):
            assert batch.tolist() == torch.cat(parts).tolist()
    assert log == [(*a, *b) for a, b in zip(first_log, second_log, strict=True)]
    assert len(set(log)) > 1


def test_batches_of_a_rank_are_those_without_merging() -> None:
    """A run with several processes reads the same batches whether they are recorded or not."""
    with as_rank(1, 2):
        expected = [batch.tolist() for batch in shard_loader(DataLoader(DATA, batch_size=4, shuffle=True))]
    assert [batch.tolist() for batch in of_rank(1, DataLoader(DATA, batch_size=4, shuffle=True))[0][0]] == expected


def test_each_sample_of_weighted_batches_is_read_once() -> None:
    """A batch of weight 0, which keeps a rank in step, is not part of the merged batch."""
    (epoch, _) = merged(DataLoader(DATA[:9], batch_size=4), [], tail="weighted")
    assert [sorted(batch.tolist()) for batch in epoch] == [list(range(8)), [8]]


def test_the_collate_function_sees_the_merged_batch() -> None:
    """Padding is that of the batch of one process, which concatenated batches of unequal lengths could not have."""
    texts = [torch.ones(length) for length in (1, 2, 3, 4)]
    loader = DataLoader(texts, batch_size=2, collate_fn=lambda samples: pad_sequence(samples, batch_first=True))
    assert [tuple(batch.shape) for batch in merged(loader, [])[0]] == [(4, 4)]


def test_loaders_for_evaluation_are_not_merged() -> None:
    """With tail="exact" one process reads its data in order, and can gather results."""
    with MergedRanks(range(2), 2, [].append).active():
        loader = shard_loader(DataLoader(DATA, batch_size=4), tail="exact")
        assert loader.gather(torch.cat(list(loader))).tolist() == list(range(22))


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), {}, "is sharded outside of shard_loader"),
        (DataLoader(Stream()), {"divides": "processes"}, "is sharded outside of shard_loader"),
        ([torch.ones(2, 3), torch.ones(2, 4)], {}, "batches that contain a Tensor"),
        ([{"x": torch.ones(2), "id": "a"}, {"x": torch.ones(2), "id": "b"}], {}, "batches that contain a str"),
    ],
    ids=["sampler", "dataset", "shapes", "text"],
)
def test_batches_that_cannot_be_merged_are_refused(loader: Any, options: dict[str, Any], message: str) -> None:
    """The error names the loader or the type that one process cannot merge."""
    with pytest.raises(ConfigError, match=message):
        merged(loader, [], **options)
