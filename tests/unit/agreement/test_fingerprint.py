"""Fingerprints of tensors: equal for equal values, different for other values, positions and shapes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize.agreement import fingerprint as comparison


def fingerprint(*tensors: torch.Tensor) -> torch.Tensor:
    return comparison.fingerprint(tensors)


VALUES = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "other",
    [
        VALUES.flip(0),
        VALUES.flip(1),
        VALUES.roll(1),
        VALUES[[1, 0, 2, 3]],
        -VALUES,
        VALUES + torch.eye(4, 6) * 1e-6,
        VALUES.reshape(6, 4).t(),
    ],
    ids=range(7),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_other_values_and_positions_are_seen(other: torch.Tensor, dtype: torch.dtype) -> None:
    """Permuted rows and columns, another sign and a small change give another fingerprint."""
    values, changed = VALUES.to(dtype), other.to(dtype)
    assert torch.equal(values, changed) == bool(fingerprint(values) == fingerprint(changed))


def test_rows_of_an_embedding_are_told_apart() -> None:
    """Equal rows at other positions with the same sum of positions, as gradients of embeddings have."""
    first, second = torch.zeros(8, 3), torch.zeros(8, 3)
    first[[1, 4]] = second[[2, 3]] = 1.0
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first.t()) != fingerprint(second.t())
    assert fingerprint(first.to_sparse()) != fingerprint(second.to_sparse())


def test_layout_and_the_sign_of_zero_do_not_matter() -> None:
    """Strides, -0.0 and zero rows of a sparse tensor do not change a fingerprint; that of zeros is 0."""
    values = VALUES.reshape(2, 3, 2, 2)
    assert fingerprint(values) == fingerprint(values.to(memory_format=torch.channels_last))
    assert fingerprint(-torch.zeros(3)) == fingerprint(torch.zeros(0)) == fingerprint(torch.zeros(())) == 0
    # torch 2.11 warns once, even if the invariants are checked.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = torch.sparse_coo_tensor([[0, 2]], [[1.0], [0.0]], (4, 1), check_invariants=True)
    assert fingerprint(sparse) == fingerprint(torch.tensor([[1.0], [0.0]]).to_sparse(1))


def test_large_tensors_are_hashed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part, and the place of each tensor among the others, counts."""
    monkeypatch.setattr(comparison, "_CHUNK_ELEMENTS", 5)
    one, other = VALUES, torch.ones(2)
    for position in range(VALUES.numel()):
        changed = VALUES.clone()
        changed.view(-1)[position] += 1
        assert fingerprint(one, other) != fingerprint(changed, other)
    assert fingerprint(one, -one) != fingerprint(-one, one)
    assert fingerprint(other, -other) != fingerprint(-other, other)
    assert fingerprint(one, other) == fingerprint(VALUES.clone(), torch.ones(2))


class Operators(TorchDispatchMode):
    """Counts operators: on an accelerator, each starts a kernel or makes a view."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "most"), [("cpu", 1600), ("meta", 120)])
def test_a_large_tensor_of_an_accelerator_takes_few_kernels(device: str, most: int) -> None:
    """Its parts are larger than those on the CPU; "meta" stands for an accelerator here."""
    with Operators() as operators:
        fingerprint(torch.ones(2**24, dtype=torch.uint8, device=device))
    assert most / 2 < operators.count <= most
