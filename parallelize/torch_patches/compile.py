"""Let torch.compile compile the user's model, and not the code of this package around it.

dynamo is the part of torch.compile that traces Python frames into graphs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


@functools.cache
def exclude_package() -> None:
    """Let dynamo skip every frame of this package, for the rest of this process.

    parallel_model calls this at the entry of a block. Between the user's call of a compiled model
    and the user's forward, this package calls collectives and replaces parameters by their casts.
    Each of these would break the graph.
    """
    # The import takes a second. A program that trains loses nothing: the first optimizer imports
    # the module anyway.
    import torch._dynamo

    trace_rules: Any = torch._dynamo.trace_rules
    trace_rules.add(__name__.partition(".")[0])


def run_uncompiled(call: Callable[[], _Result]) -> _Result:
    """Run a function, and compile nothing: neither the code that it calls, nor compiled modules.

    Dynamo gives up a frame for good that it has met under a TorchDispatchMode (see operations.py).
    A model whose first forward is measured under such a mode would not be compiled afterwards.
    """

    def run() -> _Result:
        # The stance is for modules in the model that the user has compiled.
        with torch.compiler.set_stance("force_eager"):
            return call()

    # A compiled function may have called the model. In it, torch refuses to change the stance,
    # until compilation is disabled (torch/_dynamo/eval_frame.py, _set_stance).
    uncompiled: Callable[[], _Result] = torch.compiler.disable(run)  # type: ignore[no-untyped-call]  # torch's
    return uncompiled()


def traceable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a model in a form that dynamo traces when this package calls it.

    Dynamo skips a method of torch's own modules, such as nn.Sequential.forward, unless a traced
    frame calls it. In a block, a frame of this package calls it, and dynamo skips that frame, too:
    such a model would not be compiled at all. A method of the user is returned as it is.
    """
    from torch._dynamo import external_utils, trace_rules

    function = getattr(method, "__func__", None)
    if function is None or not trace_rules.check(function):
        return method
    inlined: Any = external_utils.wrap_inline(function)
    # Dynamo limits the number of graphs of one code object. All functions of `wrap_inline` have the
    # same code object: with a copy, each model has a limit of its own.
    inlined.__code__ = inlined.__code__.replace()
    return types.MethodType(inlined, getattr(method, "__self__", None))
