"""WebDataset's pipelines and loaders, sharded over two processes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from parallelize import distributed, shard_loader

wds = pytest.importorskip("webdataset", reason="webdataset is not installed")

NUMBERS = list(range(23))

# WebDataset leaves its files to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def number_of(sample: dict[str, bytes]) -> int:
    return int(sample["txt"])


def pipeline(folder: str, *stages: Any) -> Any:
    urls = sorted(map(str, Path(folder).glob("*.tar")))
    return wds.DataPipeline(wds.SimpleShardList(urls), *stages, wds.tarfile_to_samples(), wds.map(number_of))


def dataset(folder: str) -> Any:
    urls = sorted(map(str, Path(folder).glob("*.tar")))
    return wds.WebDataset(urls, nodesplitter=wds.split_by_node, shardshuffle=False).map(number_of)


@distributed(processes=2)
def numbers(folder: str, kind: str, workers: int) -> list[int]:
    """Return the numbers that this process reads from a kind of loader."""
    loader = {
        "without splitters": lambda: DataLoader(pipeline(folder), batch_size=2, num_workers=workers),
        "split_by_worker": lambda: DataLoader(pipeline(folder, wds.split_by_worker), batch_size=2, num_workers=workers),
        "split_by_node": lambda: DataLoader(dataset(folder), batch_size=2, num_workers=workers),
        "WebLoader": lambda: wds.WebLoader(dataset(folder), batch_size=2, num_workers=workers),
        "WebLoader without splitters": lambda: wds.WebLoader(pipeline(folder), batch_size=2),
    }[kind]()
    return [number for batch in shard_loader(loader, tail="exact") for number in batch.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "kind", ["without splitters", "split_by_worker", "split_by_node", "WebLoader", "WebLoader without splitters"]
)
def test_each_sample_comes_once(tmp_path: Path, kind: str, workers: int) -> None:
    """A pipeline with split_by_node shards itself, any other one is sharded; a WebLoader is an iterable of batches."""
    for shard in range(6):
        with wds.TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for number in NUMBERS[shard::6]:
                writer.write({"__key__": f"{number:03d}", "txt": str(number)})
    first, second = numbers.all_ranks(str(tmp_path), kind, workers)
    gc.collect()
    assert sorted(first + second) == NUMBERS
    assert first
    assert second
