"""Recording of the first optimizer steps of a function in one process: losses, gradients, weights and the samples."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelize.call.function_ref import FunctionRef
from parallelize.data.select_source import MergedRanks
from parallelize.runtime.context import current, device
from parallelize.runtime.rng_state import RNGState
from parallelize.torch_patches import step
from parallelize.torch_patches.backward import Order, Pass, Run, subscribed
from parallelize.torch_patches.forward import routed_models
from parallelize.torch_patches.step import parameters_of

__all__ = ["RecordedFunction", "RecordedStep", "Recording"]

_MAX_ELEMENTS = 2**16
"""Elements of each parameter and gradient that are kept, evenly spaced: enough to find a difference."""

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One optimizer step.

    Args:
        loss: sum of the losses of all backward passes since the last step; None: none was a single number.
        names: names of the optimizer's parameters.
        gradients: elements of their gradients, on rank 0; None: no gradient.
        weights: elements of the parameters after the step, on rank 0.
        learning_rates: the learning rate of each param group.
        draws_random_numbers: whether a global generator advanced between the batch and the step.
        batch_norm: name of a batch norm in training mode that normalizes by this process's batch; "": none.
        is_in_block: whether a model was in a parallel_model block.
    """

    loss: float | None
    names: tuple[str, ...] = ()
    gradients: tuple[torch.Tensor | None, ...] = ()
    weights: tuple[torch.Tensor, ...] = ()
    learning_rates: tuple[float, ...] = ()
    draws_random_numbers: bool = False
    batch_norm: str = ""
    is_in_block: bool = True


@dataclass(frozen=True)
class Recording:
    """The optimizer steps of one rank.

    Args:
        steps: the steps, in order.
        initial: elements of the parameters before each optimizer's first step, on rank 0.
        fingerprints: for each batch of shard_loader, the hash of each merged rank's samples.
    """

    steps: list[RecordedStep] = field(default_factory=list)
    initial: list[torch.Tensor] = field(default_factory=list)
    fingerprints: list[tuple[str, ...]] = field(default_factory=list)


class _EndOfRecording(BaseException):
    """Ends the user's function after the last recorded step; not an Exception, so that user code does not catch it."""


class RecordedFunction:
    """Replacement for the user's function: runs it for some optimizer steps and returns their Recording.

    Args:
        function: the user's function.
        steps: number of optimizer steps.
        merged_ranks: number of ranks whose batches one process reads; 1: the process reads its own.
    """

    def __init__(self, function: Callable[..., Any], *, steps: int, merged_ranks: int) -> None:
        functools.update_wrapper(self, function)
        self.__globals__ = getattr(function, "__globals__", {})  # a worker copies them to its `__main__`
        self._function, self._steps, self._merged_ranks = function, steps, merged_ranks

    def __reduce__(self) -> Any:
        return _load, (FunctionRef.of(self._function), self._steps, self._merged_ranks)

    def __call__(self, *args: Any, **kwargs: Any) -> Recording:
        """Run the user's function until it has made the steps, or returns."""
        world = current().world
        ranks = range(self._merged_ranks) if world.world_size == 1 else (world.rank,)
        recorder = _Recorder(self._steps)
        merged = MergedRanks(ranks, max(world.world_size, self._merged_ranks), recorder.record_batch)
        with contextlib.suppress(_EndOfRecording), merged.active(), recorder.hooks_installed():
            self._function(*args, **kwargs)
        return recorder.recording


def _load(function: FunctionRef, steps: int, merged_ranks: int) -> RecordedFunction:
    return RecordedFunction(function.resolve(), steps=steps, merged_ranks=merged_ranks)


class _Recorder:
    """Hooks of torch's optimizers and of backward that record steps, and end the function after the last one."""

    def __init__(self, steps: int) -> None:
        self.recording = Recording()
        self._steps, self._losses = steps, list[float]()
        self._is_main = current().world.is_main
        self._known_optimizers: set[int] = set()
        self._rng_at_batch: RNGState | None = None

    @contextlib.contextmanager
    def hooks_installed(self) -> Iterator[None]:
        handles = step.before_step(self._before_step), step.after_step(self._after_step)
        with handles[0], handles[1], subscribed(Order.RECORD, self._backward):
            yield

    def record_batch(self, fingerprints: tuple[str, ...]) -> None:
        """Record the hashes of the samples of a batch that shard_loader yields, one for each merged rank."""
        self.recording.fingerprints.append(fingerprints)
        self._rng_at_batch = RNGState([device()], has_python=True)

    def _backward(self, each: Pass, run: Run) -> None:
        scalars = [root for root in each.roots if isinstance(root, torch.Tensor) and root.numel() == 1]
        self._losses += [float(root.detach()) for root in scalars]
        run(each)

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) not in self._known_optimizers:
            self._known_optimizers.add(id(optimizer))
            self.recording.initial.extend(self._elements(each) for each in parameters_of(optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters, models = list(parameters_of(optimizer)), routed_models()
        norms = [each for model in models for each in model.named_modules() if _uses_batch_statistics(each[1])]
        self.recording.steps.append(
            RecordedStep(
                loss=sum(self._losses) if self._losses else None,
                names=_names(parameters, models),
                gradients=tuple(None if each.grad is None else self._elements(each.grad) for each in parameters),
                weights=tuple(self._elements(each) for each in parameters),
                learning_rates=tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups),
                draws_random_numbers=self._rng_at_batch is not None and self._rng_at_batch.has_changed(),
                batch_norm=f"{norms[0][0]} ({type(norms[0][1]).__name__})" if norms else "",
                is_in_block=bool(models),
            )
        )
        self._losses.clear()
        if len(self.recording.steps) >= self._steps:
            raise _EndOfRecording

    def _elements(self, value: torch.Tensor) -> torch.Tensor:
        """Return up to _MAX_ELEMENTS elements on the CPU; a collective if the tensor is sharded."""
        full = value.detach()
        if hasattr(value, "shard"):  # a tensor of an fsdp block, whose module takes a second to import
            from parallelize.backends.fsdp.full_tensors import full_tensor

            full = full_tensor(value.shard)
        if not self._is_main:
            return torch.empty(0)
        full = (full.to_dense() if full.layout is not torch.strided else full).reshape(-1)
        full = torch.view_as_real(full).reshape(-1) if full.is_complex() else full
        return full[:: -(-full.numel() // _MAX_ELEMENTS) or 1].to("cpu", copy=True)


def _uses_batch_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BATCH_NORMS) and module.training


def _names(parameters: list[Any], models: list[nn.Module]) -> tuple[str, ...]:
    """Return the names of parameters in the models that hold them, with the model's class if there are several."""
    names = {
        id(parameter): f"{type(model).__name__}.{name}" if len(models) > 1 else name
        for model in models
        for name, parameter in model.named_parameters()
    }
    return tuple(names.get(id(each), f"parameter {number}") for number, each in enumerate(parameters))
