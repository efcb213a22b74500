"""Summaries of map-style datasets tell whether ranks hold the same data, and leave the program as it was."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from ranks import keep_sigchld_handler, own_generators
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from parallelize import SyncError
from parallelize.data.same_data import (
    DataSummary,
    different_data_error,
    hold_different_data,
    summary_of,
)


class Rows(Dataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Files(Dataset[Any]):
    def __init__(self, files: list[int]) -> None:
        self.rows = [row for file in files for row in range(file * 6, file * 6 + 6)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self.rows[index])])


class Augmented(Rows):
    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + torch.randn(1) + random.random() + np.random.rand()


class OwnNoise(Rows):
    """Draws from generators that it and its transform hold."""

    def __init__(self, rows: Any, seed: int) -> None:
        super().__init__(rows)
        self.numbers = np.random.default_rng(seed)
        self.old_numbers = np.random.RandomState(seed)
        self.transform = {"flip": [random.Random(seed)], "noise": torch.Generator().manual_seed(seed)}

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(1, generator=self.transform["noise"]) + self.transform["flip"][0].random()
        return self.rows[index] + noise + self.numbers.random() + self.old_numbers.rand()


class OpenedInWorkers(Rows):
    file: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            raise RuntimeError("not open")
        return self.rows[index]


def open_file(_worker: int) -> None:
    get_worker_info().dataset.file = "open"


class Opaque:
    pass


@dataclass
class Sample:
    values: torch.Tensor
    name: str


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Unlike(DataLoader[Any]):
    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield {"x": x, "y": y}


def rows(count: int) -> torch.Tensor:
    return torch.arange(float(count))[:, None]


def of_ranks(dataset_of: Callable[[int], Any], **options: Any) -> list[DataSummary]:
    """Return the summaries of two ranks, of which each has generators of its own."""
    found = []
    for rank in range(2):
        with own_generators(rank):
            found.append(summary_of(DataLoader(dataset_of(rank), batch_size=3, **options)))
    return found


PARTS: dict[str, Callable[[int, int], Any]] = {
    "files[rank::world]": lambda rank, count: Files(list(range(count // 6))[rank::2]),
    "x[rank::world]": lambda rank, count: Rows(rows(count)[rank::2]),
    "Subset": lambda rank, count: Subset(Rows(rows(count)), range(rank, count, 2)),
    "ConcatDataset": lambda rank, count: ConcatDataset([Rows(rows(count)[rank::2])]),
    "labels alike": lambda rank, count: TensorDataset(rows(count)[rank::2], torch.zeros(count)[rank::2]),
    "images": lambda rank, count: Rows(np.full((count, 8, 8), rank, dtype=np.uint8)),
    "texts": lambda rank, count: Rows([f"text {number}" for number in range(rank, count, 2)]),
    "dataclasses": lambda rank, count: Rows([Sample(torch.zeros(2), f"{rank}")] * count),
    "augmented": lambda rank, count: Augmented(rows(count)[rank::2]),
}
SAME: dict[str, Callable[[int], Any]] = {
    "whole": lambda _rank: Rows(rows(24)),
    "augmented": lambda _rank: Augmented(rows(24)),
    "last bits": lambda rank: Rows(rows(24) * (1 + rank * 1e-7)),
    "own noise": lambda rank: OwnNoise(rows(24), rank),
    "one sample": lambda _rank: Rows(rows(1)),
}


@pytest.mark.parametrize("count", [24, 25])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_ranks_are_different_data(name: str, count: int) -> None:
    """Also if all ranks have equally many samples."""
    assert hold_different_data(of_ranks(lambda rank: PARTS[name](rank, count)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SAME)
def test_one_dataset_is_no_different_data(name: str, workers: int) -> None:
    """Random numbers and the last bits of floats may differ between the ranks."""
    keep_sigchld_handler()
    assert not hold_different_data(of_ranks(SAME[name], num_workers=workers, shuffle=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_augmented_samples_are_comparable(workers: int) -> None:
    """By global generators: each read begins with the same numbers."""
    keep_sigchld_handler()
    whole, _ = of_ranks(SAME["augmented"], num_workers=workers)
    assert whole.is_comparable
    own, _ = of_ranks(SAME["own noise"], num_workers=workers)
    assert own == DataSummary(24, ("", ""))
    assert not own.is_comparable


def test_a_dataset_is_read_where_the_loader_reads_it() -> None:
    """With its worker_init_fn, in one worker process that has ended."""
    keep_sigchld_handler()
    options: dict[str, Any] = {"worker_init_fn": open_file, "persistent_workers": True, "num_workers": 2}
    summaries = of_ranks(lambda rank: OpenedInWorkers(rows(24)[rank::2]), **options)
    assert [summary.is_comparable for summary in summaries] == [True, True]
    assert hold_different_data(summaries)


@pytest.mark.parametrize(
    "dataset",
    [OpenedInWorkers(rows(4)), Rows({"a": 1, "b": 2}), Stream()],
    ids=["closed", "keys", "stream"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_read_has_an_empty_summary(dataset: Any, workers: int) -> None:
    """It differs from nothing."""
    keep_sigchld_handler()
    summary = summary_of(DataLoader(dataset, num_workers=workers))
    assert summary == DataSummary()
    assert not hold_different_data([summary, DataSummary(4, ("a", "b"))])


def test_objects_of_unknown_types_are_not_comparable() -> None:
    """Their values are not known; the length is."""
    assert summary_of(DataLoader(Rows([Opaque()] * 3))) == DataSummary(3, ("", ""))
    sparse = torch.eye(2).to_sparse()
    assert summary_of(DataLoader(Rows([sparse] * 3))) == DataSummary(3, ("", ""))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_summary_leaves_the_program_as_it_was(workers: int) -> None:
    """Global generators, the loader's, and those that the dataset holds."""
    keep_sigchld_handler()
    dataset, untouched = OwnNoise(rows(8), 0), OwnNoise(rows(8), 0)
    generator = torch.Generator().manual_seed(3)
    parts = ConcatDataset([*(Rows(rows(1)) for _ in range(20)), Subset(dataset, range(8))])
    loader = DataLoader(parts, shuffle=True, generator=generator, num_workers=workers)
    attributes = dict(vars(loader))
    with own_generators(1) as states:
        before = states(), generator.get_state().tolist()
        summary_of(loader)
        assert (states(), generator.get_state().tolist()) == before
    assert vars(loader) == attributes
    assert torch.equal(dataset[0], untouched[0])


