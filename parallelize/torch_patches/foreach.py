"""The classes of tensors that torch's optimizers and clipping functions take in lists."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils


def allow_in_lists(*classes: type) -> None:
    """Let tensors of these classes be updated and clipped in lists, until this process ends.

    torch takes only its own classes, and others one by one, which costs a kernel, or a collective,
    for each tensor. Tensors of these classes may outlive a block, so that none is ever removed.
    """
    of_optimizers: list[Any] = _foreach_supported_types
    of_clipping: list[Any] = _foreach_utils._foreach_supported_types
    for supported in (of_optimizers, of_clipping):
        for tensor_class in classes:
            if tensor_class not in supported:
                supported.append(tensor_class)
