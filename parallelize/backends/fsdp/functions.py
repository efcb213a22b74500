"""Which torch functions are asked of a shard, which run on its rows, and which need full tensors.

    facts          do not read elements: the shard, which has the shape of the full tensor, knows
    by element     keep elements apart: each rank runs the function on its rows
    fused          update the lists of an optimizer: each rank runs the kernel on its rows
    over all       reduce all elements to one number: DTensor reduces rows, then the ranks' numbers
    all others     run on full tensors

A function that is not in these tables gathers: that is slower, and never wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

FACTS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "__len__"),
        *("stride", "storage_offset", "is_contiguous", "element_size", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "retain_grad"),
    }
)

VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes that are views of the full tensor, as opposed to facts such as `shape`."""

# These copy and fill: they keep elements apart, but torch does not tag them as pointwise.
_COPYING = frozenset(
    {
        *("clone", "copy_", "detach", "detach_", "contiguous", "zero_", "fill_"),
        *("zeros_like", "ones_like", "empty_like", "full_like"),
        *("to", "cpu", "cuda", "type", "float", "half", "double", "bfloat16"),
        *("_foreach_zero_", "_amp_foreach_non_finite_check_and_unscale_"),
    }
)

# Names of functions behind Python's operators -> their operators.
_OPERATORS: Mapping[str, str] = {
    "__eq__": "eq",
    "__ne__": "ne",
    "__rsub__": "sub",
    "__rdiv__": "div",
    "__rtruediv__": "div",
    "__rpow__": "pow",
}

# Only some overloads of these are pointwise: others reduce, or return indices.
_AMBIGUOUS = frozenset({"max", "min", "where", "_foreach_max"})

# DTensor has these without a strategy, as of torch 2.13.
_UNKNOWN_TO_DTENSOR = frozenset({"_conj_physical", "_foreach_addcdiv"})

# Name -> the further arguments with which it reduces all elements, of which DTensor knows how.
_OVER_ALL: Mapping[str, Sequence[tuple[Any, ...]]] = {
    "sum": [()],
    "norm": [(), (2,)],
    "linalg_vector_norm": [(), (2,)],
}

NORMS_OF_LIST = "_foreach_norm"
"""Reduces each tensor of a list: DTensor leaves partial results, which are reduced together."""

FUSED = frozenset({"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"})
"""Kernels of torch's optimizers with fused=True: a step by element, of lists of tensors."""


@functools.cache
def is_by_element(name: str) -> bool:
    """Return whether a function keeps elements apart, and draws no random numbers.

    Its operator tells: torch tags operators as pointwise, and those that draw numbers as seeded.
    """
    if name in _COPYING:
        return True
    if name in _AMBIGUOUS or name in _UNKNOWN_TO_DTENSOR:
        return False
    name = _OPERATORS.get(name, name)
    if name.startswith("__"):
        return False
    operator = getattr(torch.ops.aten, name.rpartition("foreach_")[2], None)
    if not isinstance(operator, torch._ops.OpOverloadPacket):
        return False
    tags: set[torch.Tag] = set()
    for overload in operator.overloads():  # type: ignore[no-untyped-call]  # torch's
        tags.update(getattr(operator, overload).tags)
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def is_over_all(name: str, further: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether a call reduces all elements of its tensor to one number.

    Args:
        name: the name of the function.
        further: the positional arguments behind the tensor.
        options: the keyword arguments.
    """
    return not options and tuple(further) in _OVER_ALL.get(name, ())


def is_in_place(name: str) -> bool:
    """Return whether a function writes to its first argument: torch ends such names with "_"."""
    return name.endswith("_") and not name.endswith("__")
