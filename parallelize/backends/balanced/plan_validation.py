"""Validation of a plan on one batch: times steps, compares outputs of micro-batches with those of the full batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced import refusals, units
from parallelize.backends.balanced.executor import Executor, ModelForward, PipelineConfig
from parallelize.backends.balanced.hardware import synchronized_time
from parallelize.backends.balanced.opaque_inputs import copy_opaque_inputs
from parallelize.backends.balanced.plan import Plan
from parallelize.backends.balanced.segment import run_backward
from parallelize.backends.balanced.stage_placement import ModelPlacement
from parallelize.backends.balanced.stage_threads import StageThreads, stages_on
from parallelize.runtime.containers import leaves

__all__ = ["PlanValidation", "pipeline_config"]

# The largest relative difference of outputs that counts as rounding, by dtype.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclass(frozen=True, kw_only=True)
class PlanValidation:
    """Times plans of a model on one batch to choose the fastest, and checks the outputs under the chosen plan."""

    module: ModelForward
    model: nn.Module
    inputs: Any
    placement: ModelPlacement
    output_device: torch.device
    devices: Sequence[torch.device]
    batch_dim: int

    def unsplit_s(self) -> float:
        """Return how many seconds one step takes without a pipeline, in the calling thread."""
        return self._seconds(self.module)

    def split_s(self, plan: Plan) -> float:
        """Return how many seconds one step takes under a plan."""
        with self._executor(plan) as executor:
            return self._seconds(lambda *args, **kwargs: executor.run(args, kwargs))

    def check_outputs(self, plan: Plan) -> None:
        """Check, in evaluation mode, that micro-batches give the same outputs as the full batch.

        Raises:
            ConfigError: the outputs differ by more than rounding.
        """
        if plan.microbatches == 1:
            return
        with _evaluation_mode(self.model):
            unsplit, again = (self._outputs(replace(plan, microbatches=1)) for _ in range(2))
            split = self._outputs(plan)
        for position, values in enumerate(zip(unsplit, again, split, strict=True)):
            difference = _difference(values[0], values[2])
            # If two runs of the full batch differ, the model is random even in evaluation mode: do not compare.
            if difference > 0 and _difference(values[0], values[1]) == 0:
                raise refusals.not_sample_by_sample(position, difference)

    def _outputs(self, plan: Plan) -> list[Any]:
        args, kwargs = copy_opaque_inputs(self.inputs)
        with self._executor(plan) as executor:
            return list(leaves(executor.run(args, kwargs)))

    @contextlib.contextmanager
    def _executor(self, plan: Plan) -> Iterator[Executor]:
        config = pipeline_config(plan, self.model, batch_dim=self.batch_dim, output_device=self.output_device)
        self.placement.move(units.module_stages(self.model, config.routes), config.stages)
        with contextlib.closing(StageThreads(config.stages, microbatches=plan.microbatches)) as threads:
            yield Executor(module=self.module, model=self.model, config=config, threads=threads)

    def _seconds(self, call: Callable[..., Any]) -> float:
        """Return the seconds of forward and backward, the best of three runs after a warm-up; store no gradients."""
        wanted = [each for each in self.model.parameters() if each.requires_grad]
        found = []
        for _ in range(4):
            args, kwargs = copy_opaque_inputs(self.inputs)
            began = synchronized_time(self.output_device, *self.devices)
            tensors = [leaf for leaf in leaves(call(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            outputs = [tensor for tensor in tensors if tensor.requires_grad]
            if outputs and wanted:
                run_backward(outputs, [torch.ones_like(each) for each in outputs], inputs=wanted)
            found.append(synchronized_time(self.output_device, *self.devices) - began)
        return min(found[1:])


def pipeline_config(plan: Plan, model: nn.Module, *, batch_dim: int, output_device: torch.device) -> PipelineConfig:
    """Build the pipeline's configuration from a plan and the model's modules."""
    modules = dict(model.named_modules())
    return PipelineConfig(
        stages=stages_on([torch.device(device) for device in plan.devices]),
        routes=units.unit_routes(model, plan.events, plan.bounds),
        microbatches=plan.microbatches,
        recomputed=tuple(modules[name] for name in dict.fromkeys(plan.events)) if plan.recompute else (),
        draws=plan.draws,
        batch_dim=batch_dim,
        whole_inputs=plan.whole_inputs,
        output_dims=dict(plan.output_dims),
        output_form=plan.output_form,
        output_device=output_device,
    )


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode and disable gradients; restore each module's mode on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _difference(one: Any, other: Any) -> float:
    """Return the largest difference of two outputs, relative to the largest value of `one`; 0 if it is rounding."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return 0.0
    if one.shape != other.shape:
        return math.inf
    if not one.is_floating_point() or one.numel() == 0:
        return 0.0
    wide, narrow = one.double().cpu().nan_to_num(), other.double().cpu().nan_to_num()
    relative = ((wide - narrow).abs().max() / wide.abs().max().clamp_min(1e-6)).item()
    return relative if relative > _ROUNDING.get(one.dtype, 5e-2) else 0.0
