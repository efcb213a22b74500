"""torch.compile compiles the user's model, and not the code of this package around it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


@functools.cache
def exclude_package() -> None:
    """Make dynamo skip every frame of this package, from now on.

    A graph starts at the user's forward. The code between the compiled call and that forward calls
    collectives, and replaces parameters by their casts: it would break the graph at each of them.
    """
    # The import takes a second. It is no loss here: the first optimizer or DDP imports it anyway.
    import torch._dynamo

    trace_rules: Any = torch._dynamo.trace_rules
    trace_rules.add(__name__.partition(".")[0])


def traceable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that a compiled model traces, also one of torch's own, as of nn.Sequential.

    Dynamo skips frames of torch.nn unless a traced frame calls them. In a block, the frame that
    calls them is this package's, which it skips: the model would not be compiled at all.
    """
    from torch._dynamo import external_utils, trace_rules

    function = getattr(method, "__func__", None)
    if function is None or not trace_rules.check(function):
        return method
    inlined: Any = external_utils.wrap_inline(function)
    # Dynamo limits the number of graphs of a code object, which all models would share.
    inlined.__code__ = inlined.__code__.replace()
    return types.MethodType(inlined, getattr(method, "__self__", None))
