"""parallel_model: the user's own model, running in parallel while a block lasts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallelize.backends.ddp_engine import AveragingEngine
from parallelize.cluster.devices import probe
from parallelize.cluster.world import World, detect
from parallelize.config.config import Config
from parallelize.config.layout import Layout, lay_out
from parallelize.errors import ConfigError
from parallelize.hang_detection.unsynced_training import IN_BLOCK
from parallelize.inplace.block import Block
from parallelize.inplace.forward_routing import route_of
from parallelize.inplace.model_checks import admit, methods_of
from parallelize.inplace.rank_rng import split_streams
from parallelize.plugins import registry
from parallelize.plugins.base import Engine, Inner, LocalEngine, Precision, Session
from parallelize.runtime import context
from parallelize.runtime.context import Runtime
from parallelize.runtime.startup_summary import StartLine

__all__ = ["no_sync", "parallel_model"]

M = TypeVar("M", bound=nn.Module)
N = TypeVar("N", bound=nn.Module)


@overload
def parallel_model(model: M, /, **options: Any) -> contextlib.AbstractContextManager[M]: ...
@overload
def parallel_model(model: M, other: N, /, **options: Any) -> contextlib.AbstractContextManager[tuple[M, N]]: ...
@overload
def parallel_model(*models: nn.Module, **options: Any) -> contextlib.AbstractContextManager[tuple[nn.Module, ...]]: ...
@contextlib.contextmanager
def parallel_model(
    *models: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    methods: str | Iterable[str] = (),
    restore: bool = True,
    **options: Any,
) -> Iterator[Any]:
    """Run models in parallel while the block lasts: the same objects, called as ever.

        with parallel_model(model):
            for x, y in shard_loader(loader):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()

    Inside, `model(x)` runs in parallel and `backward` averages gradients over all processes, so that the loop trains
    what one process would on all batches together. Parameters start as rank 0's. The model moves to this process's
    device and keeps its `Parameter` objects: an optimizer made before works, one made inside too. After the block, also
    after an exception, it is the plain model that it was, with the trained weights, on the device it was trained on.

    A gradient that did not come through the model (`model.encoder(x)`, a method that never calls forward, a functional
    call) would differ from rank to rank: an optimizer that would step on one raises SyncError instead. Forward without
    gradients (`torch.no_grad()`) runs on this rank alone and waits for no other, so one rank may evaluate.

    It works inside a decorated function, in a process that torchrun or srun has started, and in a plain script: there
    with `gpus=[0, 1]` under "dp", or on one device.

    Args:
        *models: one or several, which share no parameter.
        optimizers: the optimizers of these models, where a backend or a precision has to know them: fsdp, Apex.
        methods: further methods that run through the engine as forward does, such as "loss" or "encode".
        restore: whether a model whose weights were spread over the ranks (fsdp) is made whole again at the end.
        **options: for this block only, as in `distributed`: `backend`, `amp`, `amp_engine`, `wrap`, `verify_every`; in
            a script that no decorator runs also `gpus`, `seed`, `timeout` and the others.

    Yields:
        The model, or a tuple of the models, that it was given.

    Raises:
        ConfigError: a request or a model that cannot work.
        SyncError: ranks that hold different models.
    """
    named = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    chosen = methods_of(models, (methods,) if isinstance(methods, str) else tuple(methods))
    admit(models)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(_run({name: value for name, value in options.items() if value is not None}))
        (context.active() or run).told.add(IN_BLOCK)
        _refuse_comparing_parts(run)
        if run.config.seed is not None and run.world.world_size > 1:
            split_streams(seed=run.config.seed, rank=run.world.rank)
        if run.config.wrap is not None or not run.config.backend.places_model:
            for model in models:
                model.to(run.device)
        session = stack.enter_context(_precision(run, models, named))
        build = _builder(run, optimizers=named, restore=restore)
        line = StartLine(run, named)
        for model, found in zip(models, chosen, strict=True):
            inner = Inner(model, found=found, session=session)
            block = Block(inner, run=run, build=build, on_rebuilt=lambda: session.bind(models), start_line=line)
            stack.enter_context(block.running())
        session.bind(models)
        yield models[0] if len(models) == 1 else models


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let backward accumulate gradients without sending them: for all but the last micro-batch of a step.

        for i, (x, y) in enumerate(micro_batches):
            with no_sync(model) if i < last else contextlib.nullcontext():
                (loss_of(model(x), y) / len(micro_batches)).backward()
        optimizer.step()

    It goes around forward and backward; a backward inside whose forward was outside is refused.

    Args:
        model: one that is in a `parallel_model` block; for any other model there is nothing to do.
    """
    route = route_of(model)
    return contextlib.nullcontext() if route is None else route.director.no_sync()


