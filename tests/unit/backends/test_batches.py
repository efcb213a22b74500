"""Splitting a batch and joining the parts gives the batch."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallelize.backends.batches import Batch, joined_dims, joined_outputs

CPU = torch.device("cpu")


def divided(inputs: Any, *, dim: int) -> Batch:
    batch = Batch.of(inputs, dim)
    assert isinstance(batch, Batch)
    return batch


@given(samples=st.integers(2, 9), microbatches=st.integers(2, 12), dim=st.integers(0, 1), factor=st.integers(1, 3))
def test_joining_undoes_splitting(samples: int, microbatches: int, dim: int, factor: int) -> None:
    """Sizes differ by at most one sample; every sample is in one part, in order; other values are passed unchanged."""
    x = torch.arange(samples * 3.0).reshape(3, samples) if dim else torch.arange(samples * 3.0).reshape(samples, 3)
    constant = torch.ones(20, 20)
    batch = divided((({"x": x, "name": "a"}, constant), {"flag": None}), dim=dim)
    sizes = batch.sizes(min(samples, microbatches))
    parts = batch.parts(sizes)
    assert sum(sizes) == samples
    assert len(sizes) == len(parts) == min(samples, microbatches)
    assert max(sizes) - min(sizes) <= 1
    for args, kwargs in parts:
        assert args[0]["name"] == "a"
        assert args[1] is constant
        assert kwargs == {"flag": None}

    def output(x: torch.Tensor) -> dict[str, object]:
        """Return a tensor of several rows per sample, a constant and a name."""
        return {"rows": x.repeat_interleave(factor, dim), "table": torch.ones(3), "name": "a"}

    outputs = [output(args[0]["x"]) for args, _ in parts]
    dims = joined_dims(output(x), outputs[0])
    assert [*dims] == [dim, None, None]
    joined = joined_outputs(outputs, dims, batch=batch, device=CPU)
    assert torch.equal(joined["rows"], x.repeat_interleave(factor, dim))
    assert joined["name"] == "a"


def test_a_tensor_that_is_as_long_as_one_batch_only() -> None:
    """Tensors that are not as long as the batch are not split; a batch as long as them is of another kind."""
    classes = torch.zeros(5)
    first = divided(((torch.zeros(8, 2),), {"weight": classes, "mask": torch.zeros(1, 8)}), dim=0)
    same = divided(((torch.zeros(6, 2),), {"weight": classes, "mask": torch.zeros(1, 6)}), dim=0)
    other = divided(((torch.zeros(5, 2),), {"weight": classes, "mask": torch.zeros(1, 5)}), dim=0)
    assert first.signature() == same.signature() != other.signature()
    for batch in (first, first.trial(5)):
        args, kwargs = batch.parts(batch.sizes(5))[0]
        assert [len(args[0]) < 5, kwargs["weight"].shape, kwargs["mask"].shape] == [True, (5,), (1, 8)]


def test_one_number_per_sample_is_split_for_any_batch_dim() -> None:
    """1-D tensors such as sequence lengths are split along dimension 0 even if batch_dim is 1."""
    batch = divided(((torch.zeros(6, 4, 2), torch.arange(4)), {}), dim=1)
    args, _ = batch.parts(batch.sizes(2))[1]
    assert args[0].shape == (6, 2, 2)
    assert args[1].tolist() == [2, 3]
    assert batch.part(0, 3)[0][1].tolist() == [0, 1, 2]


def test_a_trial_gets_copies_of_what_has_copies() -> None:
    """A cache is copied, and so is a generator; an object with a lock is passed as it is."""
    cache, lock, generator = SimpleNamespace(outputs=[]), SimpleNamespace(lock=threading.Lock()), torch.Generator()
    args, _ = Batch.whole(((cache, lock, generator), {})).trial(1).inputs
    assert args[0] is not cache
    assert args[1] is lock
    assert args[2] is not generator
