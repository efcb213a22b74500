"""One parallel_model block: engines run its models, and gradients are averaged and checked.

    with parallel_model(model):     Block.running
                                        each model   its engine is built, which gives it rank 0's
                                                     values; its route is installed
                                        several ranks: gradients are averaged, copies are verified
        model(x)                    ModelInBlock._call, on the way to the engine
        loss.backward()             Averaging weights the loss, Reducer averages the gradients
        optimizer.step()            FirstStep, once; Verification
    the end of the block            what was begun ends in reverse order: the copies are compared,
                                    hooks and routes leave, engines undo what they have changed. If
                                    the block has raised, no rank waits for another one.

The words of this room:

    model       the user's nn.Module, or a LeafTensor for a tensor of the user's
    inner       a module around a model, whose forward calls the user's forward
    engine      runs inner: on this rank's device, on several, or together with the other ranks
    route       sends the calls of a model's methods to its engine
    replicas    what each rank holds a copy of: the model, or a part of it
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from parallelize.agreement.batch_losses import BatchLosses
from parallelize.agreement.fingerprint import warn_if_trained_apart
from parallelize.agreement.first_step import FirstStep
from parallelize.agreement.verification import Verification
from parallelize.block.model_in_block import ModelInBlock
from parallelize.gradients.averaging import Average, Averaging
from parallelize.gradients.batch_weights import Weight, refusing_lost_weights
from parallelize.gradients.reducer import Reducer
from parallelize.plugins.base import Engine, Inner, Reduction, Session
from parallelize.run.context import Runtime
from parallelize.run.startup_summary import StartupSummary
from parallelize.torch_patches.backward import Order, subscribed
from parallelize.torch_patches.forward import packed_lengths_on_cpu, routed_models


@dataclass(frozen=True)
class BlockOptions:
    """Options of parallel_model that are those of one block.

    Args:
        average: how gradients of the ranks are averaged.
        buffers: whose floating buffers all ranks get; None: rank 0's, with a warning if others
            differ.
        methods: names of methods that are routed beside forward.
    """

    average: Average
    buffers: Literal["rank0", "mean"] | None
    methods: Sequence[str]


class Block:
    """The models of one block, and what they share.

    Args:
        run: runtime of this process: config, world and device.
        models: those that were passed, with a LeafTensor for each tensor.
        session: mixed precision of the block.
        options: those of the block.
        build_engine: builds the engine of a model; called once for each, in their order.

    Attributes:
        averaging: weights the backward passes.
        summary: logs one line with the first forward.
        first_step: compares the inputs of the ranks before the first optimizer step.
        batch_losses: warns of a loss that compares samples, up to that step.
        reducer: averages gradients over the ranks; None: there is one rank, or the block has not
            begun.
        verification: compares the copies of the ranks; None as for `reducer`.
        is_over: whether the block has ended without an exception.
    """

    def __init__(
        self,
        run: Runtime,
        models: Sequence[nn.Module],
        *,
        session: Session,
        options: BlockOptions,
        build_engine: Callable[[Inner], Engine],
    ) -> None:
        self.run = run
        self.models = models
        self.session = session
        self.options = options
        self.build_engine = build_engine
        self.averaging = Averaging(options.average, run=run, models=models)
        self.summary = StartupSummary(run)
        # Models of an inner block may be called with equal inputs, such as features of all ranks.
        is_inner = bool(routed_models())
        self.first_step = FirstStep(models, is_over=run.world.world_size == 1 or is_inner)
        self.batch_losses = BatchLosses(run, adds_up=options.average != "ranks")
        self.reducer: Reducer | None = None
        self.verification: Verification | None = None
        self.is_over = False
        self._models_in_block: list[ModelInBlock] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Route the models to their engines in the context; they are plain models after it."""
        has_several_ranks = self.run.world.world_size > 1
        with contextlib.ExitStack() as stack:
            if self.run.device.type != "cpu":
                stack.enter_context(packed_lengths_on_cpu())
            if has_several_ranks and self.run.config.wrap is None:
                # Before engines are built: they give the models rank 0's values.
                warn_if_trained_apart(self.models)
            for model in self.models:
                model_in_block = ModelInBlock(self, model)
                self._models_in_block.append(model_in_block)
                stack.enter_context(model_in_block.running())
            if has_several_ranks:
                stack.enter_context(self._averaging_over_ranks())
            stack.enter_context(self.averaging.active())
            yield
        self.is_over = True

    @contextlib.contextmanager
    def _averaging_over_ranks(self) -> Iterator[None]:
        """Average the gradients of replicas; prove at steps and at the end that they are equal."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(refusing_lost_weights(self.run.loader_weights))
            reducer = Reducer(self._reductions())
            stack.callback(reducer.close)
            if reducer.models:
                stack.enter_context(subscribed(Order.REDUCE, reducer.around_backward))
            verification = Verification(self, reducer)
            stack.enter_context(verification.active())
            stack.enter_context(self.batch_losses.active())
            self.reducer = reducer
            self.verification = verification
            yield

    @property
    def warns_of_buffers(self) -> bool:
        """Whether buffers that differ between the ranks are a surprise: nobody has chosen it."""
        if self.options.buffers is not None:
            return False
        # An option of the backends that keep replicas; the others have none that could differ.
        keeps_alike: bool = getattr(self.run.config.backend, "broadcast_buffers", True)
        return keeps_alike

    def loss_weight(self) -> Weight:
        """Return the weight of this rank's latest loss in the mean over the ranks."""
        return self.averaging.loss_weight()

    def before_first_step(self) -> None:
        """Do the checks that end with the first optimizer step; a collective.

        The check of losses that compare samples ends, unless the step has a closure. The ranks
        compare the inputs of their forwards, and how many targets their losses average over.
        """
        self.batch_losses.before_first_step()
        self.first_step.compare(self.averaging.end_first_step())

    def replicas(self) -> list[nn.Module]:
        """Return what each rank holds a copy of; some engines know it after the first forward."""
        return [model.replicas for model in self._models_in_block if model.engine.is_replica]

    def _reductions(self) -> list[tuple[nn.Module, Reduction]]:
        """Return the replicas whose gradients the reducer averages, with the way of each."""
        reductions = []
        for model_in_block in self._models_in_block:
            reduction = model_in_block.engine.reduction
            if reduction is not None:
                reductions.append((model_in_block.replicas, reduction))
        return reductions

    def refresh(self) -> None:
        """Follow parameters that were added or replaced."""
        if self.reducer is not None:
            self.reducer.refresh(self._reductions())
        self.session.bind(self.models)
