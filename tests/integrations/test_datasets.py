"""Datasets of Hugging Face's `datasets`, shared out between two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from parallelize import distributed, main_first, shard_loader

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

NUMBERS = list(range(11))


def prepare(row: dict[str, str]) -> dict[str, int]:
    return {"number": int(row["text"].split()[1])}


def read(loader: Any) -> list[int]:
    return [number for batch in shard_loader(loader, tail="exact") for number in batch["number"].tolist()]


@distributed(processes=2)
def numbers(folder: str) -> tuple[list[int], list[int]]:
    """What this process is given of a dataset that is prepared once, by index and as a stream."""
    data = datasets.load_from_disk(f"{folder}/raw")
    with main_first():  # rank 0 prepares, and the others find what it has left
        data = data.map(prepare, remove_columns="text", cache_file_name=f"{folder}/prepared.arrow")
    data = data.with_format("torch")
    stream = data.to_iterable_dataset(num_shards=2)
    return read(DataLoader(data, batch_size=2, shuffle=True)), read(DataLoader(stream, batch_size=2))


def test_each_row_is_read_once(tmp_path: Path) -> None:
    """By index, shuffled, and as a stream, all rows are read by one process each; preparing leaves one file."""
    datasets.Dataset.from_dict({"text": [f"text {number}" for number in NUMBERS]}).save_to_disk(tmp_path / "raw")
    (indexed, stream), (its_indexed, its_stream) = numbers.all_ranks(str(tmp_path))
    assert sorted(indexed + its_indexed) == NUMBERS
    assert indexed + its_indexed != NUMBERS
    assert sorted(stream + its_stream) == NUMBERS
    assert all(map(len, (indexed, its_indexed, stream, its_stream)))
    assert [path.name for path in tmp_path.glob("*.arrow")] == ["prepared.arrow"]
