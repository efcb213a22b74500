"""Hashes of forward inputs that tell batches apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallelize.inplace.same_data import _input_hash

ROWS = torch.randn(4, 6)

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "values": (ROWS, ROWS + 1),
    "order": (ROWS, ROWS.flip(0)),
    "one-hot rows": (torch.eye(6)[[0, 3]], torch.eye(6)[[1, 2]]),
    "shape": (ROWS, ROWS.reshape(6, 4)),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "a number beside it": ((ROWS, {"step": 1}), (ROWS, {"step": 2})),
    "the end of many elements": (torch.zeros(3_000_000), torch.cat([torch.zeros(2_999_990), torch.ones(10)])),
    "complex": (torch.complex(ROWS, ROWS), torch.complex(ROWS, -ROWS)),
}

UNREADABLE: dict[str, Any] = {
    "no tensor": [1, "text", None],
    "sparse": torch.eye(3).to_sparse(),
    "a subclass": nn.Parameter(ROWS),
    "an object": (ROWS, object()),
    "meta": torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_inputs_that_differ_have_other_hashes(name: str) -> None:
    """Bitwise equal ones have the same hash."""
    one, other = DIFFERENT[name]
    assert _input_hash(one) == _input_hash(one) != ""
    assert _input_hash(one) != _input_hash(other) != ""


@pytest.mark.parametrize("name", UNREADABLE)
def test_inputs_that_cannot_be_read_have_no_hash(name: str) -> None:
    """They are neither equal nor different."""
    assert _input_hash(UNREADABLE[name]) == ""


def test_tensors_inside_vmap_have_no_hash() -> None:
    """Their values depend on the mapped index."""
    hashes: list[str] = []
    torch.func.vmap(lambda row: hashes.append(_input_hash(row)) or row)(ROWS)
    assert hashes == [""]
