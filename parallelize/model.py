"""parallel_model: context manager in which a model's forward and backward run in parallel.

What is entered, from top to bottom, and undone from bottom to top:

    run_of_block              the run of the surrounding function, or one for this block
    check_models, refuse_...  everything that can be refused, before anything is changed
    set_data_ranks            (stays: the ranks of a tensor parallel model read the same batches)
    _in_block                 forgotten loaders are told, steps outside of blocks are not
    _move_to_device           (stays: the trained model is on the training device)
    same_bits                 logical= only
    _open_precision           may cast weights; Apex replaces forward
    Block.running             engines, routes, averaging and verification: see block/block.py
    random_numbers_per_rank   the ranks draw numbers of their own
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn

from parallelize.agreement.random_numbers import random_numbers_per_rank
from parallelize.backends.logical import same_bits
from parallelize.block.block import Block, BlockOptions
from parallelize.block.context import ModelContext, model_context
from parallelize.block.engines import build_engine
from parallelize.block.models import LeafTensor, as_model, check_models
from parallelize.block.refusals import refuse_contradictions
from parallelize.block.run_of_block import run_of_block
from parallelize.block.tensor_parallel import is_tensor_parallel, set_data_ranks
from parallelize.data.forgotten import telling_forgotten_loaders
from parallelize.errors import ConfigError
from parallelize.gradients.averaging import Average
from parallelize.plugins.base import PrecisionRequest, Session
from parallelize.plugins.options import choice, flag
from parallelize.run.context import Runtime, active_or
from parallelize.torch_patches.compile import exclude_package
from parallelize.torch_patches.forward import route_of

M = TypeVar("M", bound=nn.Module)
N = TypeVar("N", bound=nn.Module)


@overload
def parallel_model(model: M, /, **options: Any) -> ModelContext[M]: ...
@overload
def parallel_model(model: M, second: N, /, **options: Any) -> ModelContext[tuple[M, N]]: ...
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
    """Run models in parallel inside a `with` block.

    The model objects, and the way to call them, stay the same.

        with parallel_model(model):
            for x, y in shard_loader(loader):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()

    `model = parallel_model(model).start()` begins the block without `with`: it ends when the
    decorated function has returned.

    In the block, `model(x)` runs in parallel and `backward` averages gradients over all processes.
    For a loss that is a mean over equally many targets on every rank, the result is that of one
    process that trains on the concatenated batches; for other losses, `average=` makes it so. All
    ranks start from rank 0's parameters. The model is moved to this process's device. Optimizers
    may be created before or inside the block, and go on after it. After the block, also after an
    exception, the model is a plain model again, with the trained weights, on the training device.

    Under fsdp each rank keeps and updates its shards of the parameters, and the user's Parameters
    stand for the full ones: they keep their identity and shape, are gathered where a full tensor is
    needed, and what is written to them reaches the shards (as rank 0 has it, random numbers
    included). All ranks have to use them together. After the block they have full values where the
    model came from; after an exception they stay sharded.

    A gradient is averaged whichever path has produced it: `model.encoder(x)`, a method that does
    not call forward, a functional call, several backward passes. What no backward accumulates, such
    as a gradient that was assigned, is compared across ranks at the step, and raises SyncError if
    it differs; parameters are compared when the block ends. A forward under `torch.no_grad()` runs
    no collective, so a single rank may evaluate.

    Every rank draws its own random numbers in the block, for dropout masks, noise and augmentation:
    global generators (torch, random, numpy) with equal states on the ranks, as a decorated function
    and a seed leave them, are split when the block begins, reproducibly: rank 0 draws the numbers
    of one process, the other ranks get new seeds. Numbers that have to be equal on all ranks
    (random_split, the order of a list or of an iterable dataset, a decision to skip a layer or a
    collective) are drawn outside of the block, where all ranks draw rank 0's numbers again, or from
    a generator with its own seed. A seed set inside the block is the same on all ranks.

    A model that is tensor parallel already, whose parameters are DTensors, is taken as it is under
    ddp: the ranks of its mesh read the same batches and draw the same random numbers, and gradients
    are averaged over the ranks that hold the same part.

    A warning says if the inputs of the first step are bitwise equal on all ranks, which then do the
    work of one: a loader is not wrapped in `shard_loader`, or each rank seeds a generator of its
    own alike.

    The block works in a decorated function, in a process started by torchrun or srun, and in a
    plain script. A plain script is one process; if it sees several GPUs, `backend` defaults to
    "dp".

    Args:
        *models: one or several models, and leaf tensors that are trained beside them, such as a
            temperature; under ddp and dp models may share parameters.
        optimizers: optimizers of these models, which Apex needs; all other engines need none.
        methods: names of methods that run as forward does, such as "loss" or "encode": split over
            devices (dp, balanced), under autocast, with inputs moved to the device.
        restore: whether sharded parameters (fsdp) are gathered into full ones when the block ends,
            with the states of optimizers, if all ranks have room for them. False: each rank keeps
            its shards, for models that no rank can hold; `state_dict()`, `save` and calls of the
            model work, on all ranks together.
        average: how gradients of the ranks are averaged. "ranks": with equal weights. "sum": they
            are added, for losses that are sums (`reduction="sum"`). "tokens": by the number of
            targets over which each loss is a mean, such as a cross entropy with `ignore_index` over
            unequal padding, or with class weights; each backward pass is that of the mean over the
            targets of all ranks. The count is read from torch's reductions, and a sum divided by a
            number counts as a mean over that number; a loss whose count is not known is refused.
        buffers: which values floating buffers, such as batch norm's statistics, get on all ranks in
            training: "rank0": rank 0's, before each forward; "mean": their mean, after each
            forward, which is exact for running means, DINO's centre and the statistics of a
            codebook. (Batch norm still normalizes by this rank's batch;
            torch.nn.SyncBatchNorm.convert_sync_batchnorm makes it exact.) None: rank 0's, with a
            warning if others differ at the end of the block.
        split_rng: whether global generators with equal states are split over the ranks; with
            `seed=` they always are. False: they stay equal, so that dropout masks and augmentation
            are those of rank 0 on all ranks.
        **options: options of `distributed`, for this block only: `backend`, `amp`, `amp_engine`,
            `wrap`, `verify_every`; outside of a decorated function also all others, such as `gpus`
            and `seed`.

    Yields:
        The model, or a tuple of the models.

    Raises:
        ConfigError: the options are invalid, or do not support a model.
        SyncError: the ranks pass different models.
    """
    given_optimizers = _parse_optimizers(optimizers)
    block_options = _parse_block_options(average, buffers, methods)
    restore, split_rng = flag("restore", restore), flag("split_rng", split_rng)
    modules = [as_model(model) for model in models]
    options = {name: value for name, value in options.items() if value is not None}
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(run_of_block(options, os.environ))
        # Nothing is changed until all is checked.
        initializes = run.config.wrap is None and run.config.backend.shards_gradients
        check_models(modules, block_options.methods, accepts_meta=initializes)
        is_outermost = not active_or(run).state.is_in_block
        set_data_ranks(active_or(run), modules, is_outermost=is_outermost)
        refuse_contradictions(run, modules, average=average, buffers=buffers)
        stack.enter_context(_in_block(active_or(run)))
        # The models get their devices, then their dtypes, then their engines.
        for module in modules:
            _move_to_device(module, run)
        exclude_package()
        parts = stack.enter_context(same_bits(run))
        session = stack.enter_context(_open_precision(run, modules, given_optimizers))
        build = functools.partial(
            build_engine, run=run, parts=parts, restore=restore, average=average
        )
        block = Block(run, modules, session=session, options=block_options, build_engine=build)
        # After the session has opened: Apex replaces forward, which the block routes.
        stack.enter_context(block.running())
        session.bind(modules)
        # Last: what the entry of the block draws is drawn alike on all ranks.
        stack.enter_context(random_numbers_per_rank(run, split=split_rng))
        if len(models) == 1:
            yield models[0]
        else:
            yield models


def _move_to_device(module: nn.Module, run: Runtime) -> None:
    """Move a model to the device of this process, unless the backend places its parameters."""
    is_placed_by_backend = run.config.wrap is None and run.config.backend.places_model
    if not is_placed_by_backend or isinstance(module, LeafTensor):
        module.to(run.device)


def _open_precision(
    run: Runtime, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> contextlib.AbstractContextManager[Session]:
    """Return the mixed precision of a block; without `amp=`, a session that changes no dtype."""
    if run.config.amp is None:
        return contextlib.nullcontext(Session())
    request = PrecisionRequest(
        amp=run.config.amp,
        models=models,
        optimizers=optimizers,
        device=run.device,
        world=run.world,
        shards_gradients=run.config.backend.shards_gradients
        or any(map(is_tensor_parallel, models)),
    )
    return run.config.amp_engine().open(request)


def _parse_block_options(average: Any, buffers: Any, methods: Any) -> BlockOptions:
    """Return the options of the block.

    Raises:
        ConfigError: one has a value that does not exist.
    """
    choice("ranks", "sum", "tokens")("average", average)
    if buffers is not None:
        choice("rank0", "mean")("buffers", buffers)
    return BlockOptions(average, buffers, _parse_methods(methods))


def _parse_optimizers(optimizers: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that `optimizers=` lists; one stands for a list of one."""
    listed = (optimizers,)
    if isinstance(optimizers, Iterable):
        listed = tuple(optimizers)
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
    listed = (methods,)
    if isinstance(methods, Iterable) and not isinstance(methods, str):
        listed = tuple(methods)
    if not all(isinstance(method, str) for method in listed):
        raise ConfigError(
            f"methods={methods!r}",
            why="it does not name methods",
            fix="pass names, as in methods=['encode', 'loss']",
        )
    return listed


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Accumulate gradients without averaging them over ranks.

    It is for all but the last micro-batch of a step:

        for i, (x, y) in enumerate(micro_batches):
            with no_sync(model) if i < last else contextlib.nullcontext():
                (loss_of(model(x), y) / len(micro_batches)).backward()
        optimizer.step()

    A backward pass in the context leaves its gradients local; the next one outside of it averages
    all that has accumulated. Under fsdp each pass averages, with the same result: else full
    gradients would have to be kept.

    Args:
        model: a model in a `parallel_model` block; for any other model, the context does nothing.
    """
    route = route_of(model)
    if route is None:
        return contextlib.nullcontext()
    return route.owner.no_sync()


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
