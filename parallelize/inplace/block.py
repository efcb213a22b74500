"""One model in a block: its engine, what watches over it, what happens when its parameters change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from parallelize.errors import SyncError
from parallelize.inplace.backward_after_block import Latecomers
from parallelize.inplace.forward_routing import Route
from parallelize.inplace.gradient_averaging_guard import Guard
from parallelize.inplace.local_gradients_after_block import claim, leave_behind
from parallelize.inplace.model_consistency import agree, verifying
from parallelize.inplace.model_structure import Structure
from parallelize.inplace.unmanaged_parameters import watching_strangers
from parallelize.plugins.base import Engine, Inner
from parallelize.runtime.context import Runtime
from parallelize.runtime.rank_consistency import Moments
from parallelize.runtime.startup_summary import StartLine

__all__ = ["Block"]


class Block:
    """One model that runs in parallel.

    Args:
        inner: the module that calls the user's forward.
        run: this process's part of the run.
        build: makes the engine; called again if the user unfreezes or replaces parameters.
        on_rebuilt: called after another engine has taken over.
        start_line: told of the engine; said at the first forward that records gradients.
    """

    def __init__(
        self,
        inner: Inner,
        *,
        run: Runtime,
        build: Callable[[Inner], Engine],
        on_rebuilt: Callable[[], None] = lambda: None,
        start_line: StartLine,
    ) -> None:
        self._inner = inner
        self._run = run
        self._build = build
        self._on_rebuilt = on_rebuilt
        self._start_line, self._has_begun = start_line, False
        self._engine: Engine
        self._structure: Structure
        self._guard: Guard | None = None
        self._latecomers = Latecomers(inner.model)
        self._watch = contextlib.ExitStack()
        self._steps = Moments()

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._inner.model

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """From the plain model to the parallel one and back."""
        self._start()
        device = None if self._engine.spreads_inputs or self._run.device.type == "cpu" else self._run.device
        route = Route(self._inner, director=self, device=device, refuses_copies=self._engine.refuses_copies)
        route.lay()
        failed = True
        try:
            yield
            failed = False
        finally:
            route.lift()
            self._latecomers.close()
            leave_behind([] if self._guard is None else self._guard.left())
            self._stop(failed=failed)

    def enter(self) -> nn.Module:
        """What runs a forward that records gradients; another engine if the model's parameters are others by now."""
        if not self._has_begun:
            self._has_begun = True
            self._start_line.say()
        if self._guard is None:
            if not self._engine.is_rebuildable and not self._structure.is_current():
                self._refuse_change()
            return self._engine.module
        if not self._structure.is_current():
            if not any(parameter.requires_grad for parameter in self.model.parameters()):
                # A discriminator, frozen while its generator is trained: gradients pass through it and stop nowhere.
                return self._engine.local
            self._refuse_functional()
            self._rebuild()
        # Before the collectives of a step: a rank with fewer batches than the others would leave them waiting later.
        self._steps.reach()
        self._guard.before_forward()
        return self._engine.module

    def leave(self, module: nn.Module, output: Any) -> None:
        """That `module` has run a forward."""
        if self._guard is not None and module is self._engine.module:
            self._guard.after_forward()
            self._latecomers.expect(output)

    def local(self) -> nn.Module:
        """What runs a forward that records no gradients."""
        return self._engine.local

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward sends no gradients."""
        paused = contextlib.nullcontext() if self._guard is None else self._guard.paused()
        with paused, self._engine.no_sync():
            yield

    def _start(self) -> None:
        if self._run.world.world_size > 1:
            agree(self.model)
        self._engine = self._build(self._inner)
        self._start_line.joined(self.model, self._engine)
        self._structure = Structure(self.model, has_own_parameters=self._engine.is_rebuildable)
        if self._engine.averages:
            guard = Guard(self._structure, engine=self._engine)
            guard.inherit(claim(self.model) if self._guard is None else self._guard.left())
            self._guard = guard
            self._watch.enter_context(guard.watching())
        is_sharded = self._run.config.backend.shards_gradients and self._run.world.world_size > 1
        if self._engine.averages or is_sharded:
            self._watch.enter_context(watching_strangers(self.model))
        every = self._run.config.verify_every
        if every and self._run.world.world_size > 1:
            self._watch.enter_context(verifying(self.model, every=every))

    def _stop(self, *, failed: bool) -> None:
        self._watch.close()
        self._engine.close(failed=failed)

    def _rebuild(self) -> None:
        known = {id(each) for each in self._structure.parameters.values()}
        alike = tuple(each for each in self.model.parameters() if id(each) in known)
        # An earlier forward may still wait for its backward. The next engine sends what all ranks hold, in place.
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(alike):
            self._stop(failed=False)
            self.model.to(self._run.device)
            self._start()
        self._on_rebuilt()

    def _refuse_functional(self) -> None:
        for name, each in self.model.named_parameters():
            if not isinstance(each, nn.Parameter):
                raise SyncError(
                    f"{name} of {type(self.model).__name__} is no parameter here: torch.func.functional_call",
                    why="gradients are averaged where they arrive, in parameters; these tensors only pass them on",
                    fix="put the functional call in a method of the model, and route that: methods=['adapted']",
                )

    def _refuse_change(self) -> None:
        raise SyncError(
            f"{type(self.model).__name__} has changed: {'; '.join(self._structure.changes()[:3])}",
            why=f"{self._run.config.backend.name} has laid out its parameters at the entry of the block",
            fix="change the model before the block, or leave the block and enter it again",
        )
