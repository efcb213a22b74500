"""The active run of this process, and functions that read it, such as `rank()`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from parallelize.cluster.devices import probe
from parallelize.cluster.environment import detect
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import Layout, compute_layout
from parallelize.hang_detection.watchdog import Watchdog
from parallelize.run.data_ranks import DataRanks, all_ranks
from parallelize.run.loader_weights import LoaderWeights
from parallelize.run.loaders_of_run import LoadersOfRun, LoaderWarnings
from parallelize.run.process_group import process_group
from parallelize.run.rendezvous import Rendezvous
from parallelize.run.sharded_tensors import ShardedTensors
from parallelize.run.state import RunState
from parallelize.run.surroundings import running, surroundings


@dataclass(frozen=True, eq=False, repr=False)
class Runtime:
    """State of one process in a run.

    Args:
        world: rank and world size.
        layout: the config, and the devices of every local rank.
        rendezvous: what a launcher gives its ranks to meet each other.
        state: what has happened so far in the run.
        loaders: what the run's loaders share.
        loader_warnings: which warnings about ranks that read the same data were shown.
        loader_weights: which batch's weight belongs to which loss.
        watchdog: detects hangs if the run has several processes.
        background_saves: the latest save of a checkpoint by a thread; empty before the first. The
            next save waits for it, because the threads of all checkpoints send in one group.
        sharded_tensors: the tensors that fsdp has sharded in the run.
        ends_of_calls: for each decorated function that runs now, outer functions first: the ends of
            the blocks that must end when the function returns.
    """

    world: World
    layout: Layout
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    state: RunState = field(default_factory=RunState)
    loaders: LoadersOfRun = field(default_factory=LoadersOfRun)
    loader_warnings: LoaderWarnings = field(default_factory=LoaderWarnings)
    loader_weights: LoaderWeights = field(default_factory=LoaderWeights)
    watchdog: Watchdog = field(default_factory=Watchdog)
    background_saves: list[Future[None]] = field(default_factory=list)
    sharded_tensors: ShardedTensors = field(default_factory=ShardedTensors)
    ends_of_calls: list[contextlib.ExitStack] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """The config of the run."""
        return self.layout.config

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of this process."""
        return self.layout.devices[self.world.local_rank]

    @property
    def device(self) -> torch.device:
        """The device of this process's model and batches."""
        return self.devices[0]

    @property
    def data_ranks(self) -> DataRanks:
        """The ranks over which data is divided; ask the active run, which blocks tell them."""
        return self.state.data_ranks or all_ranks(self.world)

    @contextlib.contextmanager
    def ending_blocks(self) -> Iterator[None]:
        """Return a context for the call of a decorated function: it ends blocks left open there.

        `parallel_model(model).start()` begins such a block. A decorated function may call another
        one. When the inner function returns, the blocks of the outer function go on.
        """
        with contextlib.ExitStack() as end_of_call:
            self.ends_of_calls.append(end_of_call)
            try:
                yield
            finally:
                self.ends_of_calls.remove(end_of_call)


_CUBLAS_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"


def active() -> Runtime | None:
    """Return the active run, or None outside of a run."""
    return surroundings().run


def active_or(run: Runtime) -> Runtime:
    """Return the active run, or another one outside of a run.

    A block with options of its own has its own Runtime, and a loader that a module makes at its
    import has one of that time. What all blocks and loaders of a run share is in the active run.
    """
    return active() or run


def current() -> Runtime:
    """Return the active run.

    Outside of a run, return a new Runtime that is not active: for the ranks that a launcher has
    started, as its variables say, or else for this process alone.

    Raises:
        ConfigError: launcher or PARALLELIZE_<OPTION> variables are invalid or contradict each
            other.
    """
    runtime = active()
    if runtime is not None:
        return runtime
    world = current_world()
    layout = compute_layout(Config.parse().merged(os.environ), probe(), world)
    return Runtime(world, layout, loader_weights=surroundings().script.loader_weights)


def current_world() -> World:
    """Return the World of this process.

    Unlike `current`, it does not probe the devices: `rank()` works where they are not usable.
    """
    runtime = active()
    if runtime is not None:
        return runtime.world
    return detect(os.environ) or World()


@contextlib.contextmanager
def activate(runtime: Runtime) -> Iterator[Runtime]:
    """Activate a run in a block: make it the current run, and set the device and process group."""
    workspaces = _deterministic_workspaces(runtime)
    with running(runtime):
        group = process_group(runtime.world, runtime.layout, runtime.watchdog, runtime.rendezvous)
        # At its end, `device_index` makes no CUDA context on the device that was current before.
        device = torch.accelerator.device_index(runtime.device.index)
        with workspaces, device, group:
            yield runtime


@contextlib.contextmanager
def _deterministic_workspaces(run: Runtime) -> Iterator[None]:
    """Under `logical=`, let cuBLAS use workspaces with which a product has the same bits each time.

    torch and cuBLAS read the sizes of the workspaces from a variable, when a process multiplies
    matrices on a GPU for the first time. In a process that has multiplied before, a new value has
    no effect. If the user has set the variable, its value stays, and may not help. In both cases
    torch warns in the block, and names the variable (alertCuBLASConfigNotDeterministic, in
    Context.cpp).

    Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """
    is_needed = run.config.logical is not None and run.device.type == "cuda"
    if not is_needed or _CUBLAS_WORKSPACES in os.environ:
        yield
        return
    # Eight workspaces of 4 MiB: torch allocates as much without the variable on an H100.
    os.environ[_CUBLAS_WORKSPACES] = ":4096:8"
    try:
        yield
    finally:
        os.environ.pop(_CUBLAS_WORKSPACES, None)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured. No value of a tensor can be read meanwhile.

    In a run on the CPU, the driver is not asked: that would initialize a GPU of the machine.
    """
    is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    return is_initialized and torch.cuda.is_current_stream_capturing()


def rank() -> int:
    """Return the rank of this process, from 0; 0 in a script that no launcher started."""
    return current_world().rank


def world_size() -> int:
    """Return the number of processes of the run; 1 in a script that no launcher started."""
    return current_world().world_size


def local_rank() -> int:
    """Return the rank of this process on its node, from 0."""
    return current_world().local_rank


def device() -> torch.device:
    """Return the device of this process's model and batches."""
    return current().device


def is_main() -> bool:
    """Whether this process is rank 0, the one that should write files."""
    return current_world().is_main
