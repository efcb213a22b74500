"""Peak memory of a training step under O1 and O2, in live bytes of tensors, against hand-written autocast."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelize.model import parallel_model

WIDTH, VOCABULARY, TOKENS = 64, 256, 48
SCALARS = 64  # bytes of a few numbers, such as the weight of a loss


class PeakBytes(TorchDispatchMode):
    """Records the most bytes of storages that operations in the context have made and that live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for each in tree_leaves(outputs):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return outputs


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def peak_of(step: Callable[[], None]) -> int:
    """Return the peak of the third step; the first ones make the optimizer's state and the caches."""
    for _ in range(2):
        step()
    with PeakBytes() as recorded:
        step()
    return recorded.peak


def steps(*, context: Callable[[], Any]) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(VOCABULARY, (4, TOKENS))

    def step() -> None:
        optimizer.zero_grad()
        with context():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()

    return model, step


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_peak_is_that_of_hand_written_autocast(level: str) -> None:
    """A step in a block needs no more memory than one of a loop with torch.autocast."""
    _, by_hand = steps(context=lambda: torch.autocast("cpu", torch.bfloat16))
    expected = peak_of(by_hand)
    model, step = steps(context=contextlib.nullcontext)
    with parallel_model(model, amp=level, backend="ddp", processes=1):
        found = peak_of(step)
    assert expected > 1_000_000
    assert found <= expected + SCALARS


@pytest.mark.parametrize("amp", ["O1", "O2", "O3"])
def test_a_block_keeps_no_model(amp: str) -> None:
    """After the block and the last reference to the model, its parameters are freed, though torch keeps functions."""
    cached: Any = torch.overrides.get_testing_overrides
    cached.cache_clear()
    model = nn.Linear(4, 4)
    parameters = [weakref.ref(each) for each in model.parameters()]
    with parallel_model(model, amp=amp):
        model(torch.ones(2, 4)).float().sum().backward()
        torch.overrides.get_testing_overrides()
    del model
    gc.collect()
    assert [each() for each in parameters] == [None, None]
