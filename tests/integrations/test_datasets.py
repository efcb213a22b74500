"""Hugging Face's `datasets`, sharded over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from parallelize import distributed, main_first, shard_loader

pytestmark = pytest.mark.slow

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

NUMBERS = list(range(11))


def prepare(row: dict[str, str]) -> dict[str, int]:
    return {"number": int(row["text"].split()[1])}


def row_numbers(loader: Any) -> list[int]:
    return [number for batch in shard_loader(loader, tail="exact") for number in batch["number"].tolist()]


@distributed(processes=2)
def sharded_rows(folder: str) -> tuple[list[int], list[int]]:
    """Return this process's rows of a dataset that is prepared once, by index and as a stream."""
    data = datasets.load_from_disk(f"{folder}/raw")
    with main_first():  # rank 0 prepares, and the others load its cache file
        data = data.map(prepare, remove_columns="text", cache_file_name=f"{folder}/prepared.arrow")
    data = data.with_format("torch")
    stream = data.to_iterable_dataset(num_shards=2)
    return row_numbers(DataLoader(data, batch_size=2, shuffle=True)), row_numbers(DataLoader(stream, batch_size=2))


def test_each_row_comes_once(tmp_path: Path) -> None:
    """By index, shuffled, and as a stream, each row is in one process's shard; preparing leaves one file."""
    datasets.Dataset.from_dict({"text": [f"text {number}" for number in NUMBERS]}).save_to_disk(tmp_path / "raw")
    (indexed_0, stream_0), (indexed_1, stream_1) = sharded_rows.all_ranks(str(tmp_path))
    assert sorted(indexed_0 + indexed_1) == NUMBERS
    assert indexed_0 + indexed_1 != NUMBERS
    assert sorted(stream_0 + stream_1) == NUMBERS
    assert all(map(len, (indexed_0, indexed_1, stream_0, stream_1)))
    assert [path.name for path in tmp_path.glob("*.arrow")] == ["prepared.arrow"]
