"""The run of a block: the active run, or a new run for this block alone.

    where the block is                              its run
    a decorated function, or another block          the active run
        and the block has options of its own        its processes and devices, with these options
    torchrun or srun, without a decorated function  a new one of the processes that were started
    a plain script                                  a new one of one process

The processes and devices of a run never change inside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from parallelize.agreement.unsynced_training import warn_if_unsynced
from parallelize.cluster.devices import probe
from parallelize.cluster.environment import detect
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import compute_layout
from parallelize.errors import ConfigError
from parallelize.run import context
from parallelize.run.context import Runtime
from parallelize.run.generators import seed_generators
from parallelize.run.surroundings import surroundings


def run_of_block(
    options: dict[str, Any],
    environ: Mapping[str, str],
) -> contextlib.AbstractContextManager[Runtime]:
    """Return a context that yields the Runtime of a block.

    Without an active run, the new run is active, and has a process group, in the context only.

    Args:
        options: options of `distributed` that the user has passed to parallel_model.
        environ: environment variables of this process.

    Raises:
        ConfigError: the options are invalid, or would need other processes or devices.
    """
    outer = context.active()
    if outer is None:
        return _activated(_new_run(options, environ))
    if options:
        return contextlib.nullcontext(_changed_run(outer, options))
    return contextlib.nullcontext(outer)


@contextlib.contextmanager
def _activated(run: Runtime) -> Iterator[Runtime]:
    """Make a new run the active one in the context, as a worker does for a decorated function."""
    with context.activate(run), warn_if_unsynced(run.state):
        yield run


def _new_run(options: dict[str, Any], environ: Mapping[str, str]) -> Runtime:
    """Return the Runtime of a new run, and seed the generators if the run has a seed.

    The run has the processes that a launcher has started, or this process alone.
    """
    world, hardware = detect(environ), probe()
    if "backend" not in options:
        # One process that sees several GPUs uses all of them: "dp" splits batches over devices.
        is_alone_with_gpus = world is None and hardware.count > 1
        default = "dp" if is_alone_with_gpus else "ddp"
        options = {**options, "backend": default}
    layout = compute_layout(Config.parse(**options).merged(environ), hardware, world)
    if world is None and layout.world_size > 1:
        backend = layout.config.backend.name
        raise ConfigError(
            f"backend={backend!r} with {layout.world_size} processes in a script that runs as one "
            "process",
            why=f"{backend} needs one process per device, and no launcher has started these "
            "processes",
            fix="decorate the training function with @distributed, start the script with torchrun, "
            "or use backend='dp' for several GPUs in one process",
        )
    if layout.config.seed is not None:
        seed_generators(layout.config.seed)
    return Runtime(world or World(), layout, loader_weights=surroundings().script.loader_weights)


def _changed_run(outer: Runtime, options: dict[str, Any]) -> Runtime:
    """Return a Runtime with the options of one block, for the processes of the outer run.

    It is not active: loaders and warnings go on with the state of the outer run.
    """
    config = outer.config.changed(**options)
    layout = compute_layout(config, probe(), outer.world)
    has_other_parts = config.logical != outer.config.logical
    has_other_nodes = layout.num_nodes != outer.layout.num_nodes
    has_other_devices = layout.devices[outer.world.local_rank] != outer.devices
    if has_other_parts or has_other_nodes or has_other_devices:
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
        devices = ", ".join(map(str, outer.devices))
        raise ConfigError(
            f"parallel_model({arguments}) inside a run on {devices}",
            why="the processes, devices and parts of a run cannot change inside it",
            fix="set these options where the run starts: in @distributed(...), or in the outer "
            "parallel_model",
        )
    # A seed of the outer run has seeded the generators already.
    if "seed" in options and config.seed is not None:
        seed_generators(config.seed)
    return Runtime(outer.world, layout, loader_weights=outer.loader_weights)
