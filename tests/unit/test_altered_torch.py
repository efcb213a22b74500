"""Private parts of torch that a release has changed: the features that rely on them refuse, once they are used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, IterableDataset

from parallelize import ConfigError, shard_loader
from parallelize.data import iterable_style

Patch = pytest.MonkeyPatch


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_worker_info_that_is_not_replaced(monkeypatch: Patch) -> None:
    """An iterable dataset is refused if get_worker_info() does not return what counts the workers of all ranks."""
    loader = shard_loader(DataLoader(Stream(), batch_size=None))
    assert len(list(loader)) == 8
    monkeypatch.setattr(iterable_style, "get_worker_info", lambda: None)
    with pytest.raises(ConfigError, match="iterable dataset with torch"):
        list(loader)
