"""Where a backward pass starts."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from parallelize.gradients.autograd_graph import scaled_start


@pytest.mark.parametrize("is_edge", [False, True])
def test_a_complex_loss_has_no_default_gradient(is_edge: bool) -> None:
    """Neither as a tensor nor as its edge: torch refuses it."""
    loss = torch.ones((), dtype=torch.complex64, requires_grad=True) * 2
    root = get_gradient_edge(loss) if is_edge else loss
    assert scaled_start([root], None, lambda _gradient: 2.0) == [None]
    with pytest.raises(RuntimeError, match="real scalar"):
        torch.autograd.backward(root)
