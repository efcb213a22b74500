"""Pipeline: runs a model by its plan, as a module that DistributedDataParallel can wrap."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from parallelize.backends.balanced import side_effects
from parallelize.backends.balanced.executor import Executor, ModelForward, PipelineConfig
from parallelize.backends.balanced.microbatch_split_join import batch_size, first_samples, names_not_per_sample
from parallelize.backends.balanced.opaque_inputs import check_shareable, forbid_changes, opaque_inputs
from parallelize.backends.balanced.plan import Plan, remember
from parallelize.backends.balanced.profiling import Profiler
from parallelize.backends.balanced.stage_threads import StageThreads
from parallelize.plugins.base import Inner

__all__ = ["Pipeline"]


class _SeenModes:
    """Remembers in which modes, training or evaluation, each module has run.

    Forward can have side effects in training only: dropout draws random numbers, and the model may store state on
    itself. A plan made in evaluation mode has seen neither.

    Args:
        model: the model whose modules are tracked.
        evaluated: names of modules that ran in evaluation mode during planning; all other modules ran in training
            mode. None: no module has run yet.
    """

    def __init__(self, model: nn.Module, *, evaluated: Collection[str] | None) -> None:
        names, self._modules = zip(*model.named_modules(), strict=True)
        self._latest: list[bool] = []
        self._seen: set[tuple[int, bool]] = set()
        if evaluated is not None:
            self._seen.update((index, name not in evaluated) for index, name in enumerate(names))

    def has_new(self) -> bool:
        """Return whether any module is in a mode in which it has not run yet."""
        modes = [module.training for module in self._modules]
        if modes != self._latest and not self._seen.issuperset(enumerate(modes)):
            return True
        self._latest = modes
        return False

    def add(self) -> None:
        """Record that each module has run in its current mode."""
        self._latest = [module.training for module in self._modules]
        self._seen.update(enumerate(self._latest))


class Pipeline(nn.Module):
    """Runs each batch of a model through the stages of a plan.

    Args:
        config: configuration built from the plan, see `pipeline_config`.
        is_plan_given: whether the user passed the plan; the model's dropout may have changed since it was made.
    """

    def __init__(
        self,
        inner: Inner,
        forward: ModelForward,
        *,
        plan: Plan,
        config: PipelineConfig,
        threads: StageThreads,
        is_plan_given: bool,
    ) -> None:
        super().__init__()
        self.inner = inner
        self._forward = forward
        self._plan = plan
        self._threads = threads
        self._modes = _SeenModes(inner.model, evaluated=frozenset(plan.evaluated))
        self._rng_modes = _SeenModes(inner.model, evaluated=None) if is_plan_given else None
        self._batch_norms = [module for module in inner.model.modules() if isinstance(module, _BatchNorm)]
        self._config = config
        self._devices = frozenset(stage.device for stage in config.stages)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a batch."""
        if self._config.microbatches == 1 or not opaque_inputs((args, kwargs)):
            return self._run_split(args, kwargs)
        if not torch.is_grad_enabled():
            # A single micro-batch may modify these objects: text generation passes a key-value cache.
            return self._run(args, kwargs, config=replace(self._config, microbatches=1))
        dim = self._config.batch_dim
        check_shareable((args, kwargs), samples=batch_size((args, kwargs), dim=dim), dim=dim)
        with forbid_changes((args, kwargs)):
            return self._run_split(args, kwargs)

    def _run_split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a batch in micro-batches; if a module is in a new mode, first check forward for side effects."""
        self._learn_whole_inputs((args, kwargs))
        if self._modes.has_new():
            self._check_side_effects((args, kwargs))
        if self._rng_modes is not None and not self._config.draws and self._rng_modes.has_new():
            return self._run_checking_rng(self._rng_modes, args, kwargs)
        return self._run(args, kwargs, config=self._config_for((args, kwargs)))

    def _learn_whole_inputs(self, inputs: Any) -> None:
        """Remember the names of inputs with another length than the batch; later batches do not split them either."""
        known = self._config.whole_inputs
        new = names_not_per_sample(inputs, dim=self._config.batch_dim).difference(known)
        if new:
            self._update(whole_inputs=tuple(sorted(new.union(known))))

    def _config_for(self, inputs: Any) -> PipelineConfig:
        """Return the configuration, with fewer micro-batches if batch norm would train on one sample at a time."""
        config = self._config
        if any(norm.training for norm in self._batch_norms):
            samples = batch_size(inputs, dim=config.batch_dim)
            if samples < min(self._plan.samples, 2 * config.microbatches):
                return replace(config, microbatches=max(1, samples // 2))
        return config

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, config: PipelineConfig) -> Any:
        executor = Executor(module=self._forward, model=self.inner.model, config=config, threads=self._threads)
        return executor.run(args, kwargs)

    def _run_checking_rng(self, modes: _SeenModes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a batch; if it draws random numbers, undo this and run it again with a seeded generator per segment."""
        before = side_effects.StateSnapshot(self.inner.model, self._devices)
        output = self._run(args, kwargs, config=self._config_for((args, kwargs)))
        modes.add()
        if not before.has_drawn():
            return output
        before.restore()
        self._update(draws=True)
        return self._run(args, kwargs, config=self._config_for((args, kwargs)))

    def _check_side_effects(self, inputs: Any) -> None:
        """Run one micro-batch in the current modes of the modules to detect side effects of forward."""
        model, config = self.inner.model, self._config_for(inputs)
        profiler = Profiler(
            module=self._forward,
            model=model,
            stages=config.stages,
            routes=config.routes,
            threads=self._threads,
            batch_dim=config.batch_dim,
        )
        is_grad = torch.is_grad_enabled()
        with (
            torch.inference_mode(mode=False),
            torch.set_grad_enabled(is_grad),
            side_effects.preserving_state(model, self._devices),
        ):
            part = side_effects.clone_inference_tensors(inputs)
            samples = -(-batch_size(part, dim=config.batch_dim) // config.microbatches)
            part = first_samples(part, samples, dim=config.batch_dim, whole_inputs=config.whole_inputs)
            profiler = side_effects.check_side_effects(profiler, part, microbatches=config.microbatches)
        self._modes.add()
        if profiler.draws and not config.draws:
            self._update(draws=True)

    def _update(self, **more: Any) -> None:
        self._config = replace(self._config, **more)
        self._plan = replace(self._plan, **more)
        remember(self.inner.model, self._plan)