def test_a_loader_of_another_class_is_summarized() -> None:
    """What it makes of batches does not matter."""
    data = TensorDataset(rows(4), rows(4))
    assert summary_of(Unlike(data)) == summary_of(DataLoader(data, batch_size=None))
    assert summary_of(Unlike(data)).is_comparable


def test_a_summary_survives_a_store() -> None:
    """As text of plain values."""
    for summary in (DataSummary(), DataSummary(4, ("a", "")), summary_of(DataLoader(Rows(rows(3))))):
        assert DataSummary.from_text(summary.to_text()) == summary


@pytest.mark.parametrize(
    ("summaries", "difference"),
    [
        ([(4, "a", "b"), (4, "a", "b"), (5, "a", "b")], "rank 0 has 4 samples, rank 2 has 5"),
        ([(), (4, "a", "b"), (5, "a", "c")], "rank 1 has 4 samples, rank 2 has 5"),
        ([(4, "a", "b"), (4, "a", "c")], "the last sample of rank 0 is another one than that of rank 1"),
        ([(4, "a", ""), (), (4, "c", "d")], "the first sample of rank 0 is another one than that of rank 2"),
    ],
)
def test_the_error_names_what_differs(summaries: list[Any], difference: str) -> None:
    """It says why, and what to write."""
    ranks = []
    for length, *samples in (summary or (None,) for summary in summaries):
        ranks.append(DataSummary(length, tuple(samples)))
    assert hold_different_data(ranks)
    error = different_data_error("train.py:12", ranks)
    assert isinstance(error, SyncError)
    assert f"train.py:12: the ranks hold different data: {difference}" in str(error)
    assert re.search(r"fix: use shard_loader\(loader, divides='processes'\)", str(error))


def test_unknown_summaries_differ_from_nothing() -> None:
    """An error is raised only where it is certain."""
    assert not hold_different_data([DataSummary(4, ("a", "b")), DataSummary(4, ("", "b")), DataSummary(4)])
    assert not hold_different_data([DataSummary()] * 2)
