"""parallel_model: context manager in which a model's forward and backward run in parallel."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallelize.backends.ddp_engine import DDPEngine
from parallelize.cluster.devices import probe
from parallelize.cluster.environment import detect
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import Layout, compute_layout
from parallelize.errors import ConfigError
from parallelize.hang_detection.unsynced_training import ENTERED_PARALLEL_MODEL, IN_PARALLEL_MODEL
from parallelize.inplace.block import Block
from parallelize.inplace.engines import Engines
from parallelize.inplace.forward_routing import route_of
from parallelize.inplace.gradient_average import Average, GradientAverage, require_average
from parallelize.inplace.model_checks import check_models, methods_of
from parallelize.inplace.model_context import ModelContext, model_context
from parallelize.inplace.rank_rng import random_numbers_per_rank
from parallelize.inplace.same_data import same_data_check
from parallelize.inplace.shared_parameters import averaged, find_shared_parameters
from parallelize.plugins import registry
from parallelize.plugins.base import Engine, Inner, LocalEngine, Precision, Session
from parallelize.runtime import context
from parallelize.runtime.context import Runtime
from parallelize.runtime.startup_summary import StartupSummary
from parallelize.runtime.torch_compile import exclude_package, traceable

__all__ = ["no_sync", "parallel_model"]

M = TypeVar("M", bound=nn.Module)
N = TypeVar("N", bound=nn.Module)


@overload
def parallel_model(model: M, /, **options: Any) -> ModelContext[M]: ...
@overload
def parallel_model(model: M, other: N, /, **options: Any) -> ModelContext[tuple[M, N]]: ...
@overload
def parallel_model(*models: nn.Module, **options: Any) -> ModelContext[tuple[nn.Module, ...]]: ...
@model_context
def parallel_model(
    *models: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    methods: str | Iterable[str] = (),
    restore: bool = True,
    average: Average = "ranks",
    split_rng: bool = True,
    **options: Any,
) -> Iterator[Any]:
    """Run models in parallel inside a `with` block; the model objects and the way to call them stay the same.

        with parallel_model(model):
            for x, y in shard_loader(loader):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()

    `model = parallel_model(model).start()` begins the block without `with`: it ends when the decorated function has
    returned.

    In the block, `model(x)` runs in parallel and `backward` averages gradients over all processes. For a loss that is a
    mean over equally many targets on every rank, the result is that of one process that trains on the concatenated
    batches; for other losses, `average=` makes it so. All ranks start from rank 0's parameters. The model is moved
    to this process's device. Optimizers may be created before or inside the block, and go on after it; under fsdp, they
    hold this rank's shards of the parameters in the block. After the block or an exception, the model is a plain model
    again, with the trained weights, on the training device.

    A gradient that bypasses the model's forward (`model.encoder(x)`, a method that does not call forward, a functional
    call) is not averaged: the optimizer's step compares it across ranks, and raises SyncError if it differs. A forward
    under `torch.no_grad()` runs no collective, so a single rank may evaluate.

    Every rank draws its own random numbers in the block, for dropout masks, noise and augmentation. `seed=` seeds the
    global generators (torch, random, numpy) per rank. Without it, generators with equal states, because the script has
    seeded itself, are split when the block begins, reproducibly: rank 0 draws the numbers of one process, the other
    ranks get new seeds. Numbers that have to be equal on all ranks (random_split, the order of a list or of an iterable
    dataset, a decision to skip a layer or a collective) are drawn outside of the block, where all ranks draw rank 0's
    numbers again, or from a generator with its own seed. A seed set inside the block is the same on all ranks.

    A warning says if the inputs or local gradients of the first steps are bitwise equal on all ranks, which then do the
    work of one: a loader is not wrapped in `shard_loader`, or each rank seeds a generator of its own alike.

    The block works in a decorated function, in a process started by torchrun or srun, and in a plain script. A plain
    script is one process; if it sees several GPUs, `backend` defaults to "dp".

    Args:
        *models: one or several models; under ddp and dp they may share parameters.
        optimizers: optimizers of these models that do not inherit from `torch.optim.Optimizer`, for fsdp and Apex; all
            others are found.
        methods: names of methods that run in parallel in addition to forward, such as "loss" or "encode".
        restore: whether sharded parameters (fsdp) are gathered into full ones when the block ends.
        average: how gradients of the ranks are averaged. "ranks": with equal weights. "sum": they are added, for losses
            that are sums (`reduction="sum"`). "tokens": by the number of targets over which each loss is a mean, such
            as a cross entropy with `ignore_index` over unequal padding, or with class weights; the micro-batches of an
            optimizer step (losses divided by their number) are weighted alike. The count is read from torch's
            reductions, and a sum divided by a number counts as a mean over that number; a loss whose count is not known
            is refused. Different losses of one step belong in one backward: separate passes count as micro-batches.
        split_rng: whether global generators with equal states are split over the ranks, unless `seed=` seeds them.
            False: they stay equal, with a warning.
        **options: options of `distributed`, for this block only: `backend`, `amp`, `amp_engine`, `wrap`,
            `verify_every`; outside of a decorated function also all others, such as `gpus` and `seed`.

    Yields:
        The model, or a tuple of the models.

    Raises:
        ConfigError: the options are invalid, or do not support a model.
        SyncError: the ranks pass different models.
    """
    given_optimizers = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    names = (methods,) if isinstance(methods, str) else tuple(methods)
    check_models(models, names)
    require_average(average)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(_enter_run({name: value for name, value in options.items() if value is not None}))
        outer = context.active() or run
        if IN_PARALLEL_MODEL not in outer.flags:  # an outer block removes its own mark
            stack.callback(outer.flags.discard, IN_PARALLEL_MODEL)
        outer.flags.update((ENTERED_PARALLEL_MODEL, IN_PARALLEL_MODEL))
        outer.models.extend(map(weakref.ref, models))
        _refuse_comparing_shards(run)
        _refuse_apex(run, average)
        if run.config.wrap is not None or not run.config.backend.places_model:
            for model in models:
                model.to(run.device)
        exclude_package()
        session = stack.enter_context(_open_precision(run, models, given_optimizers))
        build = _engine_factory(run, optimizers=given_optimizers, restore=restore, average=average)
        summary, averaging = StartupSummary(run), GradientAverage(average, run=run)
        same_data = stack.enter_context(same_data_check(run, models))
        shared = find_shared_parameters(models, run=run, average=average)
        # After the session has opened: Apex replaces forward.
        for model in models:
            originals = {name: traceable(each) for name, each in methods_of(model, names).items()}
            inner = Inner(model, original_methods=originals, session=session, average=average)
            block = Block(
                Engines(inner, build=build, run=run, shared=shared.values()),
                run=run,
                on_switched=lambda: session.bind(models),
                startup_summary=summary,
                same_data=same_data,
                window=averaging.window(),
            )
            stack.enter_context(block.running())
        if run.world.world_size > 1:
            stack.enter_context(averaged(shared, averaging.windows))
        stack.enter_context(averaging.active())
        session.bind(models)
        stack.enter_context(random_numbers_per_rank(run, split=split_rng))
        yield models[0] if len(models) == 1 else models


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Accumulate gradients without averaging them over ranks, for all but the last micro-batch of a step.

        for i, (x, y) in enumerate(micro_batches):
            with no_sync(model) if i < last else contextlib.nullcontext():
                (loss_of(model(x), y) / len(micro_batches)).backward()
        optimizer.step()

    Wrap both forward and backward: a backward in this context is refused if its forward ran outside.

    Args:
        model: a model in a `parallel_model` block; for any other model, the context does nothing.
    """
    route = route_of(model)
    return contextlib.nullcontext() if route is None else route.handler.no_sync()


