"""The user's function in a run: in a worker process, and in the calling process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from parallelize.agreement.unsynced_training import warn_if_unsynced
from parallelize.call.task import Call
from parallelize.cluster.world import World
from parallelize.config.layout import Layout
from parallelize.errors import add_note
from parallelize.hang_detection.watchdog import Watchdog
from parallelize.run.context import Runtime, activate, current
from parallelize.run.generators import seed_generators
from parallelize.run.rendezvous import Rendezvous


@contextlib.contextmanager
def active_run(
    layout: Layout,
    world: World,
    *,
    rendezvous: Rendezvous | None = None,
    watchdog: Watchdog | None = None,
) -> Iterator[Runtime]:
    """Activate the run of this process in the block.

    With `seed=`, the global random generators are seeded.
    """
    run = Runtime(
        world, layout, rendezvous=rendezvous or Rendezvous(), watchdog=watchdog or Watchdog()
    )
    with activate(run) as runtime, warn_if_unsynced(runtime.state):
        if layout.config.seed is not None:
            seed_generators(layout.config.seed)
        yield runtime


def call_function(call: Call) -> Any:
    """Call the function in the active run, and return its value.

    Blocks that the function has started, and not stopped, end before this returns. Reports of hangs
    show the frames below this one.
    """
    with current().ending_blocks():
        current().watchdog.begin(call.function, call_function.__code__)
        try:
            return call.function(*call.args, **call.kwargs)
        except AttributeError as error:
            # A line that was written for DistributedDataParallel, which has the model as `.module`.
            if error.name == "module" and isinstance(error.obj, nn.Module):
                add_note(
                    error,
                    "a model in parallel_model is not wrapped: write model instead of model.module",
                )
            raise
