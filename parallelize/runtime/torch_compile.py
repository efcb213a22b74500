"""Exclusion of this package from torch.compile: the user's model is compiled, the code around it is not."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

from parallelize.torch_patches.private import self_test

__all__ = ["compilation_disabled", "exclude_package", "is_inside_compiled", "traceable"]


@functools.cache
def exclude_package() -> None:
    """Make dynamo skip every frame of this package, from now on.

    A graph starts at the user's forward. The code between the compiled call and that forward calls collectives, and
    enters autocast, whose state dynamo would restore at the end of a graph.
    """
    # Imported lazily, because the import takes a second; constructing the first optimizer or DDP imports it anyway.
    import torch._dynamo

    trace_rules: Any = torch._dynamo.trace_rules
    trace_rules.add(__name__.partition(".")[0])
    _require_exclusion()


def traceable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that a compiled model traces even if its code is torch's own, such as nn.Sequential's forward.

    Dynamo skips frames of torch.nn unless a traced frame calls them, and all frames of this package.
    """
    from torch._dynamo import external_utils, trace_rules

    function = getattr(method, "__func__", None)
    if function is None or not trace_rules.check(function):
        return method
    inlined: Any = external_utils.wrap_inline(function)
    inlined.__code__ = inlined.__code__.replace()  # dynamo limits the number of graphs per code object
    return types.MethodType(inlined, getattr(method, "__self__", None))


@self_test("amp=", instead="call torch.autocast in the loop")
def _require_exclusion() -> bool:
    """Dynamo skips functions of this package, and says whether a compiled function is running."""
    from torch._dynamo import trace_rules

    callback: Any = is_inside_compiled
    before = set_eval_frame(callback)  # until it is set back, no Python function is called
    inside = get_eval_frame_callback()
    set_eval_frame(before)
    return trace_rules.check(is_inside_compiled) and callable(inside) and not is_inside_compiled()


def is_inside_compiled() -> bool:
    """Return whether a compiled function is on the call stack.

    When that function returns, dynamo restores the autocast state from its start, even if contexts were entered or
    exited inside. The callback is False where dynamo only runs what it has compiled, past its limit of recompilations.
    """
    return get_eval_frame_callback() is not None


class compilation_disabled:  # noqa: N801  # a context, called in every step: a generator is slow
    """Disable torch.compile inside the context, also for code of other modules that is called there."""

    def __enter__(self) -> None:
        self._callback = set_eval_frame(None)

    def __exit__(self, *_: object) -> None:
        set_eval_frame(self._callback)
