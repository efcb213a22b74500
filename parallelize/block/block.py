"""One parallel_model block: its models routed to their engines, and what averages and checks them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from parallelize.agreement.batch_losses import BatchLosses
from parallelize.agreement.fingerprint import require_same_model, warn_if_trained_apart
from parallelize.agreement.first_step import FirstStep
from parallelize.agreement.rank_consistency import run_checks
from parallelize.agreement.verification import Verification
from parallelize.backends.broadcast import broadcast_from_rank_0
from parallelize.block.models import methods_of
from parallelize.errors import SyncError
from parallelize.gradients.autograd_graph import mark_outputs, node_of
from parallelize.gradients.averaging import Average, Averaging
from parallelize.gradients.batch_weights import refusing_lost_weights
from parallelize.gradients.reducer import Reducer
from parallelize.plugins.base import Engine, Inner, Reduction, Session
from parallelize.run.containers import replace_leaves
from parallelize.run.context import Runtime, current
from parallelize.run.startup_summary import StartupSummary
from parallelize.torch_patches.backward import Order, subscribed
from parallelize.torch_patches.compile import traceable
from parallelize.torch_patches.forward import (
    Route,
    packed_lengths_on_cpu,
    routed_models,
    watching_registrations,
)
from parallelize.torch_patches.module_tensors import all_parameters

__all__ = ["Block"]


_series = itertools.count()  # of the models of all blocks, which all ranks enter in one order


class Block:
    """The models of one block.

    Args:
        run: runtime of this process: config, world and device.
        models: those that were passed, with a LeafTensor for each tensor.
        session: mixed precision of the block.
        average: how gradients of the ranks are averaged.
        buffers: whose floating buffers all ranks get; None: rank 0's, with a warning if others differ.
        methods: names of methods that are routed beside forward.
        build: builds the engine of a model.
    """

    def __init__(
        self,
        run: Runtime,
        models: Sequence[nn.Module],
        *,
        session: Session,
        average: Average,
        buffers: Any,
        methods: Sequence[str],
        build: Callable[[Inner], Engine],
    ) -> None:
        self.run, self.session, self.models = run, session, models
        self.build, self._methods, self._buffers = build, methods, buffers
        self.averaging = Averaging(average, run=run, models=models)
        self.summary = StartupSummary(run)
        # Models of an inner block may be called with equal inputs, such as features of all ranks.
        self.first_step = FirstStep(models, is_over=run.world.world_size == 1 or bool(routed_models()))
        self.batch_losses = BatchLosses(run, adds_up=average != "ranks")
        self.reducer: Reducer | None = None
        self.verification: Verification | None = None
        self.is_over = False
        self._routed: list[_RoutedModel] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Route the models to their engines inside the context; restore plain models at its end."""
        with contextlib.ExitStack() as stack:
            if self.run.device.type != "cpu":
                stack.enter_context(packed_lengths_on_cpu())
            if self.run.world.world_size > 1 and self.run.config.wrap is None:
                warn_if_trained_apart(self.models)
            for model in self.models:
                self._routed.append(_RoutedModel(self, self._inner(model)))
                stack.enter_context(self._routed[-1].running())
            if self.run.world.world_size > 1:
                self._verify(stack)
            stack.enter_context(self.averaging.active())
            yield
        self.is_over = True

    def _inner(self, model: nn.Module) -> Inner:
        originals = {name: traceable(each) for name, each in methods_of(model, self._methods).items()}
        return Inner(
            model,
            original_methods=originals,
            session=self.session,
            buffer_source=self._buffers or "rank0",
        )

    def _verify(self, stack: contextlib.ExitStack) -> None:
        """Average and verify, until the stack is closed, what each rank holds a copy of."""
        stack.enter_context(refusing_lost_weights(self.run.loader_weights))
        self.reducer = Reducer(self._reduced())
        stack.callback(self.reducer.close)
        if self.reducer.models:
            stack.enter_context(subscribed(Order.REDUCE, self.reducer.around_backward))
        verification = Verification(
            self.run,
            lambda: [each.replicas for each in self._routed if each.engine.is_replica],
            reducer=self.reducer,
            warns_of_buffers=not self._buffers and getattr(self.run.config.backend, "broadcast_buffers", True),
            loss_weight=self.averaging.loss_weight,
            before_first_step=self._before_first_step,
        )
        stack.enter_context(verification.active())
        stack.enter_context(self.batch_losses.active())
        self.verification = verification

    def _before_first_step(self) -> None:
        self.batch_losses.before_first_step()
        self.first_step.compare(self.averaging.end_first_step())

    def _reduced(self) -> list[tuple[nn.Module, Reduction]]:
        return [(each.replicas, each.engine.reduction) for each in self._routed if each.engine.reduction is not None]

    def refresh(self) -> None:
        """Follow parameters that were added or replaced."""
        if self.reducer is not None:
            self.reducer.refresh(self._reduced())
        self.session.bind(self.models)


