"""Runs one model of a parallel_model block: builds its engine and checks, and rebuilds them if parameters change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from parallelize.errors import SyncError
from parallelize.inplace.backward_after_block import BackwardAfterBlock
from parallelize.inplace.closure_averaging import average_closures
from parallelize.inplace.forward_routing import Route
from parallelize.inplace.gradient_average import Window
from parallelize.inplace.gradient_averaging_guard import GradientAveragingGuard
from parallelize.inplace.local_gradients import claim_gradients, refuse_steps_after_block
from parallelize.inplace.model_consistency import require_same_model, verify_every
from parallelize.inplace.model_structure import Structure
from parallelize.inplace.same_data import SameDataCheck
from parallelize.inplace.unmanaged_parameters import refuse_unmanaged_parameters
from parallelize.plugins.base import Engine, Inner
from parallelize.runtime.context import Runtime
from parallelize.runtime.rank_consistency import SyncPoints
from parallelize.runtime.startup_summary import StartupSummary

__all__ = ["Block"]


class Block:
    """One model of a parallel_model block, with its engine and its checks.

    Args:
        inner: the module that calls the user's forward.
        run: runtime of this process: config, world and device.
        build: builds the engine; called again if the user unfreezes or replaces parameters.
        on_rebuilt: called after each rebuild of the engine.
        startup_summary: summary to add the engine to; logged at the first forward with grad mode on.
        same_data: compares the block's first forwards across ranks; None: there is nothing to compare.
        window: the model's backward passes since its last optimizer step.
    """

    def __init__(
        self,
        inner: Inner,
        *,
        run: Runtime,
        build: Callable[[Inner], Engine],
        on_rebuilt: Callable[[], None] = lambda: None,
        startup_summary: StartupSummary,
        same_data: SameDataCheck | None = None,
        window: Window,
    ) -> None:
        self._inner = inner
        self._run = run
        self._build_engine = build
        self._on_rebuilt = on_rebuilt
        self._startup_summary, self._has_logged_summary = startup_summary, False
        self._same_data = same_data
        self._engine: Engine
        self._structure: Structure
        self._guard: GradientAveragingGuard | None = None
        self._backward_after_block = BackwardAfterBlock(inner.model)
        self._checks = contextlib.ExitStack()
        self._forwards = SyncPoints()
        self._window = window

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._inner.model

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Route calls of the model to its engine inside the context, and restore the plain model at its end."""
        self._start()
        device = None if self._engine.moves_inputs or self._run.device.type == "cpu" else self._run.device
        route = Route(self._inner, handler=self, device=device)
        route.install()
        failed = True
        try:
            yield
            failed = False
        finally:
            route.uninstall()
            self._backward_after_block.close()
            refuse_steps_after_block([] if self._guard is None else self._guard.local_gradients())
            self._stop(failed=failed)

    def before_forward(self, inputs: Any) -> nn.Module:
        """Return the module for a forward with grad mode on; rebuild the engine first if parameters have changed."""
        if self._same_data is not None:
            self._same_data.before_forward(inputs)
        if not self._has_logged_summary:
            self._has_logged_summary = True
            self._startup_summary.log_once()
        if self._guard is None:
            if not self._engine.is_rebuildable and not self._structure.is_current():
                self._refuse_change()
            return self._engine.module
        if not self._structure.is_current():
            if not any(parameter.requires_grad for parameter in self.model.parameters()):
                # E.g. a discriminator frozen during the generator's step: no gradient accumulates in it.
                return self._engine.local
            self._refuse_functional_call()
            self._rebuild()
        # Before the step's collectives, in which ranks would wait for a rank that has fewer batches.
        self._forwards.reach()
        self._guard.before_forward()
        return self._engine.module

    def after_forward(self, module: nn.Module, output: Any, *, inputs: Any) -> None:
        """Begin to track gradients after a forward that `module` ran; no-op if that was the local module."""
        if module is self._engine.module:
            self._window.mark(output, inputs)
        if self._guard is not None and module is self._engine.module:
            self._guard.after_forward()
            self._backward_after_block.register_hooks(output)

    def local_module(self) -> nn.Module:
        """Return the module for a forward with grad mode off."""
        return self._engine.local

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them while the context lasts."""
        guard_no_sync = contextlib.nullcontext() if self._guard is None else self._guard.no_sync()
        with guard_no_sync, self._engine.no_sync(), self._window.no_sync():
            yield

    def _start(self) -> None:
        if self._run.world.world_size > 1:
            require_same_model(self.model)
        self._engine = self._build_engine(self._inner)
        self._startup_summary.add_model(self.model, self._engine)
        self._structure = Structure(self.model, keeps_parameters=self._engine.is_rebuildable)
        if self._engine.averages_gradients:
            guard = GradientAveragingGuard(self._structure, engine=self._engine)
            former = self._guard
            guard.inherit(claim_gradients(self.model) if former is None else former.local_gradients())
            self._guard = guard
            self._checks.enter_context(guard.hooks_installed())
        is_sharded = self._run.config.backend.shards_gradients and self._run.world.world_size > 1
        is_averaging = self._engine.averages_gradients or is_sharded
        self._window.bind(self.model, is_averaging=is_averaging)
        if is_averaging:
            self._checks.enter_context(refuse_unmanaged_parameters(self.model))
            self._checks.enter_context(average_closures(self.model))
        every = self._run.config.verify_every
        if every and self._run.world.world_size > 1:
            self._checks.enter_context(verify_every(self.model, every=every))

    def _stop(self, *, failed: bool) -> None:
        self._checks.close()
        self._engine.close(failed=failed)

    def _rebuild(self) -> None:
        known_ids = {id(each) for each in self._structure.parameters.values()}
        unchanged = tuple(each for each in self.model.parameters() if id(each) in known_ids)
        # The new engine overwrites parameters with equal values: tensors saved by earlier forwards must stay valid.
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(unchanged):
            self._stop(failed=False)
            self.model.to(self._run.device)
            self._start()
        self._on_rebuilt()

    def _refuse_functional_call(self) -> None:
        for name, each in self.model.named_parameters():
            if not isinstance(each, nn.Parameter):
                raise SyncError(
                    f"torch.func.functional_call has replaced {name} of {type(self.model).__name__} by a plain tensor",
                    why="only gradients that accumulate in parameters are averaged over the ranks",
                    fix="put the functional call in a method of the model, and name the method: methods=['adapted']",
                )

    def _refuse_change(self) -> None:
        raise SyncError(
            f"{type(self.model).__name__} has changed: {'; '.join(self._structure.changes()[:3])}",
            why=f"{self._run.config.backend.name} has sharded or placed its parameters at the entry of the block",
            fix="change the model before the block, or leave the block and enter it again",
        )
