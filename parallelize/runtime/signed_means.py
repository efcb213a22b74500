"""A tensor of any size in a few thousand numbers, to which each of its elements contributes."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["signed_means"]

_PARTS = 4096
_NOT_FINITE = 1e4  # so that two tensors that overflow alike differ by nothing


def signed_means(value: Any) -> torch.Tensor:
    """Return the means of a tensor's parts on the CPU, in its dtype; a collective if the tensor is sharded.

    Each element has a sign, drawn for its index: else, errors of opposite signs in one part would cancel.
    """
    flat = value.detach().to_dense().cpu().double().reshape(1, -1)
    signs = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).sign()
    means = torch.adaptive_avg_pool1d(flat * signs, min(flat.numel(), _PARTS))
    return means.nan_to_num(_NOT_FINITE, _NOT_FINITE, -_NOT_FINITE).to(value.dtype)
