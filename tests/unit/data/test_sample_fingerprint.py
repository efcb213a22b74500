"""What tells whether two processes hold the same data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parallelize.data.sample_fingerprint import likeness


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        (np.array([1, 2]), np.array([2, 1])),
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (torch.zeros(2), torch.zeros(3)),
        ({"text": ["a"]}, {"text": ["b"]}),
        ((torch.zeros(1), torch.tensor([1])), (torch.zeros(1), torch.tensor([2]))),
        (1, 2),
        (object(), "object"),
    ],
)
def test_other_data_are_unlike(one, other):
    """Other numbers, shapes, texts or types, in any container, differ."""
    assert likeness([one]) == likeness([one])
    assert likeness([one]) != likeness([other])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((torch.rand(2), torch.tensor([1])), (torch.rand(2), torch.tensor([1]))),
        ((np.random.rand(2), 0.5, "a"), (np.random.rand(2), 0.25, "a")),
        (object(), object()),
        (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
        (torch.zeros(1, device="meta"), torch.zeros(2, device="meta")),
        (torch.zeros(0), torch.ones(0, 2)),
    ],
)
def test_what_may_differ_is_not_compared(one, other):
    """Augmented fractions beside labels or text that say which samples these are, and what cannot be read."""
    assert likeness([one]) == likeness([other])
