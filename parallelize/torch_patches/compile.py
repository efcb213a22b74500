"""Exclusion of this package from torch.compile: the user's model is compiled, the code around it is not."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

__all__ = ["exclude_package", "traceable"]


@functools.cache
def exclude_package() -> None:
    """Make dynamo skip every frame of this package, from now on.

    A graph starts at the user's forward. The code between the compiled call and that forward calls collectives, and
    replaces parameters by their casts.
    """
    # Imported lazily, because the import takes a second; constructing the first optimizer or DDP imports it anyway.
    import torch._dynamo

    trace_rules: Any = torch._dynamo.trace_rules
    trace_rules.add(__name__.partition(".")[0])


def traceable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that a compiled model traces even if its code is torch's own, such as nn.Sequential's forward.

    Dynamo skips frames of torch.nn unless a traced frame calls them, and all frames of this package.
    """
    from torch._dynamo import external_utils, trace_rules

    function = getattr(method, "__func__", None)
    if function is None or not trace_rules.check(function):
        return method
    inlined: Any = external_utils.wrap_inline(function)
    inlined.__code__ = (
        inlined.__code__.replace()
    )  # dynamo limits the number of graphs per code object
    return types.MethodType(inlined, getattr(method, "__self__", None))
