"""Engine of backend="balanced": builds one model's pipeline on the first batch, and removes it when the block ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from parallelize.backends.balanced.batch import seeing_joined_outputs
from parallelize.backends.balanced.microbatch import OTHER_DEVICE, Staged
from parallelize.backends.balanced.pipeline import Pipeline
from parallelize.backends.balanced.plan import Plan, full_device, plan, remember
from parallelize.backends.balanced.planner import Planner
from parallelize.backends.balanced.transfer import named_tensors, place, restoring_placement, to_device
from parallelize.backends.ddp_engine import ReplicatedEngine
from parallelize.errors import ConfigError
from parallelize.plugins.base import Engine, Inner
from parallelize.runtime.startup_summary import announced
from parallelize.torch_patches.backward import Order, Pass, Run, subscribed

if TYPE_CHECKING:
    from parallelize.backends.balanced.plugin import BalancedBackend

__all__ = ["BalancedEngine"]

_BYTES = "predicted bytes:"


@dataclass(kw_only=True, eq=False)
class BalancedEngine(Engine):
    """Runs a model's batches through its pipeline, or on one device if the plan does not split the model.

    Args:
        inner: holds the model.
        devices: devices of this process.
        device: that of the returned outputs, where the training loop has its targets.
        options: the user's options.
        is_alone: whether there is one process; gradients are averaged over several.
    """

    moves_inputs = True
    keeps_parameters = False
    inner: Inner
    devices: Sequence[torch.device]
    device: torch.device
    options: BalancedBackend
    is_alone: bool
    _replicated: Engine | None = None
    _runner: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.reduction = None if self.is_alone else self.options.reduction(self.inner)
        self._cleanup = contextlib.ExitStack()
        self._cleanup.enter_context(restoring_placement(self.inner.model))

    @override
    def module(self, *args: Any, **kwargs: Any) -> Any:
        inputs = to_device((args, kwargs), self.device)
        if self._runner is None:
            self._set_up(inputs)
        return self._run(self._runner if self._replicated is None else self._replicated.module, inputs)

    @override
    def local(self, *args: Any, **kwargs: Any) -> Any:
        if self._runner is not None:
            return self._run(self._runner, to_device((args, kwargs), self.device))
        if self.is_alone:
            return self.module(*args, **kwargs)
        # The plan needs all ranks: until then, the model is where it was.
        there = next((each.device for each in named_tensors(self.inner.model).values()), self.device)
        args, kwargs = to_device((args, kwargs), there)
        return to_device(self.inner(*args, **kwargs), self.device)

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

    def _run(self, runner: Any, inputs: Any) -> Any:
        args, kwargs = inputs
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
            place(model, {}, otherwise=self.device)
        if not self.is_alone:
            self._replicated = ReplicatedEngine(self.options, runner, inner=self.inner)
        self._runner = runner

    @contextlib.contextmanager
    def _running(self, found: Plan) -> Iterator[Pipeline]:
        """Move the model to the devices of a plan's stages, and run it there inside the context."""
        units, model = found.unit_devices(), self.inner.model
        place(model, units, otherwise=self.device)
        with Staged(model, units, self.device) as stages:
            yield Pipeline(
                inner=self.inner,
                staged=stages,
                microbatches=found.microbatches,
                batch_dim=self.options.batch_dim,
            )

    def _shared_plan(self, inputs: Any) -> Plan:
        """Return the plan, equal on every rank: the user's, or rank 0's, on the devices of this process."""
        given = self.options.plan
        if given is not None:
            if {name for name, _ in self.inner.model.named_modules()}.issuperset(given.units):
                return given
            raise ConfigError(
                f"plan= is for another {given.model}",
                why="a plan refers to submodules by name",
                fix="drop plan=, to profile this model",
            )
        if self.is_alone:
            return self._plan(inputs)
        found: list[Any] = [None]  # rank 0's plan, with numbers of devices in place of their names; or its error
        names = [*map(str, (*self.devices, self.device))]
        if dist.get_rank() == 0:
            try:
                made = self._plan(inputs)
                found = [replace(made, devices=tuple(str(names.index(each)) for each in made.devices))]
            except Exception as error:  # noqa: BLE001  # raised below, on every rank
                found = [error]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], Exception):
            raise found[0]
        shared: Plan = found[0]
        return replace(shared, devices=tuple(names[int(each)] for each in shared.devices))

    def _plan(self, inputs: Any) -> Plan:
        return Planner(
            inner=self.inner,
            devices=self.devices,
            output_device=self.device,
            options=self.options,
            running=self._running,
        ).plan(inputs)

    def _backward(self, each: Pass, run: Run) -> None:
        with self._explaining():
            run(each)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Explain errors of several devices, and of memory."""
        made = plan(self.inner.model)
        try:
            yield
        except torch.OutOfMemoryError as error:
            if _BYTES in str(error):
                raise
            pairs = zip(made.devices, made.memory_bytes, strict=False)
            predicted = ", ".join(f"{size:.0f} on {device}" for device, size in pairs)
            text = ConfigError(
                f"{full_device(error) or 'a device'} is out of memory in a step of backend='balanced'",
                why=f"{_BYTES} {predicted or 'not known'}, for batches of {made.samples} samples "
                f"like the first one; {str(error).splitlines()[0]}",
                fix="use smaller batches, torch.utils.checkpoint in the model, the true "
                "optimizer_state=, or a smaller memory= than these bytes, for which the model is "
                "planned again",
            )
            raise torch.OutOfMemoryError(str(text)) from error
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
