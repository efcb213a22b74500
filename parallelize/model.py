"""parallel_model: context manager in which a model's forward and backward run in parallel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from parallelize.agreement.fingerprint import require_same_model
from parallelize.agreement.random_numbers import random_numbers_per_rank
from parallelize.agreement.unsynced_training import warn_if_unsynced
from parallelize.backends.broadcast import broadcast_from_rank_0
from parallelize.backends.logical import PartsOfBlock, same_bits
from parallelize.block.block import Block
from parallelize.block.context import ModelContext, model_context
from parallelize.block.models import LeafTensor, check_models
from parallelize.cluster.devices import probe
from parallelize.cluster.environment import detect
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import compute_layout
from parallelize.data.forgotten import telling_forgotten_loaders
from parallelize.errors import ConfigError
from parallelize.gradients.averaging import Average
from parallelize.plugins.base import Engine, Inner, LocalEngine, Reduction, Session
from parallelize.plugins.options import choice, flag
from parallelize.run import context
from parallelize.run.context import Runtime
from parallelize.run.rng import seed_generators
from parallelize.torch_patches.compile import exclude_package
from parallelize.torch_patches.forward import route_of
from parallelize.torch_patches.module_tensors import all_buffers, all_named_parameters, all_parameters

__all__ = ["no_sync", "parallel_model"]

M = TypeVar("M", bound=nn.Module)
N = TypeVar("N", bound=nn.Module)


@overload
def parallel_model(model: M, /, **options: Any) -> ModelContext[M]: ...
@overload
def parallel_model(model: M, other: N, /, **options: Any) -> ModelContext[tuple[M, N]]: ...
@overload
def parallel_model(
    *models: nn.Module | torch.Tensor, **options: Any
) -> ModelContext[tuple[nn.Module | torch.Tensor, ...]]: ...
@model_context
def parallel_model(
    *models: nn.Module | torch.Tensor,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    methods: str | Iterable[str] = (),
    restore: bool = True,
    average: Average = "ranks",
    buffers: Literal["rank0", "mean"] | None = None,
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
    to this process's device. Optimizers may be created before or inside the block, and go on after it. After the block,
    also after an exception, the model is a plain model again, with the trained weights, on the training device.

    Under fsdp each rank keeps and updates its shards of the parameters, and the user's Parameters stand for the full
    ones: they keep their identity and shape, are gathered where a full tensor is needed, and what is written to them
    reaches the shards (as rank 0 has it, random numbers included). All ranks have to use them together. After the block
    they have full values where the model came from; after an exception they stay sharded.

    A gradient is averaged whichever path has produced it: `model.encoder(x)`, a method that does not call forward, a
    functional call, several backward passes. What no backward accumulates, such as a gradient that was assigned, is
    compared across ranks at the step, and raises SyncError if it differs; parameters are compared when the block ends.
    A forward under `torch.no_grad()` runs no collective, so a single rank may evaluate.

    Every rank draws its own random numbers in the block, for dropout masks, noise and augmentation: global generators
    (torch, random, numpy) with equal states on the ranks, as a decorated function and a seed leave them, are split when
    the block begins, reproducibly: rank 0 draws the numbers of one process, the other ranks get new seeds. Numbers that
    have to be equal on all ranks (random_split, the order of a list or of an iterable dataset, a decision to skip a
    layer or a collective) are drawn outside of the block, where all ranks draw rank 0's numbers again, or from a
    generator with its own seed. A seed set inside the block is the same on all ranks.

    A warning says if the inputs of the first step are bitwise equal on all ranks, which then do the work of one: a
    loader is not wrapped in `shard_loader`, or each rank seeds a generator of its own alike.

    The block works in a decorated function, in a process started by torchrun or srun, and in a plain script. A plain
    script is one process; if it sees several GPUs, `backend` defaults to "dp".

    Args:
        *models: one or several models, and leaf tensors that are trained beside them, such as a temperature; under
            ddp and dp models may share parameters.
        optimizers: optimizers of these models, which Apex needs; all other engines need none.
        methods: names of methods that run as forward does, such as "loss" or "encode": split over devices (dp,
            balanced), under autocast, with inputs moved to the device.
        restore: whether sharded parameters (fsdp) are gathered into full ones when the block ends. False: each rank
            keeps its shards, for models that no rank can hold; `state_dict()`, `save` and calls of the model work, on
            all ranks together.
        average: how gradients of the ranks are averaged. "ranks": with equal weights. "sum": they are added, for losses
            that are sums (`reduction="sum"`). "tokens": by the number of targets over which each loss is a mean, such
            as a cross entropy with `ignore_index` over unequal padding, or with class weights; each backward pass is
            that of the mean over the targets of all ranks. The count is read from torch's reductions, and a sum divided
            by a number counts as a mean over that number; a loss whose count is not known is refused. So is one of
            terms that average over different numbers, as of boxes and anchors: under "ranks", each of them is that of
            all ranks if its sum is divided by `all_reduce(float(count), "mean")` (and no loader has tail="weighted").
        buffers: which values floating buffers, such as batch norm's statistics, get on all ranks in training: "rank0":
            rank 0's, before each forward; "mean": their mean, after each forward, which is exact for running means,
            DINO's centre and the statistics of a codebook. (Batch norm still normalizes by this rank's batch;
            torch.nn.SyncBatchNorm.convert_sync_batchnorm makes it exact.) None: rank 0's, with a warning if others
            differ at the end of the block.
        split_rng: whether global generators with equal states are split over the ranks; with `seed=` they always are.
            False: they stay equal, so that dropout masks and augmentation are those of rank 0 on all ranks.
        **options: options of `distributed`, for this block only: `backend`, `amp`, `amp_engine`, `wrap`,
            `verify_every`; outside of a decorated function also all others, such as `gpus` and `seed`.

    Yields:
        The model, or a tuple of the models.

    Raises:
        ConfigError: the options are invalid, or do not support a model.
        SyncError: the ranks pass different models.
    """
    given_optimizers = _parse_optimizers(optimizers)
    names = _parse_methods(methods)
    restore, split_rng = flag("restore", restore), flag("split_rng", split_rng)
    modules: list[Any] = [
        LeafTensor(each) if isinstance(each, torch.Tensor) and each.is_leaf and each.requires_grad else each
        for each in models
    ]
    _require_choice("average", average, ("ranks", "sum", "tokens"))
    _require_choice("buffers", "rank0" if buffers is None else buffers, ("rank0", "mean"))
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(_enter_run({name: value for name, value in options.items() if value is not None}))
        initializes = run.config.wrap is None and run.config.backend.shards_gradients
        check_models(modules, names, accepts_meta=initializes)
        stack.enter_context(_in_block(context.active() or run))
        _refuse_apex(run, average)
        _refuse_for_logical(run, modules, average)
        _refuse_shared(run, modules)
        if buffers == "mean" and run.config.wrap is not None:
            raise ConfigError(
                "buffers='mean' with wrap=",
                why="its module broadcasts rank 0's buffers",
                fix="drop buffers=, or use backend='ddp'",
            )
        for model in modules:
            if run.config.wrap is not None or not run.config.backend.places_model or isinstance(model, LeafTensor):
                model.to(run.device)
        exclude_package()
        parts = stack.enter_context(same_bits(run))
        session = stack.enter_context(_open_precision(run, modules, given_optimizers))
        block = Block(
            run,
            modules,
            session=session,
            average=average,
            buffers=buffers,
            methods=names,
            build=_engine_factory(run, parts, restore=restore, average=average),
        )
        stack.enter_context(block.running())  # after the session has opened: Apex replaces forward
        session.bind(modules)
        stack.enter_context(random_numbers_per_rank(run, split=split_rng))
        yield models[0] if len(models) == 1 else models


