"""Where the backward of what a model has returned begins."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_leaves

from parallelize.runtime.containers import leaves

__all__ = ["origins"]


def origins(output: Any) -> list[Any]:
    """The autograd nodes that have made the tensors of an output, each once; torch's containers are opened too."""
    made = (getattr(each, "grad_fn", None) for each in tree_leaves(list(leaves(output))))
    return list(dict.fromkeys(node for node in made if node is not None))