def _enter_run(options: dict[str, Any]) -> contextlib.AbstractContextManager[Runtime]:
    """Return a context that yields the block's Runtime: that of the surrounding run, or else a new one."""
    outer = context.active()
    if outer is not None:
        return contextlib.nullcontext(_run_of_block(outer, options)) if options else contextlib.nullcontext(outer)
    world, hardware = detect(os.environ), probe()
    if "backend" not in options:
        # A single process that sees several GPUs splits batches over them, as with torch.nn.DataParallel.
        options["backend"] = "dp" if world is None and hardware.count > 1 else "ddp"
    layout = compute_layout(Config.parse(**options).merged(os.environ), hardware, world)
    if world is None and layout.world_size > 1:
        raise _missing_processes(layout)
    return context.activate(Runtime(world or World(), layout))


def _run_of_block(outer: Runtime, options: dict[str, Any]) -> Runtime:
    """Return a Runtime with the options of one block, on the processes and devices of the surrounding run."""
    config = outer.config.changed(**options)
    layout = compute_layout(config, probe(), outer.world)
    if layout.devices[outer.world.local_rank] != outer.devices or layout.num_nodes != outer.layout.num_nodes:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ConfigError(
            f"parallel_model({given}) inside a run on {', '.join(map(str, outer.devices))}",
            why="the processes and devices of a run cannot change inside it",
            fix="set these options where the run starts: in @distributed(...), or in the outer parallel_model",
        )
    return Runtime(outer.world, layout)


