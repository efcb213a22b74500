"""One parallel_model block: engines run its models, and gradients are averaged and checked.

    with parallel_model(model):     Block.running. For each model, its engine is built, which gives
                                    the model rank 0's values, and its route is installed. With
                                    several ranks, the reducer and the verification begin.
        model(x)                    ModelInBlock._call, on the way to the engine
        loss.backward()             Averaging weights the loss, Reducer averages the gradients
        optimizer.step()            Verification compares the gradients that Reducer has not
                                    averaged. At the first step, FirstStep compares the inputs.
    the end of the block            Verification compares the copies of the ranks. Then hooks and
                                    routes are removed, and engines undo their changes. If the block
                                    has raised, no rank waits for another one.

The words of this room:

    model       the user's nn.Module, or a LeafTensor around a tensor of the user
    inner       a module around a model, whose forward calls the user's forward
    engine      runs inner: on this rank's device, on several, or together with the other ranks
    route       sends the calls of a model's methods to its engine
    replicas    a module of which each rank holds a copy: the model, or a part of the model
    session     the mixed precision of the block
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
    """The arguments of parallel_model that its block reads, and that no run has.

    Args:
        average: how gradients of the ranks are averaged.
        buffers: the values that floating buffers, such as batch norm's statistics, get on all
            ranks: "rank0": rank 0's; "mean": the mean over the ranks; None: rank 0's, with a
            warning at the end of the block if the ranks differ.
        methods: names of methods that run through the engine, as forward does.
    """

    average: Average
    buffers: Literal["rank0", "mean"] | None
    methods: Sequence[str]


class Block:
    """The models of one block, and what they share.

    Args:
        run: the run in this process: config, world and device.
        models: the user's models, and a LeafTensor for each of the user's tensors.
        session: the mixed precision of the block.
        options: the options of the block.
        build_engine: builds the engine of a model. It is a collective, so that all ranks call it
            in the order of `models`.

    Attributes:
        averaging: weights the losses of backward passes.
        summary: logs one line at the first forward with gradients.
        first_step: compares the inputs of the ranks before the first optimizer step.
        batch_losses: warns, up to the first optimizer step, of a loss that compares the samples of
            a batch with each other.
        reducer: averages gradients over the ranks; None: there is one rank, or the engines are not
            built yet.
        verification: compares the copies of the ranks; None: as for `reducer`.
        is_over: whether the block has ended without an exception. A backward pass that comes later
            is refused.
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
        # In a block inside another one, all ranks may pass the same inputs on purpose, such as
        # gathered features. A warning of equal inputs would be wrong there.
        is_inner = bool(routed_models())
        self.first_step = FirstStep(models, is_over=run.world.world_size == 1 or is_inner)
        self.batch_losses = BatchLosses(run, adds_up=options.average != "ranks")
        self.reducer: Reducer | None = None
        self.verification: Verification | None = None
        self.is_over = False
        self._models_in_block: list[ModelInBlock] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Build the engines and run the models by them in the context; a collective.

        After the context, the models are plain models again.
        """
        has_several_ranks = self.run.world.world_size > 1
        with contextlib.ExitStack() as stack:
            if self.run.device.type != "cpu":
                stack.enter_context(packed_lengths_on_cpu())
            if has_several_ranks and self.run.config.wrap is None:
                # Engines of a backend give the models rank 0's values. After that, nothing would
                # show that the ranks had different values.
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
        """Average gradients in the context; check the steps in it, and the copies at its end.

        A block of several ranks enters this when all engines are built: an engine says which
        gradients the reducer averages.
        """
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
        """Whether to warn of buffers that differ: not if the user has chosen how they are kept."""
        if self.options.buffers is not None:
            return False
        # With broadcast_buffers=False, the user has asked for buffers that differ. A backend
        # without this option keeps no copies whose buffers could differ.
        keeps_alike: bool = getattr(self.run.config.backend, "broadcast_buffers", True)
        return keeps_alike

    def loss_weight(self) -> Weight:
        """Return the weight of this rank's latest loss in the mean over the ranks.

        Verification averages the loss of a closure with this weight.
        """
        return self.averaging.loss_weight()

    def before_first_step(self) -> None:
        """End the checks that last until the first optimizer step; a collective.

        Verification calls this before that step. The ranks compare the inputs of their forwards,
        and the numbers of targets over which their losses average. The check of losses that compare
        samples ends; if the step has a closure, it ends with the closure's first backward pass.
        """
        self.batch_losses.before_first_step()
        self.first_step.compare(self.averaging.end_first_step())

    def replicas(self) -> list[nn.Module]:
        """Return the modules of which each rank holds a copy, which Verification compares.

        The result may change: backend="auto" chooses its engine at the first forward.
        """
        return [model.replicas for model in self._models_in_block if model.engine.is_replica]

    def models_with_buffers(self) -> list[nn.Module]:
        """Return the models of whose buffers each rank holds a copy, which Verification compares.

        Under fsdp, a rank holds all buffers of a model, although it is no replica.
        """
        return [model.inner.model for model in self._models_in_block if model.engine.holds_buffers]

    def _reductions(self) -> list[tuple[nn.Module, Reduction]]:
        """Return (replicas, reduction) of each model whose gradients the reducer averages."""
        reductions = []
        for model_in_block in self._models_in_block:
            reduction = model_in_block.engine.reduction
            if reduction is not None:
                reductions.append((model_in_block.replicas, reduction))
        return reductions

    def refresh(self) -> None:
        """Hook the present parameters of the models, and tell them to the session.

        ModelInBlock calls this when the user has added or replaced parameters, or an engine was
        chosen. Without it, the gradients of new parameters would not be averaged.
        """
        if self.reducer is not None:
            self.reducer.refresh(self._reductions())
        self.session.bind(self.models)
