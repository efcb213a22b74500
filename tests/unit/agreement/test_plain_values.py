"""Plain values as bytes: what is read equals what was written, and bytes of strangers run no code."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallelize.agreement.plain_values import NotPlain, decoded, encoded

CPU = torch.device("cpu")

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES | st.complex_numbers(allow_nan=False),
    lambda values: (
        st.lists(values)
        | st.lists(values).map(tuple)
        | st.dictionaries(KEYS, values)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
)


@given(VALUES)
def test_a_value_comes_back(value: Any) -> None:
    """With its types: True is not 1, and a tuple is no list."""
    found = decoded(encoded(value), device=CPU)
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, (dict, list, tuple, set, frozenset))


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0, 3, dtype=torch.bool),
        torch.tensor([1 + 2j]).conj(),
        torch.get_rng_state(),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.float64(2.5),
        np.bool_(True),
    ],
    ids=lambda value: f"{type(value).__name__} {value.dtype}",
)
def test_a_tensor_or_an_array_comes_back(value: Any) -> None:
    """With its dtype and shape, bit by bit."""
    found = decoded(encoded([value]), device=CPU)[0]
    assert (type(found), found.dtype, found.shape) == (type(value), value.dtype, value.shape)
    assert (found == value).all()


def test_other_values() -> None:
    """Infinities, a state dict with the versions of its modules, a Counter, and one tensor in two places."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    shared = torch.ones(1)
    infinite, missing, found, counter, pair = decoded(
        encoded([math.inf, math.nan, state, Counter("aab"), (shared, shared)]), device=CPU
    )
    assert infinite == math.inf
    assert math.isnan(missing)
    assert type(found) is OrderedDict
    assert found.keys() == state.keys()
    assert found._metadata == state._metadata
    assert type(counter) is Counter
    assert counter == Counter("aab")
    assert pair[0] is pair[1]


class Number(int):
    """A class of a user."""


def nested() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        Number(1),
        object(),
        ValueError("a"),
        np.array([object()]),
        np.array(["text"]),
        torch.ones(1, requires_grad=True),
        torch.ones(2).to_sparse(),
        torch.empty(1, device="meta"),
        10**5000,
        nested(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    """It would come back as something else, or not at all."""
    with pytest.raises(NotPlain):
        encoded([value])


def content_of(value: Any, *records: Any, rest: bytes = b"") -> bytes:
    text = json.dumps([value, records]).encode()
    return struct.pack("<Q", len(text)) + text + rest


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 2**63) + b"[]",
        pickle.dumps([1]),
        content_of({"a": 1}),
        content_of(["unknown"]),
        content_of(["complex", 10**400, 0]),
        content_of([[]]),
        content_of(["buffer", 0]),
        content_of(["set", ["list"]]),
        content_of(["buffer", 0], ["tensor", "float32", [2**40], True]),
        content_of(["buffer", 0], ["tensor", "float32", [-1], True]),
        content_of(["buffer", 0], ["tensor", "float32", [True], True], rest=bytes(4)),
        content_of(["buffer", 0], ["tensor", "load", [1], True], rest=bytes(4)),
        content_of(["buffer", 0], ["tensor", "qint8", [1], True], rest=bytes(1)),
        content_of(["buffer", 0], ["array", "|O8", [1], True], rest=bytes(8)),
        content_of(["buffer", 0], ["array", "i4,i4", [1], True], rest=bytes(8)),
        content_of(["buffer", 0], ["bytes", "", [8], True], rest=bytes(7)),
        struct.pack("<Q", 10**6) + b"[" * 10**6,
    ],
)
def test_bytes_of_strangers_are_refused(content: bytes) -> None:
    """By one exception, whatever is wrong with them."""
    with pytest.raises(NotPlain):
        decoded(content, device=CPU)


@given(st.binary(max_size=50), st.integers(0, 200), VALUES)
def test_changed_bytes_are_read_or_refused(noise: bytes, place: int, value: Any) -> None:
    """Nothing else is raised, for any bytes."""
    content = encoded(value)
    with contextlib.suppress(NotPlain):
        decoded(content[:place] + noise + content[place + len(noise) :], device=CPU)
