"""The hash of samples that is compared across ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parallelize.data.sample_fingerprint import sample_fingerprint


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
        (torch.tensor(1), torch.tensor(2)),
        ("a" * 1023 + "b", "a" * 1023 + "c"),
        (object(), "object"),
    ],
)
def test_different_samples_have_different_fingerprints(one, other):
    """Numbers, shapes, texts and types count, in any container."""
    assert sample_fingerprint([one]) == sample_fingerprint([one])
    assert sample_fingerprint([one]) != sample_fingerprint([other])
    assert len(sample_fingerprint([one])) == 8, "it is sent as 4 bytes"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((torch.rand(2), torch.tensor([1])), (torch.rand(2), torch.tensor([1]))),
        ((np.random.rand(2), 0.5, "a"), (np.random.rand(2), 0.25, "a")),
        ((torch.tensor(1), "a"), (torch.tensor(2), "a")),
        ((np.array(1), np.array([3])), (np.array(2), np.array([3]))),
        ("a" * 1024 + "b", "a" * 1024 + "c"),
        (object(), object()),
        (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
        (torch.zeros(1, device="meta"), torch.zeros(2, device="meta")),
        (torch.zeros(0), torch.ones(0, 2)),
    ],
)
def test_leaves_that_may_differ_between_ranks_are_ignored(one, other):
    """Floats and single numbers beside labels or text, what follows 1,024 characters, and unreadable leaves."""
    assert sample_fingerprint([one]) == sample_fingerprint([other])


def test_floats_are_hashed_unless_that_is_disabled():
    """Without them, data of floats only has the fingerprint of no data, and text still counts."""
    one, other = torch.tensor([1.0]), torch.tensor([2.0])
    assert sample_fingerprint([one], has_floats=False) == sample_fingerprint([other], has_floats=False)
    assert sample_fingerprint([(one, "a")], has_floats=False) != sample_fingerprint([(one, "b")], has_floats=False)


def test_a_label_identifies_a_sample_but_a_counter_does_not_identify_a_batch():
    """Samples of an augmented image and a label are equal if their labels are."""
    for label in (int, torch.tensor):
        one, same, other = ((torch.rand(2), label(number)) for number in (1, 1, 2))
        assert sample_fingerprint([one], are_samples=True) == sample_fingerprint([same], are_samples=True)
        assert sample_fingerprint([one], are_samples=True) != sample_fingerprint([other], are_samples=True)
        assert sample_fingerprint([one]) != sample_fingerprint([same])


class Opaque:
    """Raises another error than AttributeError for an attribute that it does not have."""

    def __getattr__(self, name):
        raise KeyError(name)


def test_data_that_cannot_be_read_is_not_hashed():
    """A leaf counts as its type; a container that contains itself has no hash."""
    assert sample_fingerprint([Opaque()]) == sample_fingerprint([Opaque()])
    cycle = []
    cycle.append(cycle)
    assert sample_fingerprint(cycle) == ""