def _parse_optimizers(optimizers: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that `optimizers=` lists; one stands for a list of one."""
    listed = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    for optimizer in listed:
        # Apex, and libraries that wrap optimizers, have classes that are no torch.optim.Optimizer.
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(
                f"optimizers={optimizers!r}",
                why=f"{optimizer!r} is no optimizer",
                fix="pass optimizers=optimizer, or optimizers=[first, second]",
            )
    return listed


def _parse_methods(methods: Any) -> tuple[str, ...]:
    """Return the names that `methods=` lists; one stands for a list of one."""
    is_list = isinstance(methods, Iterable) and not isinstance(methods, str)
    listed = tuple(methods) if is_list else (methods,)
    if not all(isinstance(method, str) for method in listed):
        raise ConfigError(
            f"methods={methods!r}",
            why="it does not name methods",
            fix="pass names, as in methods=['encode', 'loss']",
        )
    return listed


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    choice(*choices)(name, value)


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Accumulate gradients without averaging them over ranks, for all but the last micro-batch of a step.

        for i, (x, y) in enumerate(micro_batches):
            with no_sync(model) if i < last else contextlib.nullcontext():
                (loss_of(model(x), y) / len(micro_batches)).backward()
        optimizer.step()

    A backward pass in the context leaves its gradients local; the next one outside of it averages all that has
    accumulated. Under fsdp each pass averages, with the same result: else full gradients would have to be kept.

    Args:
        model: a model in a `parallel_model` block; for any other model, the context does nothing.
    """
    route = route_of(model)
    return contextlib.nullcontext() if route is None else route.owner.no_sync()


@contextlib.contextmanager
def _in_block(run: Runtime) -> Iterator[None]:
    """Mark the run as being in a block; in its outermost block, tell of forgotten loaders."""
    if run.state.is_in_block:
        yield
        return
    run.state.is_in_block = True
    try:
        with telling_forgotten_loaders(run):
            yield
    finally:
        run.state.is_in_block = False


def _enter_run(options: dict[str, Any]) -> contextlib.AbstractContextManager[Runtime]:
    """Return a context that yields the block's Runtime: that of the surrounding run, or else a new one."""
    outer = context.active()
    if outer is not None:
        return contextlib.nullcontext(_run_of_block(outer, options) if options else outer)
    world, hardware = detect(os.environ), probe()
    if "backend" not in options:
        # A single process that sees several GPUs splits batches over them, as with torch.nn.DataParallel.
        options["backend"] = "dp" if world is None and hardware.count > 1 else "ddp"
    layout = compute_layout(Config.parse(**options).merged(os.environ), hardware, world)
    if world is None and layout.world_size > 1:
        backend = layout.config.backend.name
        raise ConfigError(
            f"backend={backend!r} with {layout.world_size} processes in a script that runs as one process",
            why=f"{backend} needs one process per device, and no launcher has started these processes",
            fix="decorate the training function with @distributed, start the script with torchrun, or use "
            "backend='dp' for several GPUs in one process",
        )
    if layout.config.seed is not None:
        seed_generators(layout.config.seed)
    return _new_run(Runtime(world or World(), layout, loader_weights=context.weights_of_script))


@contextlib.contextmanager
def _new_run(run: Runtime) -> Iterator[Runtime]:
    with context.activate(run), warn_if_unsynced(run.state):
        yield run


def _run_of_block(outer: Runtime, options: dict[str, Any]) -> Runtime:
    """Return a Runtime with the options of one block, on the processes and devices of the surrounding run."""
    config = outer.config.changed(**options)
    layout = compute_layout(config, probe(), outer.world)
    is_changed = config.logical != outer.config.logical or layout.num_nodes != outer.layout.num_nodes
    if is_changed or layout.devices[outer.world.local_rank] != outer.devices:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ConfigError(
            f"parallel_model({given}) inside a run on {', '.join(map(str, outer.devices))}",
            why="the processes, devices and parts of a run cannot change inside it",
            fix="set these options where the run starts: in @distributed(...), or in the outer parallel_model",
        )
    if "seed" in options and config.seed is not None:  # else the run has seeded its generators
        seed_generators(config.seed)
    return Runtime(outer.world, layout, loader_weights=outer.loader_weights)


def _refuse_for_logical(run: Runtime, models: Sequence[nn.Module], average: Average) -> None:
    what = f"average={average!r}" if average != "ranks" else "a tensor that is trained beside the models"
    if run.config.logical and (average != "ranks" or any(isinstance(each, LeafTensor) for each in models)):
        raise ConfigError(
            f"logical={run.config.logical} with {what}",
            why="only the gradients of means over samples, through a model's forward, are divided into parts",
            fix="use losses that are means over samples, and parameters of a module",
        )


def _refuse_apex(run: Runtime, average: Average) -> None:
    if average != "ranks" and run.config.amp is not None and run.config.amp_engine.name == "apex":
        raise ConfigError(
            f"average={average!r} with amp_engine='apex'",
            why="Apex has copied the averaged gradients to its master parameters before they could be weighted",
            fix="use amp_engine='native'",
        )


def _refuse_shared(run: Runtime, models: Sequence[nn.Module]) -> None:
    """Refuse parameters that several models have, where each model shards or casts its own."""
    amp, backend = run.config.amp, run.config.backend
    reasons = {
        f"backend={backend.name!r}": backend.shards_gradients and run.world.world_size > 1,
        f"amp level {amp and amp.level}": amp is not None and amp.level in {"O2", "O3"},
        f"amp_engine={run.config.amp_engine.name!r}": amp is not None and run.config.amp_engine.name != "native",
    }
    option = next((name for name, is_refused in reasons.items() if is_refused), None)
    seen: dict[int, tuple[nn.Module, str]] = {}
    for model in models if option is not None else ():
        for name, each in all_named_parameters(model):
            owner, text = seen.setdefault(id(each), (model, f"{name} of {type(model).__name__}"))
            if owner is not model:
                raise ConfigError(
                    f"{text}, which another model of the block shares, with {option}",
                    why="each model shards or casts its own parameters",
                    fix="put the models into one nn.Module, pass that, and name its methods in methods=[...]",
                )


def _open_precision(
    run: Runtime, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> contextlib.AbstractContextManager[Session]:
    if run.config.amp is None:
        return contextlib.nullcontext(Session())
    return run.config.amp_engine().open(
        amp=run.config.amp,
        models=models,
        optimizers=optimizers,
        device=run.device,
        world=run.world,
        sharded=run.config.backend.shards_gradients,
    )


def _engine_factory(
    run: Runtime, parts: PartsOfBlock | None, *, restore: bool, average: Average
) -> Callable[[Inner], Engine]:
    """Return a function that builds the engine of a model, with the backend or with the user's `wrap`."""
    wrap = run.config.wrap

    def build(inner: Inner) -> Engine:
        if run.world.world_size > 1:
            require_same_model(inner.model)
        if isinstance(inner.model, LeafTensor):
            return _TensorEngine(inner, run)
        inner.parts = parts
        if wrap is None:
            return run.config.backend.engine(inner, world=run.world, devices=run.devices, restore=restore)
        module = wrap(inner, run.world)
        if average != "ranks" and not isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"average={average!r} with a wrap= that returns a {type(module).__name__}",
                why="only DistributedDataParallel is known to average gradients over the ranks with equal weights",
                fix="return a DistributedDataParallel, or drop average=",
            )
        return _WrapEngine(module, local=inner, is_verified=bool(run.config.verify_every))

    return build


class _TensorEngine(LocalEngine):
    """Engine of a tensor that is trained beside the models, under any backend."""

    def __init__(self, inner: Inner, run: Runtime) -> None:
        super().__init__(inner)
        if run.world.world_size > 1:
            self.reduction = Reduction()
            broadcast_from_rank_0(list(all_parameters(inner)))


class _WrapEngine(LocalEngine):
    """Engine of a module that the user's `wrap` returns, which averages gradients by itself.

    A DistributedDataParallel is known to keep replicas, which are compared at the end of the block; those of another
    module are if `verify_every` asks for it.
    """

    local: nn.Module

    def __init__(self, module: nn.Module, *, local: nn.Module, is_verified: bool) -> None:
        super().__init__(module)
        self.local, self._is_verified = local, is_verified

    @property
    @override
    def is_replica(self) -> bool:
        return self._is_verified or isinstance(self.module, DistributedDataParallel)

    @override
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        no_sync = getattr(self.module, "no_sync", None)
        return contextlib.nullcontext() if no_sync is None else no_sync()

    @override
    def close(self, *, failed: bool) -> None:
        if isinstance(self.module, DistributedDataParallel):
            # Otherwise the reducer's hooks stay on the AccumulateGrad nodes until the reducer is freed.
            self.module.reducer._remove_autograd_hooks()
            if not failed and self.module.broadcast_buffers:
                broadcast_from_rank_0(list(all_buffers(self.local)))
