"""A plan at work, as a module that DistributedDataParallel can hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from parallelize.backends.balanced.executor import Executor, Wiring
from parallelize.backends.balanced.microbatch_split_join import batch_size, take, uneven
from parallelize.backends.balanced.opaque_inputs import carriers, divisible, unchanged
from parallelize.backends.balanced.plan import Plan, remember
from parallelize.backends.balanced.profiling import Bench
from parallelize.backends.balanced.side_effects import observed, ordinary
from parallelize.backends.balanced.stage_threads import Workers
from parallelize.backends.balanced.state_snapshot import Before, untouched
from parallelize.backends.balanced.user_forward import Forward
from parallelize.plugins.base import Inner

__all__ = ["Pipeline"]


class _Modes:
    """In which of training and evaluation each module of a model has been seen.

    Dropout shows itself in training only, and so may what a forward leaves on the model: a plan whose first batch was
    one of a validation pass does not know of it.

    Args:
        model: with its modules.
        evaluated: names of those that planning has seen in evaluation; the others it has seen in training. None: it was
            that of another model.
    """

    def __init__(self, model: nn.Module, *, evaluated: Collection[str] | None) -> None:
        names, self._modules = zip(*model.named_modules(), strict=True)
        self._latest: list[bool] = []
        self._seen: set[tuple[int, bool]] = set()
        if evaluated is not None:
            self._seen.update((index, name not in evaluated) for index, name in enumerate(names))

    def are_new(self) -> bool:
        """Whether a module is in a mode in which it was not seen."""
        modes = [module.training for module in self._modules]
        if modes != self._latest and not self._seen.issuperset(enumerate(modes)):
            return True
        self._latest = modes
        return False

    def see(self) -> None:
        """Each module is seen in its mode."""
        self._latest = [module.training for module in self._modules]
        self._seen.update(enumerate(self._latest))


class Pipeline(nn.Module):
    """Runs batches by a plan.

    Args:
        inner: of the block.
        forward: what each micro-batch calls.
        plan: of the model.
        wiring: the plan's, with the model's own modules.
        workers: threads for its stages.
        is_given: whether the plan is an earlier one, of a model whose dropout may have been another.
    """

    def __init__(
        self,
        inner: Inner,
        forward: Forward,
        *,
        plan: Plan,
        wiring: Wiring,
        workers: Workers,
        is_given: bool,
    ) -> None:
        super().__init__()
        self.inner = inner
        self._forward = forward
        self._plan = plan
        self._workers = workers
        self._modes = _Modes(inner.model, evaluated=frozenset(plan.evaluated))
        self._doubtful = _Modes(inner.model, evaluated=None) if is_given else None
        self._norms = [module for module in inner.model.modules() if isinstance(module, _BatchNorm)]
        self._wiring = wiring
        self._devices = frozenset(stage.device for stage in wiring.stages)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch."""
        is_whole = self._wiring.microbatches == 1
        if is_whole or not carriers((args, kwargs)):
            return self._shared(args, kwargs)
        if not torch.is_grad_enabled():
            # It is written to as the model wishes, by one micro-batch: text is generated so, with a cache of keys.
            return self._run(args, kwargs, wiring=replace(self._wiring, microbatches=1))
        dim = self._wiring.batch_dim
        divisible((args, kwargs), samples=batch_size((args, kwargs), dim=dim), dim=dim)
        with unchanged((args, kwargs)):
            return self._shared(args, kwargs)

    def _shared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A batch that is cut into micro-batches as planned."""
        self._learn((args, kwargs))
        if self._modes.are_new():
            self._observe((args, kwargs))
        if self._doubtful is not None and not self._wiring.draws and self._doubtful.are_new():
            return self._doubted(self._doubtful, args, kwargs)
        return self._run(args, kwargs, wiring=self._fitting((args, kwargs)))

    def _learn(self, inputs: Any) -> None:
        """A tensor that is not as long as this batch is not per sample, and never will be."""
        known = self._wiring.whole_inputs
        new = uneven(inputs, dim=self._wiring.batch_dim).difference(known)
        if new:
            self._know(whole_inputs=tuple(sorted(new.union(known))))

    def _fitting(self, inputs: Any) -> Wiring:
        """The wiring; for a batch that is smaller than planned, as an epoch's last is, batch norm needs two samples."""
        wiring = self._wiring
        if any(norm.training for norm in self._norms):
            samples = batch_size(inputs, dim=wiring.batch_dim)
            if samples < min(self._plan.samples, 2 * wiring.microbatches):
                return replace(wiring, microbatches=max(1, samples // 2))
        return wiring

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, wiring: Wiring) -> Any:
        executor = Executor(self._forward, model=self.inner.model, wiring=wiring, workers=self._workers)
        return executor.run(args, kwargs)

    def _doubted(self, modes: _Modes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A batch that is run again if its micro-batches have drawn numbers, which the plan does not know of."""
        before = Before(self.inner.model, self._devices)
        output = self._run(args, kwargs, wiring=self._fitting((args, kwargs)))
        modes.see()
        if not before.has_drawn():
            return output
        before.restore()
        self._know(draws=True)
        return self._run(args, kwargs, wiring=self._fitting((args, kwargs)))

    def _observe(self, inputs: Any) -> None:
        """Look at what the model does in its new modes, before micro-batches run in them."""
        model, wiring = self.inner.model, self._fitting(inputs)
        bench = Bench(
            module=self._forward,
            model=model,
            stages=wiring.stages,
            routes=wiring.routes,
            workers=self._workers,
            batch_dim=wiring.batch_dim,
        )
        is_grad_enabled = torch.is_grad_enabled()
        with torch.inference_mode(mode=False), torch.set_grad_enabled(is_grad_enabled), untouched(model, self._devices):
            part = ordinary(inputs)
            samples = batch_size(part, dim=wiring.batch_dim)
            part = take(part, -(-samples // wiring.microbatches), dim=wiring.batch_dim, whole=wiring.whole_inputs)
            bench = observed(bench, part, microbatches=wiring.microbatches)
        self._modes.see()
        if bench.draws and not wiring.draws:
            self._know(draws=True)

    def _know(self, **more: Any) -> None:
        self._wiring = replace(self._wiring, **more)
        self._plan = replace(self._plan, **more)
        remember(self.inner.model, self._plan)
