"""The engines of one model: one per set of trained parameters, paused while another one runs."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from parallelize.inplace.model_consistency import require_same_model
from parallelize.inplace.model_structure import Structure
from parallelize.inplace.shared_parameters import without_gradients
from parallelize.plugins.base import Engine, Inner
from parallelize.runtime.context import Runtime
from parallelize.runtime.rank_comparison import differences

__all__ = ["Engines"]


class Engines:
    """Builds the engine of a model, and another one when a set of trained parameters first occurs.

    Adversarial and alternating training freeze and unfreeze the same parameters every few steps. The engine of the
    former set is paused: it keeps its gradient buckets, of the size of its trained parameters, but ignores backward
    passes. The buckets of paused engines use at most twice the memory of the model's parameters; beyond that, the least
    recently used engine is closed. If a module or parameter is replaced, all engines are closed.

    Args:
        inner: wrapper of the user's model.
        build: builds an engine.
        run: runtime of this process.
        shared: parameters that another model of the block has, too: no engine averages them.

    Attributes:
        inner: wrapper of the user's model.
        active: the engine of the parameters that are trained now.
        structure: snapshot of the model for which it was built.
    """

    active: Engine
    structure: Structure

    def __init__(
        self, inner: Inner, *, build: Callable[[Inner], Engine], run: Runtime, shared: Collection[nn.Parameter]
    ) -> None:
        self.inner = inner
        self._build = build
        self._run = run
        self._shared = shared
        self._paused: list[tuple[Structure, Engine, Callable[[], None]]] = []  # least recently used first

    def start(self) -> None:
        """Build the first engine; a collective that compares the ranks' models."""
        self._require_same_model()
        self._build_active()

    def switch(self) -> None:
        """Activate the engine of the parameters that are now trained; a collective that compares the ranks' models."""
        model, former = self.inner.model, self.structure
        self._require_same_model()
        if former.has_same_parts():
            resume = self.active.pause()
            if resume is not None:
                self._paused.append((former, self.active, resume))
            else:
                self.active.close(failed=False)
            if self._resume():
                return
            # Parameters that the user has changed while they were frozen may differ between ranks: rank 0's win.
            self.inner.is_broadcast = next(differences(list(model.parameters())), None) is None
        else:
            self.close(failed=False)
            self.inner.is_broadcast = False
            model.to(self._run.device)
        known_ids = {id(each) for each in former.parameters.values()}
        # A broadcast writes equal values: tensors that earlier forwards have saved must stay valid.
        unchanged = tuple(each for each in model.parameters() if id(each) in known_ids)
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(unchanged):
            self._build_active()
        self._close_least_recent()

    def close(self, *, failed: bool) -> None:
        """Close all engines."""
        self.active.close(failed=failed)
        while self._paused:
            self._close_paused()

    def _require_same_model(self) -> None:
        if self._run.world.world_size > 1:
            require_same_model(self.inner.model)

    def _resume(self) -> bool:
        for index, (structure, engine, resume) in enumerate(self._paused):
            if structure.is_current():
                del self._paused[index]
                resume()
                self.structure, self.active = structure, engine
                return True
        return False

    def _build_active(self) -> None:
        with without_gradients(self._shared):
            self.active = self._build(self.inner)
        self.structure = Structure(self.inner.model, keeps_parameters=self.active.is_rebuildable, shared=self._shared)

    def _close_least_recent(self) -> None:
        limit = 2 * sum(each.nbytes for each in self.inner.model.parameters())
        while sum(each.nbytes for structure, *_ in self._paused for each in structure.trained.values()) > limit:
            self._close_paused()

    def _close_paused(self) -> None:
        _, engine, _ = self._paused.pop(0)
        engine.close(failed=True)  # without collectives: closing the active engine broadcasts the buffers
