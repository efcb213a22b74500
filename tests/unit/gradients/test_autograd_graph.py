"""Where a backward pass starts, and the marks of outputs that it meets."""

from __future__ import annotations

import pytest
import torch
from torch import distributions
from torch.autograd.graph import get_gradient_edge

from parallelize.gradients.autograd_graph import is_output, mark_outputs, nodes_behind, scaled_start


@pytest.mark.parametrize("is_edge", [False, True])
def test_a_complex_loss_has_no_default_gradient(is_edge: bool) -> None:
    """Neither as a tensor nor as its edge: torch refuses it."""
    loss = torch.ones((), dtype=torch.complex64, requires_grad=True) * 2
    root = get_gradient_edge(loss) if is_edge else loss
    assert scaled_start([root], None, lambda _gradient: 2.0) == [None]
    with pytest.raises(RuntimeError, match="real scalar"):
        torch.autograd.backward(root)


def test_the_tensors_of_a_distribution_are_outputs() -> None:
    """Also those of a distribution that is made of others, as policies return them."""
    x = torch.zeros(2, 3, requires_grad=True) * 2
    policy = distributions.Independent(distributions.Normal(x, x.exp()), 1)
    mark_outputs((policy, None), inputs=(), owners=["net"])
    loss = policy.log_prob(torch.ones(2, 3)).mean()
    assert any(map(is_output, nodes_behind([loss.grad_fn])))
