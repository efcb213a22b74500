"""Engine of backend="balanced": plans one model on its first batch, and runs it by the plan.

entry of the block    remembers the devices of the model's parameters
the first batch       a Planner makes the plan; all ranks use rank 0's
each batch            a Pipeline runs it in stages, or the model itself if it is not split;
                      over several processes, gradients are averaged as under "ddp"
end of the block      the parameters move back; some errors of the block are explained
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from parallelize.agreement.gather import broadcast_object
from parallelize.backends.balanced.microbatch import OTHER_DEVICE, Staged
from parallelize.backends.balanced.pipeline import Pipeline
from parallelize.backends.balanced.plan import Plan, remember
from parallelize.backends.balanced.planner import Planner
from parallelize.backends.balanced.transfer import place, restoring_placement, to_device
from parallelize.backends.ddp_engine import ReplicatedEngine
from parallelize.backends.model_state import named_tensors
from parallelize.errors import ConfigError, Fault, SyncError
from parallelize.plugins.base import Engine, Inner
from parallelize.run.startup_summary import announced
from parallelize.torch_patches.transforms import refuse_transform

if TYPE_CHECKING:
    from parallelize.backends.balanced.plugin import BalancedBackend

_NOT_IN_GRAPH = "appears to not have been used in the graph"
"""In torch's error of a gradient by a tensor from which a loss was not computed."""


