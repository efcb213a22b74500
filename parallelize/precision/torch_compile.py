"""torch.compile keeps out of this package: it compiles the user's model, not what runs around it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

__all__ = ["is_inside", "keep_out", "paused"]


@functools.cache
def keep_out() -> None:
    """Have dynamo run this package's frames as they are, from now on.

    Between a compiled call and the user's forward lie hooks of ours that open autocast and hold it. A graph that
    contained them would put it back to where the graph found it.
    """
    # Not at the top: it takes a second. Whoever trains pays it anyway, for the first optimizer that is made.
    import torch._dynamo

    trace_rules: Any = torch._dynamo.trace_rules
    trace_rules.add(__name__.partition(".")[0])


def is_inside() -> bool:
    """Whether this code was called, somewhere up the stack, by a compiled function.

    When that function returns, dynamo puts autocast back to what it was when it was called, whatever regions have
    begun or ended in it.
    """
    return callable(get_eval_frame_callback())


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Compile nothing while this lasts: not what we call of other modules either."""
    if not is_inside():
        yield
        return
    callback = set_eval_frame(None)
    try:
        yield
    finally:
        set_eval_frame(callback)
