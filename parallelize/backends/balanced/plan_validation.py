"""A plan, tried out on a batch: how long a step takes, and whether micro-batches compute what the whole batch does."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced import refusals, units
from parallelize.backends.balanced.executor import Executor, Wiring
from parallelize.backends.balanced.opaque_inputs import fresh
from parallelize.backends.balanced.plan import Plan
from parallelize.backends.balanced.profiling import now
from parallelize.backends.balanced.segment import Stage, run_backward
from parallelize.backends.balanced.stage_placement import Placement
from parallelize.backends.balanced.stage_threads import Workers, places
from parallelize.backends.balanced.state_snapshot import evaluating
from parallelize.backends.balanced.user_forward import Forward
from parallelize.runtime.containers import leaves

__all__ = ["Trial", "threads", "wired"]

# Relative differences of outputs that are rounding, by type.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Runs a model by plans that may come to nothing.

    Args:
        module: what runs a micro-batch.
        model: the user's.
        inputs: arguments and keyword arguments of a batch.
        placement: moves the model.
        home: where the loop has its targets.
        batch_dim: of the inputs.
    """

    module: Forward
    model: nn.Module
    inputs: Any
    placement: Placement
    home: torch.device
    batch_dim: int

    def undivided_s(self) -> float:
        """Seconds of a step as the user would run it: in her thread, with her threads inside operations."""
        return self._seconds(self.module)

    def divided_s(self, plan: Plan) -> float:
        """Seconds of a step by a plan."""
        with self._running(plan) as executor:
            return self._seconds(lambda *args, **kwargs: executor.run(args, kwargs))

    def compare(self, plan: Plan) -> None:
        """Compare outputs of micro-batches with those of the whole batch, in evaluation mode.

        Raises:
            ConfigError: they differ by more than rounding.
        """
        if plan.microbatches == 1:
            return
        with evaluating(self.model):
            whole, again = (self._outputs(replace(plan, microbatches=1)) for _ in range(2))
            divided = self._outputs(plan)
        for position, values in enumerate(zip(whole, again, divided, strict=True)):
            difference = _difference(values[0], values[2])
            # A model that draws numbers in evaluation too cannot be compared.
            if difference > 0 and _difference(values[0], values[1]) == 0:
                raise refusals.not_sample_by_sample(position, difference)

    def _outputs(self, plan: Plan) -> list[Any]:
        args, kwargs = fresh(self.inputs)
        with self._running(plan) as executor:
            return list(leaves(executor.run(args, kwargs)))

    @contextlib.contextmanager
    def _running(self, plan: Plan) -> Iterator[Executor]:
        wiring = wired(plan, self.model, batch_dim=self.batch_dim, home=self.home)
        self.placement.put(units.homes(self.model, wiring.routes), wiring.stages)
        with threads(wiring.stages, microbatches=plan.microbatches) as workers:
            yield Executor(self.module, model=self.model, wiring=wiring, workers=workers)

    def _seconds(self, call: Callable[..., Any]) -> float:
        """Of forward and backward, the least of three after one that does not count; leaves no gradients."""
        wanted = [each for each in self.model.parameters() if each.requires_grad]
        found = []
        for _ in range(4):
            args, kwargs = fresh(self.inputs)
            began = now(self.home)
            outputs = [leaf for leaf in leaves(call(*args, **kwargs)) if _is_differentiable(leaf)]
            if outputs and wanted:
                ones = [torch.ones_like(each) for each in outputs]
                run_backward(outputs, ones, inputs=wanted)
            found.append(now(self.home) - began)
        return min(found[1:])


def wired(plan: Plan, model: nn.Module, *, batch_dim: int, home: torch.device) -> Wiring:
    """A plan with the model's own modules.

    Args:
        plan: for this model.
        model: the user's.
        batch_dim: of the inputs.
        home: where joined outputs are.
    """
    modules = dict(model.named_modules())
    return Wiring(
        stages=places([torch.device(device) for device in plan.devices]),
        routes=units.routes(model, plan.events, plan.bounds),
        microbatches=plan.microbatches,
        recomputed=tuple(modules[name] for name in dict.fromkeys(plan.events)) if plan.recompute else (),
        draws=plan.draws,
        batch_dim=batch_dim,
        whole_inputs=plan.whole_inputs,
        output_dims=dict(plan.output_dims),
        output_form=plan.output_form,
        home=home,
    )


@contextlib.contextmanager
def threads(stages: Sequence[Stage], *, microbatches: int) -> Iterator[Workers]:
    """The threads of a pipeline, for as long as this lasts."""
    workers = Workers(stages, microbatches=microbatches)
    try:
        yield workers
    finally:
        workers.close()


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _difference(one: Any, other: Any) -> float:
    """The largest difference of two outputs, relative to the largest value; 0 if it is rounding."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return 0.0
    if one.shape != other.shape:
        return math.inf
    if not one.is_floating_point() or one.numel() == 0:
        return 0.0
    wide, narrow = one.double().cpu().nan_to_num(), other.double().cpu().nan_to_num()
    relative = ((wide - narrow).abs().max() / wide.abs().max().clamp_min(1e-6)).item()
    return relative if relative > _ROUNDING.get(one.dtype, 5e-2) else 0.0
