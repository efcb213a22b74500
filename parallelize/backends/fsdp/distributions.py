"""Outputs that are distributions of torch.distributions, such as those of a policy.

fully_shard prepares a unit's backward by hooks on the tensors that the unit returns. It looks for
them in lists, dicts and dataclasses, and not in a distribution, from which a loss is computed by
`log_prob`, `rsample` or `entropy`. A unit without such a hook would not be gathered, and the
gradients of the last unit would not be averaged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

from parallelize.errors import ConfigError
from parallelize.run.containers import leaves, tensors_of_distribution


def watch_distributions(state: Any, unit: nn.Module) -> None:
    """Let a unit return distributions, until fully_shard's hooks are removed from it.

    Args:
        state: fully_shard's state of the unit.
        unit: a module to which fully_shard is applied.
    """

    def prepare_backward(_unit: nn.Module, _args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        distributions = [leaf for leaf in leaves(output) if isinstance(leaf, Distribution)]
        for distribution in distributions:
            _refuse_cast(state, distribution)
            for tensor in tensors_of_distribution(distribution):
                if tensor.requires_grad:
                    tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]  # torch's

    unit.register_forward_hook(prepare_backward)


def _refuse_cast(state: Any, distribution: Distribution) -> None:
    """Refuse a distribution that would have to be cast.

    Its tensors are computed from each other.
    """
    dtype = state._mp_policy.output_dtype
    if dtype is not None:
        raise ConfigError(
            f"MixedPrecisionPolicy(output_dtype={dtype}) with a {type(distribution).__name__}, "
            "which forward has returned",
            why="under fsdp, outputs are cast if they are tensors, or in lists, dicts or "
            "dataclasses",
            fix="cast in forward what the distribution is made of, and leave output_dtype out",
        )
