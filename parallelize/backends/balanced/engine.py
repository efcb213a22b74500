"""Engine of backend="balanced": builds one model's pipeline on the first batch, and removes it when the block ends."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from parallelize.backends.balanced import units
from parallelize.backends.balanced.batch import opaque_inputs
from parallelize.backends.balanced.batch_validation import BatchKind
from parallelize.backends.balanced.device_transfer import to_device
from parallelize.backends.balanced.hardware import device_specs
from parallelize.backends.balanced.microbatch_run import active_run
from parallelize.backends.balanced.pipeline import Pipeline
from parallelize.backends.balanced.plan import Plan, PlannerOptions, plan, remember, signature
from parallelize.backends.balanced.planner import Planner
from parallelize.backends.balanced.stage_placement import ModelPlacement
from parallelize.backends.balanced.stage_threads import stages_on
from parallelize.backends.ddp_engine import DDPOptions, ReplicatedEngine
from parallelize.errors import ConfigError
from parallelize.plugins.base import Engine, Inner
from parallelize.runtime.startup_summary import announced

__all__ = ["BalancedEngine"]


_OTHER_DEVICE = re.compile("same device|different devices|two devices")


class BalancedEngine(Engine):
    """Runs a model's batches through its pipeline, or on one device if the plan does not split the model.

    Args:
        devices: devices of the run.
        output_device: device of the returned outputs, where the training loop has its targets.
        options: the user's options for the plan.
        given: returns the plan made earlier; None: make one from the first batch.
        path: file to which a plan that was made is written, by rank 0, which alone asks for `given` if there is one.
        ddp_options: options for averaging gradients over processes; None if there is one process.
    """

    moves_inputs = True
    keeps_parameters = False

    def __init__(
        self,
        inner: Inner,
        *,
        devices: tuple[torch.device, ...],
        output_device: torch.device,
        options: PlannerOptions,
        given: Callable[[], Plan | None],
        path: str | os.PathLike[str] | None,
        ddp_options: DDPOptions | None,
    ) -> None:
        self.module = _PipelineEntry(inner, self)
        self.local = _PipelineEntry(inner, self, is_local=True)
        self._is_replicated = ddp_options is not None
        if ddp_options is not None:
            self.reduction = ddp_options.reduction(inner)
        self.input_device = output_device
        self._inner = inner
        self._devices, self._options, self._ddp_options = devices, options, ddp_options
        self._given, self._path = given, path
        self._ddp_engine: Engine | None = None
        self._runner: nn.Module | None = None
        self._kinds: dict[Plan, dict[Any, BatchKind | None]] = {}
        self._cleanup = contextlib.ExitStack()
        self._placement = ModelPlacement(inner.model)
        self._cleanup.enter_context(self._placement.restoring())

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_local: bool) -> Any:
        """Return the model's output for a batch; the first batch that can be planned makes the plan."""
        if self._runner is None:
            is_alone = is_local and self._is_replicated
            if is_alone or (not torch.is_grad_enabled() and opaque_inputs((args, kwargs))):
                # Run without a plan: its broadcast needs all ranks, and a cache that forward fills cannot be split.
                device = next((each.device for each in self._inner.model.parameters()), self.input_device)
                args, kwargs = to_device((args, kwargs), device)
                return to_device(self._inner(*args, **kwargs), self.input_device)
            self._set_up(args, kwargs)
        assert self._runner is not None  # set up above
        runner = self._runner if self._ddp_engine is None or is_local else self._ddp_engine.module
        with plan(self._inner.model).explaining_out_of_memory():
            return runner(*args, **kwargs)

    @property
    @override
    def is_replica(self) -> bool:
        return self._ddp_engine is not None  # the first batch has made all ranks' parameters equal

    @override
    def close(self, *, failed: bool) -> None:
        """Remove the pipeline, and move the model back.

        Raises:
            ConfigError: the block has failed by an operation on parameters of several devices.
            OutOfMemoryError: the block has run out of memory, as in an optimizer step; names the predicted bytes.
        """
        with self._explaining(sys.exc_info()[1] if failed else None):
            self._close(failed=failed)

    @contextlib.contextmanager
    def _explaining(self, error: BaseException | None) -> Iterator[None]:
        """Explain the error that has ended the block, when what runs in this context has ended."""
        devices = sorted({str(each.device) for each in self._inner.model.parameters()})
        is_over_several = type(error) in {RuntimeError, TypeError} and len(devices) > 1
        has_runner = self._runner is not None
        yield
        if is_over_several and _OTHER_DEVICE.search(str(error)):
            raise ConfigError(
                f"an operation has operands on several devices: {str(error).splitlines()[0]}",
                why=f"backend='balanced' has moved the model's parameters to {', '.join(devices)}; a copy made before "
                "the block, as for a moving average, and sums of norms are on one of them",
                fix="move the other operand: average.lerp_(p.to(average.device), 0.1), p.grad.norm().to(device()); or "
                "use torch.optim.swa_utils.AveragedModel and torch.nn.utils.clip_grad_norm_, which do",
            ) from error
        if has_runner and isinstance(error, torch.OutOfMemoryError):
            with plan(self._inner.model).explaining_out_of_memory():
                raise error

    def _close(self, *, failed: bool) -> None:
        try:
            if self._ddp_engine is not None:
                self._ddp_engine.close(failed=failed)
        finally:
            self._cleanup.close()
            self._runner = None

    def _set_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model, device = self._inner.model, self.input_device
        text = f"profiling {type(model).__name__} on its first batch, to choose the stages: the time of about 10 steps"
        with announced(text):
            plan = self._shared_plan(args, kwargs)
        remember(model, plan)
        if plan.is_split:
            runner: nn.Module = self._cleanup.enter_context(self._pipeline(plan))
        else:
            self._placement.move(units.module_stages(model, {}), stages_on([device]))
            runner = self._inner
        if self._ddp_options is not None:
            self._ddp_engine = ReplicatedEngine(self._ddp_options, runner, inner=self._inner, device=device)
        self._runner = runner

    @contextlib.contextmanager
    def _pipeline(self, plan: Plan) -> Iterator[Pipeline]:
        """Move the model to the devices of a plan's stages, and run it there inside the context."""
        model, dim = self._inner.model, self._options.batch_dim
        routes = units.unit_routes(model, plan.events, plan.bounds)
        self._placement.move(units.module_stages(model, routes), stages_on([*map(torch.device, plan.devices)]))
        pipeline = Pipeline(self._inner, plan, batch_dim=dim, output_device=self.input_device)
        # What planning has validated with this plan is not validated again, except where a warning is due.
        known = self._kinds.setdefault(replace(plan, measured_s=None), pipeline.kinds)
        pipeline.kinds |= {key: kind for key, kind in known.items() if kind is not None and not kind.has_warned}
        with contextlib.closing(pipeline):
            yield pipeline

    def _shared_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Return the plan, equal on every rank: the user's plan, or one that rank 0 reads or makes, and broadcasts."""
        if not self._is_replicated or (self._path is None and self._given() is not None):
            return self._plan(args, kwargs)
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                found = [self._plan(args, kwargs)]
            except Exception as error:  # noqa: BLE001  # raised below, on every rank
                found = [error]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], Exception):
            raise found[0]
        plan: Plan = found[0]
        return plan

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        plan = self._given()
        if plan is not None:
            self._check_plan(plan)
            return plan
        plan = Planner(
            inner=self._inner,
            pipeline=self._pipeline,
            device_specs=device_specs(self._devices, memory=self._options.memory, model=self._inner.model),
            output_device=self.input_device,
            placement=self._placement,
            options=self._options,
        ).plan(args, kwargs)
        if self._path is not None:
            plan.save(self._path)
        return plan

    def _check_plan(self, plan: Plan) -> None:
        model = self._inner.model
        actual = signature(model)
        expected, given = f"{plan.model} {plan.signature}", f"{type(model).__name__} {actual}"
        if plan.signature == actual:
            available = {str(device) for device in (*self._devices, self.input_device)}
            if set(plan.devices) <= available:
                return
            expected, given = f"devices {', '.join(plan.devices)}", f"a run on {', '.join(sorted(available))}"
        raise ConfigError(
            f"plan= is for {expected}, and this is {given}",
            why="a plan refers to submodules and devices by name",
            fix="drop plan=, or remove its file, to profile again; to save a plan: parallelize.plan(model).save(path)",
        )


class _PipelineEntry(nn.Module):
    """Module that receives the model's calls inside the block, and passes them to the engine."""

    def __init__(self, inner: Inner, engine: BalancedEngine, *, is_local: bool = False) -> None:
        super().__init__()
        self._inner = inner
        self._engine = engine
        self._is_local = is_local

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if active_run() is not None:  # inside a micro-batch: the model has called itself
            return self._inner.bind_method(self._inner.method, self._inner.model)(*args, **kwargs)
        args, kwargs = to_device((args, kwargs), self._engine.input_device)
        return self._engine.run(args, kwargs, is_local=self._is_local)
