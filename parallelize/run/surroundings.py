"""What surrounds the code that runs now: a run, a task that is loaded, or a step that is replayed.

A context variable holds this, because functions of users get no argument for it. A new thread does
not have the values of context variables: in a thread that the user's code starts there is no run,
and only what belongs to the whole program (`Script`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from parallelize.run.loader_weights import LoaderWeights
from parallelize.run.loaders_of_run import LoadersOfRun

if TYPE_CHECKING:
    from torch import nn

    from parallelize.backends.balanced.plan import Plan
    from parallelize.block.context import ModelContext
    from parallelize.checkpoint.checkpoints import Replay
    from parallelize.cluster.world import World
    from parallelize.run.context import Runtime
    from parallelize.run.default_group import DefaultGroupRecord
    from parallelize.run.rendezvous import WorldStore


@dataclass(frozen=True, eq=False)
class Script:
    """What a program keeps beyond its runs.

    Without a decorated function, each of its blocks has a run of its own.

    Args:
        loaders: the loaders that were made outside of runs.
        loader_weights: of all blocks of a plain script, because a loop over a loader may end before
            a block in which its weight is needed: see `LoaderWeights.refuse_lost_weight`.
        plans: the latest split of each model over devices, which the user may read after the block.
        open_blocks: the contexts whose blocks are open, in the order in which they have begun. They
            must end in the opposite order, also if they are of several runs: what they change is
            the process's, such as torch's hooks and the global random generators.
        models_of_earlier_blocks: the models that have been in a block. Only ask whether it has a
            model: the ranks free their models at different times, and list different ones.
        record_of_group: default group -> what the ranks have made for it.
        store_of_world: world -> its store, which is opened once for all runs of the world.
        interrupted: is set when Ctrl-C has interrupted the ranks, each at another line. The handler
            of signals sets it.
    """

    loaders: LoadersOfRun = field(default_factory=LoadersOfRun)
    loader_weights: LoaderWeights = field(default_factory=LoaderWeights)
    plans: WeakKeyDictionary[nn.Module, Plan] = field(default_factory=WeakKeyDictionary)
    open_blocks: list[ModelContext[Any]] = field(default_factory=list)
    models_of_earlier_blocks: WeakSet[nn.Module] = field(default_factory=WeakSet)
    record_of_group: WeakKeyDictionary[Any, DefaultGroupRecord] = field(
        default_factory=WeakKeyDictionary
    )
    store_of_world: dict[World, WorldStore] = field(default_factory=dict)
    interrupted: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Surroundings:
    """What surrounds the code that runs now in this thread.

    Args:
        run: the active run; None: there is none.
        is_loading_task: whether this is a worker that imports the modules of its task, before its
            run begins. A module that calls a distributed function is then refused.
        replay: the step that `parallelize replay` has asked for; None: steps are not replayed.
        script: the program of this process. All surroundings have the same one.
    """

    run: Runtime | None = None
    is_loading_task: bool = False
    replay: Replay | None = None
    script: Script = field(default_factory=Script, repr=False)


_surroundings: ContextVar[Surroundings] = ContextVar(
    "parallelize_surroundings",
    default=Surroundings(),  # noqa: B039 - all threads share the one Script of this default
)


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
    """Return a context in which a script runs up to the step to be replayed, and saves nothing."""
    return _surrounded(replay=replay)


@contextlib.contextmanager
def _surrounded(**changes: Any) -> Iterator[None]:
    """Change some fields of the surroundings in the block; the other fields stay."""
    token = _surroundings.set(replace(_surroundings.get(), **changes))
    try:
        yield
    finally:
        _surroundings.reset(token)
