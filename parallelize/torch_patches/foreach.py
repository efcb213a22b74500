"""Lets torch's optimizers and clipping functions process tensors of more classes in lists.

Optimizers with foreach=True update a list of tensors by one kernel.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils


def allow_in_lists(*classes: type) -> None:
    """Let tensors of these classes be updated and clipped in lists, until this process ends.

    The engine of fsdp calls this for its parameters. torch processes tensors of a class that it
    does not know one by one, with a kernel, or a collective, for each of them.

    The classes stay in torch's lists when a block ends, because their tensors may outlive it.
    """
    classes_of_optimizers: list[Any] = _foreach_supported_types
    classes_of_clipping: list[Any] = _foreach_utils._foreach_supported_types
    for supported_classes in (classes_of_optimizers, classes_of_clipping):
        for tensor_class in classes:
            if tensor_class not in supported_classes:
                supported_classes.append(tensor_class)
