"""Engine of backend="balanced": builds one model's pipeline on the first batch, and removes it when the block ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from parallelize.backends.balanced.batch import seeing_joined_outputs
from parallelize.backends.balanced.microbatch import OTHER_DEVICE, staged
from parallelize.backends.balanced.pipeline import CHECKS, Pipeline
from parallelize.backends.balanced.plan import Plan, PlannerOptions, plan, remember
from parallelize.backends.balanced.planner import Planner
from parallelize.backends.balanced.transfer import Placement, named_tensors, to_device
from parallelize.backends.ddp_engine import DDPOptions, ReplicatedEngine
from parallelize.errors import ConfigError
from parallelize.plugins.base import Engine, Inner
from parallelize.runtime.startup_summary import announced
from parallelize.torch_patches.backward import Order, Pass, Run, subscribed

__all__ = ["BalancedEngine"]


@dataclass(kw_only=True, eq=False)
class BalancedEngine(Engine):
    """Runs a model's batches through its pipeline, or on one device if the plan does not split the model.

    Args:
        inner: holds the model.
        devices: devices of this process.
        device: that of the returned outputs, where the training loop has its targets.
        options: the user's options for the plan.
        given: plan that the user has given; None: make one from the first batch.
        ddp: options for averaging gradients over processes; None if there is one process.
    """

    moves_inputs = True
    keeps_parameters = False
    inner: Inner
    devices: Sequence[torch.device]
    device: torch.device
    options: PlannerOptions
    given: Plan | None
    ddp: DDPOptions | None
    _replicated: Engine | None = None
    _runner: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.reduction = None if self.ddp is None else self.ddp.reduction(self.inner)
        self._cleanup, self._placement = contextlib.ExitStack(), Placement(self.inner.model)
        self._cleanup.enter_context(self._placement.restoring())

    @override
    def module(self, *args: Any, **kwargs: Any) -> Any:
        if self._runner is None:
            args, kwargs = to_device((args, kwargs), self.device)
            self._set_up((args, kwargs))
        return self._run(self._runner if self._replicated is None else self._replicated.module, args, kwargs)

    @override
    def local(self, *args: Any, **kwargs: Any) -> Any:
        if self._runner is None:
            if self.ddp is not None:  # the plan needs all ranks
                device = next((each.device for each in named_tensors(self.inner.model).values()), self.device)
                args, kwargs = to_device((args, kwargs), device)
                return to_device(self.inner(*args, **kwargs), self.device)
            return self.module(*args, **kwargs)
        return self._run(self._runner, args, kwargs)

    @property
    @override
    def is_replica(self) -> bool:
        return self._replicated is not None  # the first batch has made all ranks' parameters equal

    @override
    def close(self, *, failed: bool) -> None:
        """Remove the pipeline, and move the model back.

        Raises:
            ConfigError: the block has failed by an operation on parameters of several devices.
            OutOfMemoryError: the block has run out of memory, as in an optimizer step; names the predicted bytes.
        """
        error = sys.exc_info()[1]
        with contextlib.nullcontext() if self._runner is None else self._explaining():
            try:
                if self._replicated is not None:
                    self._replicated.close(failed=failed)
            finally:
                self._cleanup.close()
                self._runner = None
            if failed and error is not None:
                raise error

    def _run(self, runner: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = to_device((args, kwargs), self.device)
        with self._explaining():
            return runner(*args, **kwargs)

    def _set_up(self, inputs: Any) -> None:
        model = self.inner.model
        text = f"profiling {type(model).__name__} on its first batch, to choose the stages: the time of about 10 steps"
        with announced(text):
            found = self._shared_plan(inputs)
        remember(model, found)
        runner: Any = self.inner
        if found.is_split:
            runner = self._cleanup.enter_context(self._running(found))
            self._cleanup.enter_context(seeing_joined_outputs())
            self._cleanup.enter_context(subscribed(Order.BEGIN, self._backward))
        else:
            self._placement.move({}, otherwise=self.device)
        if self.ddp is not None:
            self._replicated = ReplicatedEngine(self.ddp, runner, inner=self.inner, device=self.device)
        self._runner = runner

    @contextlib.contextmanager
    def _running(self, found: Plan) -> Iterator[Pipeline]:
        """Move the model to the devices of a plan's stages, and run it there inside the context."""
        units, model = found.unit_devices(), self.inner.model
        self._placement.move(units, otherwise=self.device)
        with staged(model, units, output_device=self.device) as stages:
            yield Pipeline(
                inner=self.inner,
                staged=stages,
                microbatches=found.microbatches,
                batch_dim=self.options.batch_dim,
                device=self.device,
            )

    def _shared_plan(self, inputs: Any) -> Plan:
        """Return the plan, equal on every rank: the user's, or rank 0's, on the devices of this process."""
        names = [*map(str, (*self.devices, self.device))]
        if self.given is not None:
            if {name for name, _ in self.inner.model.named_modules()}.issuperset(self.given.units):
                return self.given
            raise ConfigError(
                f"plan= is for another {self.given.model}",
                why="a plan refers to submodules by name",
                fix="drop plan=, to profile this model",
            )
        found: list[Any] = [None, None]
        if self.ddp is None or dist.get_rank() == 0:
            try:
                made = self._plan(inputs)
                found = [made, [*map(names.index, made.devices)]]
            except Exception as error:
                if self.ddp is None:
                    raise
                found[0] = error  # raised below, on every rank
        if self.ddp is not None:
            dist.broadcast_object_list(found, src=0)
        shared, order = found
        if isinstance(shared, Exception):
            raise shared
        own: Plan = replace(shared, devices=tuple(names[each] for each in order))
        return own

    def _plan(self, inputs: Any) -> Plan:
        made = Planner(
            inner=self.inner,
            devices=self.devices,
            output_device=self.device,
            options=self.options,
            placement=self._placement,
            running=self._running,
        ).plan(inputs)
        return replace(made, checks=CHECKS) if made.microbatches > 1 else made

    def _backward(self, each: Pass, run: Run) -> None:
        with self._explaining():
            run(each)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Explain errors of several devices, and of memory."""
        made = plan(self.inner.model)
        try:
            with made.explaining_out_of_memory():
                yield
        except (RuntimeError, TypeError) as error:
            if len({*made.devices}) == 1 or not OTHER_DEVICE.search(str(error)):
                raise
            raise ConfigError(
                f"an operation has operands on several devices: {str(error).splitlines()[0]}",
                why=f"backend='balanced' has moved the model's parameters to {', '.join(made.devices)}, and moves "
                "tensors only where forward, or torch.utils.checkpoint in backward, calls submodules",
                fix="move the other operand: average.lerp_(p.to(average.device), 0.1), p.grad.norm().to(device()); use "
                "torch's AveragedModel and clip_grad_norm_, which do; checkpoint the module that holds the tensors",
            ) from error
