"""Runs one model of a parallel_model block: its engines and checks, which follow changes of its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from parallelize.errors import SyncError
from parallelize.inplace.backward_after_block import BackwardAfterBlock
from parallelize.inplace.closure_averaging import average_closures
from parallelize.inplace.engines import Engines
from parallelize.inplace.forward_routing import Route, is_in_functional_call, packed_lengths_on_cpu
from parallelize.inplace.gradient_average import Window
from parallelize.inplace.gradient_origins import GradientTracker
from parallelize.inplace.model_consistency import verify_every
from parallelize.inplace.same_data import SameDataCheck
from parallelize.inplace.step_watch import claim_gradients, leave_gradients, watch_steps
from parallelize.runtime.autograd_graph import reaches_any
from parallelize.runtime.context import Runtime
from parallelize.runtime.rank_consistency import SyncPoints
from parallelize.runtime.startup_summary import StartupSummary
from parallelize.runtime.weighted_backward import bypasses_weights

__all__ = ["Block"]


class Block:
    """One model of a parallel_model block, with its engine and its checks.

    Args:
        engines: builds the model's engines.
        run: runtime of this process: config, world and device.
        on_switched: called after each switch to another engine.
        startup_summary: summary to add the engine to; logged at the first forward with grad mode on.
        same_data: compares the block's first forwards across ranks; None: there is nothing to compare.
        window: the model's backward passes since its last optimizer step.
    """

    def __init__(
        self,
        engines: Engines,
        *,
        run: Runtime,
        on_switched: Callable[[], None] = lambda: None,
        startup_summary: StartupSummary,
        same_data: SameDataCheck | None = None,
        window: Window,
    ) -> None:
        self._engines = engines
        self._run = run
        self._on_switched = on_switched
        self._startup_summary, self._has_logged_summary = startup_summary, False
        self._same_data = same_data
        self._tracker: GradientTracker | None = None
        self._backward_after_block = BackwardAfterBlock(engines.inner.model)
        self._checks = contextlib.ExitStack()
        self._forwards = SyncPoints()
        self._window = window

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._engines.inner.model

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Route calls of the model to its engine inside the context, and restore the plain model at its end."""
        self._engines.start()
        engine = self._engines.active
        self._startup_summary.add_model(self.model, engine)
        device = None if engine.moves_inputs or self._run.device.type == "cpu" else self._run.device
        route = Route(self._engines.inner, handler=self, device=device)
        on_cpu = self._run.device.type == "cpu"
        failed = True
        try:
            with self._verify(), contextlib.nullcontext() if on_cpu else packed_lengths_on_cpu():
                route.install()
                self._install_checks()
                yield
            failed = False
        finally:
            route.uninstall()
            self._backward_after_block.close()
            self._checks.close()
            leave_gradients(self.model)
            self._engines.close(failed=failed)

    def before_forward(self, inputs: Any) -> nn.Module:
        """Return the module for a forward with grad mode on; switch the engine first if parameters have changed."""
        if self._same_data is not None and not self._same_data.is_over:
            self._same_data.before_forward(inputs)
        if not self._has_logged_summary:
            self._has_logged_summary = True
            self._startup_summary.log_once()
        if self._tracker is None:
            if not self._engines.active.is_rebuildable and not self._engines.structure.is_current():
                self._refuse_change()
            if self._run.config.backend.shards_gradients and is_in_functional_call(self.model):
                self._refuse_functional_call()
            return self._engines.active.module
        if not self._engines.structure.is_current():
            if not any(parameter.requires_grad for parameter in self.model.parameters()):
                # E.g. a discriminator frozen during the generator's step: no gradient accumulates in it.
                return self._engines.active.local
            if not all(isinstance(parameter, nn.Parameter) for parameter in self.model.parameters()):
                return self._before_functional_call()
            self._switch_engine()
        return self._before_averaged_forward()

    def after_forward(self, module: nn.Module, output: Any, *, inputs: Any) -> None:
        """Begin to track gradients after a forward that `module` ran; no-op if that was the local module."""
        if module is not self._engines.active.module:
            return
        with torch._C.DisableTorchFunction():  # modes of the user and of amp have nothing to do with it
            nodes = self._window.mark(output, inputs)
            if self._tracker is not None:
                self._tracker.after_forward()
            if self._tracker is not None or bypasses_weights():
                self._backward_after_block.register_hooks(nodes)

    def local_module(self) -> nn.Module:
        """Return the module for a forward with grad mode off."""
        return self._engines.active.local

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them while the context lasts."""
        tracker_no_sync = contextlib.nullcontext() if self._tracker is None else self._tracker.no_sync()
        with tracker_no_sync, self._engines.active.no_sync(), self._window.no_sync():
            yield

    def _before_averaged_forward(self) -> nn.Module:
        # Before the step's collectives, in which ranks would wait for a rank that has fewer batches.
        self._forwards.reach()
        if self._tracker is not None and not self._window.is_no_sync:
            self._tracker.require_complete()
        return self._engines.active.module

    def _before_functional_call(self) -> nn.Module:
        """Return the module for a forward in torch.func.functional_call, which has replaced parameters by tensors.

        Backward reaches the parameters, whose gradients the engine averages, if the tensors were computed from them
        (the fast weights of meta-learning), but not if another model has (a hypernetwork).
        """
        given = list(self.model.parameters())
        with self._engines.structure.original_parameters():
            if not self._engines.structure.is_current():
                self._switch_engine()
        if reaches_any(given, self._engines.structure.trained.values()):
            return self._before_averaged_forward()
        return self._engines.active.local

    def _verify(self) -> contextlib.AbstractContextManager[Any]:
        every = self._run.config.verify_every
        if every and self._run.world.world_size > 1:
            return verify_every(self.model, every=every)
        return contextlib.nullcontext()

    def _install_checks(self) -> None:
        engine, structure = self._engines.active, self._engines.structure
        if engine.averages_gradients:
            if self._tracker is None:
                claim_gradients(self.model)
            self._tracker = self._backward_after_block.tracker = GradientTracker(structure, engine=engine)
            self._checks.enter_context(self._tracker.running())
        is_sharded = self._run.config.backend.shards_gradients and self._run.world.world_size > 1
        is_averaging = engine.averages_gradients or is_sharded
        self._window.bind(self.model, is_averaging=is_averaging, tracker=self._tracker)
        if is_averaging:
            self._checks.enter_context(watch_steps(self.model, self._tracker, self._engines.inner.session))
            self._checks.enter_context(average_closures(self.model))

    def _switch_engine(self) -> None:
        self._checks.close()
        self._engines.switch()
        self._install_checks()
        self._on_switched()

    def _refuse_functional_call(self) -> None:
        raise SyncError(
            f"torch.func.functional_call of {type(self.model).__name__} under {self._run.config.backend.name}",
            why="the model computes with its own shards, and would ignore the given tensors",
            fix="use backend='ddp'",
        )

    def _refuse_change(self) -> None:
        raise SyncError(
            f"{type(self.model).__name__} has changed: {'; '.join(self._engines.structure.changes()[:3])}",
            why=f"{self._run.config.backend.name} has sharded or placed its parameters at the entry of the block",
            fix="change the model before the block, or leave the block and enter it again",
        )