def _run(options: dict[str, Any]) -> contextlib.AbstractContextManager[Runtime]:
    """The run this block is part of, with what the block asks for itself; outside of one, a run of its own."""
    outer = context.active()
    if outer is not None:
        return contextlib.nullcontext(_within(outer, options)) if options else contextlib.nullcontext(outer)
    world, hardware = detect(os.environ), probe()
    if "backend" not in options:
        # As ever in torch: without processes of its own, a script that sees several GPUs spreads batches over them.
        options["backend"] = "dp" if world is None and hardware.count > 1 else "ddp"
    layout = lay_out(Config.parse(**options).merged(os.environ), hardware, world)
    if world is None and layout.world_size > 1:
        raise _nobody_started(layout)
    return context.activate(Runtime(world or World(), layout))


def _within(outer: Runtime, options: dict[str, Any]) -> Runtime:
    """A run as one of its blocks wants it: other ways to compute, on the same processes and devices."""
    config = outer.config.changed(**options)
    layout = lay_out(config, probe(), outer.world)
    if layout.devices[outer.world.local_rank] != outer.devices or layout.num_nodes != outer.layout.num_nodes:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ConfigError(
            f"parallel_model({given}) inside a run on {', '.join(map(str, outer.devices))}",
            why="processes and their devices are the run's, chosen before this block",
            fix="say it where the run starts: in @distributed(...), or in the outer parallel_model",
        )
    return Runtime(outer.world, layout)


def _refuse_comparing_parts(run: Runtime) -> None:
    if run.config.verify_every and run.config.backend.shards_gradients and run.world.world_size > 1:
        raise ConfigError(
            f"verify_every={run.config.verify_every} with backend={run.config.backend.name!r}",
            why="each rank holds another part of the parameters: there is nothing that should be equal",
            fix="drop verify_every=",
        )


def _nobody_started(layout: Layout) -> ConfigError:
    backend = layout.config.backend.name
    return ConfigError(
        f"backend={backend!r} for {layout.world_size} processes in a script that is one process",
        why=f"{backend} needs a process per device, and nobody has started them",
        fix="decorate the training function with @distributed, start the script with torchrun, or use backend='dp' "
        "for several GPUs in one process",
    )


def _precision(
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


def _builder(run: Runtime, *, optimizers: Sequence[torch.optim.Optimizer], restore: bool) -> Callable[[Inner], Engine]:
    """What makes the engine of one model: the backend, or the user's own `wrap`."""
    wrap = run.config.wrap

    def build(inner: Inner) -> Engine:
        if wrap is None:
            return run.config.backend.engine(
                inner, world=run.world, devices=run.devices, optimizers=optimizers, restore=restore
            )
        module = wrap(inner, run.world)
        if isinstance(module, DistributedDataParallel):
            return AveragingEngine(module, local=inner, sends_buffers=module.broadcast_buffers)
        return _Wrapped(module, local=inner)

    return build


class _Wrapped(LocalEngine):
    """A module of the user's, whose ways nobody here knows: not watched, but by `verify_every`."""

    def __init__(self, module: nn.Module, *, local: nn.Module) -> None:
        super().__init__(module)
        self.local = local

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        own = getattr(self.module, "no_sync", None)
        return contextlib.nullcontext() if own is None else own()
