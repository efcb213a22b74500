"""The order in which move_batches asks for batches and gives them out, and who may pin them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from parallelize.data.prefetch import move_batches, pins_memory

# Moves like a device, and needs none.
META = torch.device("meta")
CUDA = torch.device("cuda", 0)


def counted(fetched: list[int], count: int, *, fails: bool = False) -> Iterator[Tensor]:
    for number in range(count):
        fetched.append(number)
        yield torch.ones(number)
    if fails:
        raise ValueError("the loader fails")


@pytest.mark.parametrize(
    ("prefetch", "are_fresh", "expected"),
    [
        pytest.param(0, True, [1, 2, 3, 4, 5], id="none ahead"),
        pytest.param(1, True, [1, 3, 4, 5, 5], id="one ahead"),
        pytest.param(2, True, [1, 4, 5, 5, 5], id="two ahead"),
        pytest.param(9, True, [1, 5, 5, 5, 5], id="all ahead"),
        pytest.param(2, False, [1, 2, 3, 4, 5], id="of the main process"),
    ],
)
def test_batches_are_fetched_ahead(prefetch: int, are_fresh: bool, expected: list[int]) -> None:
    """The first batch does not wait for the second; batches of the main process never wait."""
    fetched: list[int] = []
    lengths, counts = [], []
    source = counted(fetched, 5)
    for batch in move_batches(source, META, prefetch=prefetch, are_fresh=are_fresh):
        lengths.append(len(batch))
        counts.append(len(fetched))
    assert lengths == [0, 1, 2, 3, 4]
    assert counts == expected


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_an_error_comes_after_all_earlier_batches(prefetch: int) -> None:
    """The loop takes what was fetched before the loader failed."""
    batches = move_batches(counted([], 4, fails=True), META, prefetch=prefetch, are_fresh=True)
    assert [len(next(batches)) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="the loader fails"):
        next(batches)


def collate(samples: list[Any]) -> Any:
    return torch.stack(samples).expand(2, -1)


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({"num_workers": 1, "multiprocessing_context": "fork"}, CUDA, True),
        ({"num_workers": 1, "multiprocessing_context": "spawn"}, CUDA, False),
        ({"num_workers": 1, "multiprocessing_context": "fork"}, torch.device("cpu"), False),
        ({"num_workers": 1, "multiprocessing_context": "fork"}, torch.device("mps"), False),
        ({"num_workers": 0}, CUDA, False),
        ({"num_workers": 1, "collate_fn": collate}, CUDA, False),
        ({"num_workers": 1, "batch_size": None}, CUDA, False),
    ],
)
def test_loaders_whose_thread_may_pin(
    options: dict[str, Any],
    device: torch.device,
    expected: bool,
) -> None:
    """Batches of forked workers that default_collate has made are dense tensors of the host."""
    assert pins_memory(DataLoader(torch.ones(4), **options), device) is expected


def test_other_iterables_have_no_thread_that_pins() -> None:
    """Such as a list of batches."""
    assert not pins_memory([torch.ones(4)], CUDA)
