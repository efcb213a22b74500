"""What a forward saves for backward is seen, each storage once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize.backends.saved_tensors import DroppedTensorError, StorageKey, storage_key, watch_saved

KIB = 1024


class Recorder:
    """Collects what was saved, in order."""

    def __init__(self) -> None:
        self.keys: list[StorageKey] = []
        self.sizes: list[int] = []

    def __call__(self, key: StorageKey, new_bytes: int) -> None:
        self.keys.append(key)
        self.sizes.append(new_bytes)


def test_a_storage_counts_once_and_parameters_never() -> None:
    """The square of a view and its sine save one storage; the weight of a layer is not counted."""
    layer = nn.Linear(16, 16, bias=False)
    recorder = Recorder()
    with watch_saved(recorder, uncounted=layer.parameters()):
        hidden = layer(torch.ones(16, 16))
        hidden[:8].square().sum()
        hidden.sin().sum()
    # The input of the layer, and its output; the layer saves no weight for an input without gradient.
    assert sorted(recorder.sizes) == [0, KIB, KIB]
    recorder = Recorder()
    with watch_saved(recorder, uncounted=layer.parameters()):
        layer(torch.ones(16, 16, requires_grad=True))
    assert sorted(recorder.sizes) == [0, KIB]
    assert storage_key(layer.weight) in recorder.keys


def test_a_storage_at_a_freed_address_counts() -> None:
    """Of many tensors that are saved and dropped, each counts, although they follow each other in memory."""
    recorder = Recorder()
    x = torch.ones(256, requires_grad=True)
    with watch_saved(recorder, uncounted=[x]):
        for _ in range(20):
            (x + 1).exp()
    assert recorder.sizes == [KIB] * 20


def test_saved_tensors_are_dropped_unless_they_are_kept() -> None:
    """Dropped, no backward can run; kept, it computes the gradient."""
    x = torch.full((3,), 2.0, requires_grad=True)
    with watch_saved(Recorder()):
        loss = (x**3).sum()
    with pytest.raises(DroppedTensorError):
        loss.backward()
    with watch_saved(Recorder(), keeps=True):
        loss = (x**3).sum()
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [12.0] * 3


def test_tensors_without_a_storage_do_not_count() -> None:
    """A sparse matrix is saved, and so is what a vmapped forward computes."""
    recorder = Recorder()
    x = torch.ones(4, 1, requires_grad=True)
    with watch_saved(recorder, uncounted=[x]):
        torch.sparse.mm(torch.eye(4).to_sparse(), x)
        torch.func.vmap(torch.exp)(x)
    assert recorder.sizes[-1] == 16
