"""What surrounds the code that runs now: a run, a task that is being loaded, or a step that is replayed.

Functions of users are called without an argument for it, so that it is held in a context variable. A thread that the
user's code starts has no surroundings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallelize.checkpoint.checkpoints import Replay
    from parallelize.run.context import Runtime

__all__ = ["Surroundings", "loading_task", "replaying", "running", "surroundings"]


@dataclass(frozen=True)
class Surroundings:
    """What surrounds the code that runs now in this thread.

    Args:
        run: the active run; None: there is none.
        is_loading_task: whether this is a worker that imports the modules of its task, before its run begins.
        replay: the step that `parallelize replay` has asked for; None: steps are not replayed.
    """

    run: Runtime | None = None
    is_loading_task: bool = False
    replay: Replay | None = None


_surroundings: ContextVar[Surroundings] = ContextVar("parallelize_surroundings", default=Surroundings())  # noqa: B039 - frozen


def surroundings() -> Surroundings:
    """Return what surrounds the code that calls this."""
    return _surroundings.get()


def running(run: Runtime) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a run is active."""
    return _surrounded(run=run)


def loading_task() -> contextlib.AbstractContextManager[None]:
    """Return a context in which a worker loads its task: distributed calls are refused in it."""
    return _surrounded(is_loading_task=True)


def replaying(replay: Replay) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a script is run up to a step, and saves nothing."""
    return _surrounded(replay=replay)


@contextlib.contextmanager
def _surrounded(**changes: Any) -> Iterator[None]:
    token = _surroundings.set(replace(_surroundings.get(), **changes))
    try:
        yield
    finally:
        _surroundings.reset(token)