class _RoutedModel:
    """One model of a block, with its engine.

    Args:
        block: the block.
        inner: calls the user's forward.
    """

    def __init__(self, block: Block, inner: Inner) -> None:
        self._block, self.inner, self.engine = block, inner, block.build(inner)
        self.session, self.replicas = block.session, self.engine.replicas or inner.model
        self._changes: list[str] = []  # names of submodules and parameters that were added or replaced
        self._forwards, self._series = 0, next(_series)
        # Those of the active run: a block with options of its own has another Runtime.
        self._pending_checks = current().state.pending_checks
        is_moved = not self.engine.moves_inputs and block.run.device.type != "cpu"
        self._device = block.run.device if is_moved else None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Route calls of the model inside the context, and close its engine at the end."""
        block, inner = self._block, self.inner
        route = Route(
            inner.model,
            inner.original_methods,
            call=self._call,
            bind=inner.bind_method,
            owner=self,
        )
        block.summary.add_model(inner.model, self.engine)
        failed = True
        try:
            route.install()
            with watching_registrations(self._on_registered):
                yield
            failed = False
        finally:
            route.uninstall()
            self.engine.close(failed=failed)

    def _on_registered(self, module: nn.Module, name: str, value: Any) -> None:
        is_part = any(each is module for each in self.inner.model.modules())
        if is_part and getattr(module, name, None) is not value:
            is_new = isinstance(value, nn.Module) or name not in module._parameters
            if is_new or self.engine.keeps_parameters:  # an engine that replaces parameters does it itself
                self._changes.append(name)

    def _call(self, method: str, args: Any, kwargs: Any) -> Any:
        is_recording = torch.is_grad_enabled()
        self.inner.__dict__["method"] = method  # nn.Module.__setattr__ is slow
        if self._device is not None:
            args, kwargs = replace_leaves(self._to_device, (args, kwargs))
        if is_recording:
            self._before_forward((args, kwargs))
        module = self.engine.module if is_recording else self.engine.local
        output = self._block.session.route(module, *args, **kwargs)
        if is_recording:
            self._after_forward(output, (args, kwargs))
        return output

    def _to_device(self, leaf: Any) -> Any:
        is_movable = isinstance(leaf, (torch.Tensor, PackedSequence))
        return leaf.to(self._device, non_blocking=True) if is_movable else leaf

    def _before_forward(self, inputs: Any) -> None:
        block = self._block
        if not block.first_step.is_over:
            block.first_step.add(inputs)
        if not self.engine.is_chosen:
            if block.reducer is not None:
                block.reducer.close()  # an engine that shards parameters would keep its hooks
            self.engine.choose(inputs)
            self.replicas = self.engine.replicas or self.inner.model
            block.refresh()
        if not block.summary.is_over:
            block.summary.log_once()
        if self._changes:
            self._follow_changes()
        self._forwards += 1
        if self._pending_checks and self.engine.reduction is not None:
            run_checks(self._pending_checks, f"{self._series}/{self._forwards}")

    def _follow_changes(self) -> None:
        """Hook parameters that were added or replaced, which all ranks get from rank 0."""
        model, run, names = self.inner.model, self._block.run, ", ".join(self._changes[:3])
        if not self.engine.keeps_parameters:
            raise SyncError(
                f"{type(model).__name__} has changed: {names} was added or replaced",
                why=f"{run.config.backend.name} has sharded or placed its parameters at the entry of the block",
                fix="change the model before the block, or leave the block and enter it again",
            )
        self._changes.clear()
        model.to(run.device)
        reducer = self._block.reducer
        if reducer is not None and self.engine.reduction is not None:
            require_same_model(model)
            new: list[torch.Tensor] = [each for each in all_parameters(model) if id(each) not in reducer.slots]
            broadcast_from_rank_0(new)
        self.engine.refresh()
        self._block.refresh()

    def _after_forward(self, output: Any, inputs: Any) -> None:
        """Mark the outputs, once for all that search graphs for them, and watch what begins at them."""
        averaging, owner_of_session = self._block.averaging, self.session.mark_owner
        owners: list[object] = [averaging] if averaging.needs_marks else []
        if owner_of_session is not None:
            owners.append(owner_of_session)
        if not owners and self._block.run.world.world_size == 1:
            return
        with torch._C.DisableTorchFunction():  # modes of the user and of amp have nothing to do with it
            nodes = mark_outputs(output, inputs=inputs, owners=owners)
        if owner_of_session is not None:
            self.session.watch_outputs(nodes)
        if not self._block.batch_losses.is_over:
            self._block.batch_losses.mark(nodes, inputs)
        if self.engine.reduction is not None:
            for node in nodes:
                node.register_prehook(self._refuse_after_block)

    def _refuse_after_block(self, _gradients: Any) -> None:
        if not self._block.is_over:
            return
        model = self.inner.model
        trained = [node_of(each) for each in all_parameters(model) if each.requires_grad]
        if any(map(torch._C._will_engine_execute_node, trained)):
            raise SyncError(
                f"backward after the parallel_model block, of a forward of {type(model).__name__} inside it",
                why="gradients are averaged over the ranks in the block only",
                fix="put the whole loop inside the block: with parallel_model(model): for x, y in loader: ...",
            )

    @property
    def verification(self) -> Verification | None:
        """The checks of the block; None: it is of one rank."""
        return self._block.verification

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward leaves gradients local."""
        reducer = self._block.reducer
        if reducer is not None and self.engine.reduction is not None:
            return reducer.no_sync(self.replicas)
        return self.engine.no_sync()