@dataclass(kw_only=True, eq=False)
class BalancedEngine(Engine):
    """Runs a model's batches through its pipeline, or on one device if the plan does not split it.

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
    plan: Plan | None = None
    # After the first batch: what runs the model, and averages over several processes around it.
    _pipeline: Pipeline | None = None
    _runner: Callable[..., Any] | None = None
    _replicated: Engine | None = None

    def __post_init__(self) -> None:
        # A function of the user's that torch.compile compiles may call the model. In one graph
        # with it, modules of two stages could not be followed, and a plan could not be made.
        disable: Any = torch.compiler.disable
        self.module = disable(self._run)
        self.local = disable(self._run_locally)
        if not self.is_alone:
            self.reduction = self.options.reduction(self.inner)
        self._cleanup = contextlib.ExitStack()
        self._cleanup.enter_context(restoring_placement(self.inner.model))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = to_device((args, kwargs), self.device)
        if self._runner is None:
            self._runner = self._set_up((args, kwargs))
        runner = self._runner
        if self._replicated is not None:
            runner = self._replicated.module
        return runner(*args, **kwargs)

    def _run_locally(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward without gradients, in which no other rank may take part."""
        if self._runner is not None:
            args, kwargs = to_device((args, kwargs), self.device)
            return self._runner(*args, **kwargs)
        if self.is_alone:
            return self._run(*args, **kwargs)
        # The plan needs all ranks: until then, the model is where it was.
        tensors = named_tensors(self.inner.model).values()
        model_device = next((tensor.device for tensor in tensors), self.device)
        args, kwargs = to_device((args, kwargs), model_device)
        return to_device(self.inner(*args, **kwargs), self.device)

    @property
    @override
    def is_replica(self) -> bool:
        # The first batch has made all ranks' parameters equal.
        return self._replicated is not None

    @override
    def close(self, *, failed: bool) -> None:
        """Remove the pipeline, and move the model back.

        Raises:
            ConfigError: the block has failed by an operation on tensors of several devices, or by
                a gradient by a joined output.
            OutOfMemoryError: the block has run out of memory; names the predicted bytes.
        """
        error = sys.exc_info()[1]
        try:
            if self._replicated is not None:
                self._replicated.close(failed=failed)
        finally:
            self._cleanup.close()
            self._runner = None
        if failed and error is not None and self.plan is not None:
            self._explain(error, self.plan)

    def _set_up(self, inputs: Any) -> Callable[..., Any]:
        """Plan the model on its first batch; return what runs it by the plan."""
        refuse_transform(
            "backend='balanced' measures the model on the first batch, and a transform hides its "
            "values",
            fix="call the model once with a plain batch before, or use backend='ddp'",
        )
        model = self.inner.model
        with announced(
            f"profiling {type(model).__name__} on its first batch, to choose the stages: the time "
            "of about a step"
        ):
            plan = self._shared_plan(inputs)
        self.plan = plan
        remember(model, plan)
        unit_devices = plan.unit_devices()
        place(model, unit_devices, otherwise=self.device)
        runner: Any = self.inner
        if plan.is_split:
            stages = Staged(model, unit_devices, self.device)
            self._cleanup.enter_context(stages)
            self._pipeline = Pipeline(
                inner=self.inner,
                staged=stages,
                microbatches=plan.microbatches,
                batch_dim=self.options.batch_dim,
            )
            runner = self._pipeline
        if not self.is_alone:
            self._replicated = ReplicatedEngine(self.options, runner, inner=self.inner)
        run: Callable[..., Any] = runner
        return run

    def _shared_plan(self, inputs: Any) -> Plan:
        """Return the user's plan, or rank 0's; a collective.

        Raises:
            ConfigError: the user's plan is for another model, or no plan fits the devices.
            SyncError: rank 0 has raised an error.
        """
        plan = self.options.plan
        if plan is not None:
            names = {name for name, _ in self.inner.model.named_modules()}
            if names.issuperset(plan.units):
                return plan
            raise ConfigError(
                f"plan= is for another {plan.model}",
                why="a plan refers to submodules by name",
                fix="drop plan=, to profile this model",
            )
        planner = Planner(
            inner=self.inner,
            devices=self.devices,
            output_device=self.device,
            options=self.options,
        )
        if self.is_alone:
            return planner.plan(inputs)
        if dist.get_rank() > 0:
            return self._receive_plan()
        try:
            plan = planner.plan(inputs)
        except Exception as error:
            # The other ranks wait for a plan.
            broadcast_object(f"{type(error).__name__}: {error}")
            raise
        broadcast_object((vars(plan), self._device_names()))
        return plan

    def _receive_plan(self) -> Plan:
        """Return rank 0's plan, on the devices of this process.

        Raises:
            SyncError: rank 0 has raised an error.
        """
        received = broadcast_object(None)
        if isinstance(received, str):
            raise SyncError(
                f"rank 0 has made no plan: {received}",
                why="all ranks split the model by rank 0's plan",
                fix="see the error of rank 0",
                is_secondary=True,
            )
        fields, devices_of_rank_0 = received
        device_here = dict(zip(devices_of_rank_0, self._device_names(), strict=True))
        fields["devices"] = tuple(device_here[device] for device in fields["devices"])
        return Plan(**fields)

    def _device_names(self) -> list[str]:
        """Return the devices of this process; each rank has as many, in the same order."""
        return list(map(str, (*self.devices, self.device)))

    def _explain(self, error: BaseException, plan: Plan) -> None:
        """Raise an explanation of an error that has a cause in the plan."""
        text = str(error).partition("\n")[0]
        if isinstance(error, torch.OutOfMemoryError):
            # The explanation has a cause itself: a block of two models explains an error once.
            if error.__cause__ is None:
                raise torch.OutOfMemoryError(_out_of_memory(text, plan)) from error
        elif not isinstance(error, (RuntimeError, TypeError)):
            return
        elif len(set(plan.devices)) > 1 and OTHER_DEVICE.search(text):
            raise ConfigError(
                f"an operation has operands on several devices: {text}",
                why="backend='balanced' has moved the model's parameters to "
                f"{', '.join(plan.devices)}, and moves tensors only where forward, or "
                "torch.utils.checkpoint in backward, calls submodules",
                fix="move the other operand: average.lerp_(p.to(average.device), 0.1), "
                "p.grad.norm().to(device()); use torch's AveragedModel and clip_grad_norm_, which "
                "do; checkpoint the module that holds the tensors",
            ) from error
        elif _NOT_IN_GRAPH in text and self._pipeline is not None and self._pipeline.joins_several:
            raise ConfigError(
                f"torch.autograd.grad by an output of the model: {text}",
                why="backend='balanced' has joined the outputs of micro-batches, so that no joined "
                "output is computed from another one, as images are from latents",
                fix="compute this gradient in forward; or use "
                "BalancedBackend(microbatches=1), which splits no batch, or backend='ddp'",
            ) from error


def _out_of_memory(text: str, plan: Plan) -> str:
    """Return the explanation of torch's error: what was predicted, and what would fit.

    Args:
        text: of torch's error.
        plan: by which the model has run.
    """
    predicted = []
    for device, size in zip(plan.devices, plan.memory_bytes, strict=False):
        predicted.append(f"{size:.0f} on {device}")
    fault = Fault(
        f"out of memory under backend='balanced': {text}",
        why=f"predicted bytes: {', '.join(predicted) or 'not known'}, for batches of "
        f"{plan.samples} samples like the first one",
        fix="use smaller batches, torch.utils.checkpoint in the model, the true "
        "optimizer_state=, or a smaller memory= than these bytes, for which the model is "
        "planned again",
    )
    return str(fault)
