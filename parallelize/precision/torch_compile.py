"""Exclusion of this package from torch.compile: the user's model is compiled, the code around it is not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

from parallelize.torch_private import self_test

__all__ = ["compilation_disabled", "exclude_package", "is_inside_compiled"]


@functools.cache
def exclude_package() -> None:
    """Make dynamo skip every frame of this package, from now on.

    This package enters autocast between a compiled call and the user's forward. If that code were part of a graph,
    dynamo would restore the autocast state at the end of the graph.
    """
    # Imported lazily, because the import takes a second; constructing the first optimizer imports it anyway.
    import torch._dynamo

    trace_rules: Any = torch._dynamo.trace_rules
    trace_rules.add(__name__.partition(".")[0])
    _require_exclusion()


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
    exited inside.
    """
    return callable(get_eval_frame_callback())


@contextlib.contextmanager
def compilation_disabled() -> Iterator[None]:
    """Disable torch.compile inside the context, also for code of other modules that is called there."""
    if not is_inside_compiled():
        yield
        return
    callback = set_eval_frame(None)
    try:
        yield
    finally:
        set_eval_frame(callback)