def _refuse_comparing_shards(run: Runtime) -> None:
    if run.config.verify_every and run.config.backend.shards_gradients and run.world.world_size > 1:
        raise ConfigError(
            f"verify_every={run.config.verify_every} with backend={run.config.backend.name!r}",
            why="each rank holds a different shard of the parameters, so there is nothing to compare",
            fix="drop verify_every=",
        )


def _refuse_apex(run: Runtime, average: Average) -> None:
    if average != "ranks" and run.config.amp is not None and run.config.amp_engine == "apex":
        raise ConfigError(
            f"average={average!r} with amp_engine='apex'",
            why="Apex has copied the averaged gradients to its master parameters before they could be weighted",
            fix="use amp_engine='native'",
        )


def _missing_processes(layout: Layout) -> ConfigError:
    backend = layout.config.backend.name
    return ConfigError(
        f"backend={backend!r} with {layout.world_size} processes in a script that runs as one process",
        why=f"{backend} needs one process per device, and no launcher has started these processes",
        fix="decorate the training function with @distributed, start the script with torchrun, or use backend='dp' "
        "for several GPUs in one process",
    )


def _open_precision(
    run: Runtime, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> contextlib.AbstractContextManager[Session]:
    amp = run.config.amp
    if amp is None:
        return contextlib.nullcontext(Session())
    find: Any = registry.find
    precision: Precision = find("precision", run.config.amp_engine)()
    return precision.open(
        amp=amp,
        models=models,
        optimizers=optimizers,
        device=run.device,
        world=run.world,
        sharded=run.config.backend.shards_gradients,
    )


def _engine_factory(
    run: Runtime, *, optimizers: Sequence[torch.optim.Optimizer], restore: bool, average: Average
) -> Callable[[Inner], Engine]:
    """Return a function that builds the engine of a model, with the backend or with the user's `wrap`."""
    wrap = run.config.wrap

    def build(inner: Inner) -> Engine:
        if wrap is None:
            return run.config.backend.engine(
                inner, world=run.world, devices=run.devices, optimizers=optimizers, restore=restore
            )
        module = wrap(inner, run.world)
        if isinstance(module, DistributedDataParallel):
            return DDPEngine(module, local=inner, broadcasts_buffers=module.broadcast_buffers)
        if average != "ranks":
            raise ConfigError(
                f"average={average!r} with a wrap= that returns a {type(module).__name__}",
                why="only DistributedDataParallel is known to average gradients over the ranks with equal weights",
                fix="return a DistributedDataParallel, or drop average=",
            )
        return _WrapEngine(module, local=inner)

    return build


class _WrapEngine(LocalEngine):
    """Engine of a module that the user's `wrap` returns; only `verify_every` checks that its ranks stay equal."""

    def __init__(self, module: nn.Module, *, local: nn.Module) -> None:
        super().__init__(module)
        self.local = local

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        no_sync = getattr(self.module, "no_sync", None)
        return contextlib.nullcontext() if no_sync is None else no_sync()
