"""Engine of backend="balanced": builds one model's pipeline on the first batch, and removes it when the block ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from parallelize.agreement.gather import broadcast_object
from parallelize.backends.balanced.microbatch import OTHER_DEVICE, Staged
from parallelize.backends.balanced.pipeline import Pipeline
from parallelize.backends.balanced.plan import Plan, plan, remember
from parallelize.backends.balanced.planner import Planner
from parallelize.backends.balanced.transfer import place, restoring_placement, to_device
from parallelize.backends.batches import seeing_joined_outputs
from parallelize.backends.ddp_engine import ReplicatedEngine
from parallelize.backends.model_state import named_tensors
from parallelize.errors import ConfigError, SyncError
from parallelize.plugins.base import Engine, Inner
from parallelize.run.run_key import run_key
from parallelize.run.startup_summary import announced
from parallelize.torch_patches.transforms import refuse_transform

if TYPE_CHECKING:
    from parallelize.backends.balanced.plugin import BalancedBackend

__all__ = ["BalancedEngine"]


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
    plan: Plan | None = None
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
        args, kwargs = inputs
        runner: Any = self._runner if self._replicated is None else self._replicated.module
        return runner(*args, **kwargs)

    @override
    def local(self, *args: Any, **kwargs: Any) -> Any:
        if self._runner is not None:
            args, kwargs = to_device((args, kwargs), self.device)
            return self._runner(*args, **kwargs)
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
            ConfigError: the block has failed by an operation on tensors of several devices.
            OutOfMemoryError: the block has run out of memory; names the predicted bytes.
        """
        error, is_split = sys.exc_info()[1], self._runner is not None
        try:
            if self._replicated is not None:
                self._replicated.close(failed=failed)
        finally:
            self._cleanup.close()
            self._runner = None
        if failed and is_split:
            self._explain(error)

    def _set_up(self, inputs: Any) -> None:
        refuse_transform(
            "backend='balanced' measures the model on the first batch, and a transform hides its values",
            fix="call the model once with a plain batch before, or use backend='ddp'",
        )
        model = self.inner.model
        text = f"profiling {type(model).__name__} on its first batch, to choose the stages: the time of about 10 steps"
        with announced(text):
            found = self._shared_plan(inputs)
        self.plan = found
        remember(model, found)
        runner: Any = self.inner
        if found.is_split:
            runner = self._cleanup.enter_context(self._running(found))
            self._cleanup.enter_context(seeing_joined_outputs())
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
        planner = Planner(
            inner=self.inner,
            devices=self.devices,
            output_device=self.device,
            options=self.options,
            running=self._running,
        )
        if self.is_alone:
            return planner.plan(inputs)
        names = [*map(str, (*self.devices, self.device))]
        fields, names_there = _of_rank_0(lambda: (vars(planner.plan(inputs)), names))
        devices = tuple(names[names_there.index(device)] for device in fields["devices"])
        return Plan(**{**fields, "devices": devices})

    def _explain(self, error: BaseException | None) -> None:
        """Raise an explanation of an error of memory, or of several devices."""
        made, text = plan(self.inner.model), str(error).partition("\n")[0]
        # The explanation has a cause: a block of two models explains an error once.
        if isinstance(error, torch.OutOfMemoryError) and error.__cause__ is None:
            pairs = zip(made.devices, made.memory_bytes, strict=False)
            predicted = ", ".join(f"{size:.0f} on {device}" for device, size in pairs) or "not known"
            explained = ConfigError(
                f"out of memory under backend='balanced': {text}",
                why=f"predicted bytes: {predicted}, for batches of {made.samples} samples like the first one",
                fix="use smaller batches, torch.utils.checkpoint in the model, the true optimizer_state=, or a smaller "
                "memory= than these bytes, for which the model is planned again",
            )
            raise torch.OutOfMemoryError(str(explained)) from error
        if isinstance(error, (RuntimeError, TypeError)) and len({*made.devices}) > 1 and OTHER_DEVICE.search(text):
            raise ConfigError(
                f"an operation has operands on several devices: {text}",
                why=f"backend='balanced' has moved the model's parameters to {', '.join(made.devices)}, and moves "
                "tensors only where forward, or torch.utils.checkpoint in backward, calls submodules",
                fix="move the other operand: average.lerp_(p.to(average.device), 0.1), p.grad.norm().to(device()); use "
                "torch's AveragedModel and clip_grad_norm_, which do; checkpoint the module that holds the tensors",
            ) from error


def _of_rank_0(make: Callable[[], Any]) -> Any:
    """Return what rank 0 has made, or raise its error on every rank; a collective."""
    has_key = run_key() is not None
    if dist.get_rank() == 0:
        try:
            made = make()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # one that cannot be pickled: the others are told so
                broadcast_object(error if has_key else text)
            raise
        return broadcast_object(made)
    received = broadcast_object(None)
    if isinstance(received, Exception):
        raise received
    if isinstance(received, str):
        raise SyncError(
            f"rank 0 has made no plan: {received}",
            why="all ranks split the model by rank 0's plan",
            fix="see the error of rank 0",
            is_secondary=True,
        )
    return received
