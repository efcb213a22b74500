"""Run of one micro-batch through the unmodified model: follows the calls of units, and switches to their stages.

    model.forward    a ──── b ──── c ──── d        ordinary Python
    stage            0 │      1      │   0         of the unit (a submodule) that is about to run

Autograd records one ordinary graph. Units before which the stage does not change have no hook: hooks cost some
microseconds per call. Where such a unit is called on another stage than planned, since the order of calls depends on
the data, its operations run on that stage. A module that an activation checkpoint calls again in backward runs on its
stage, too, and counts for no statistics.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.backward import Microbatch, mark_inside
from parallelize.backends.balanced.batchnorm import BatchNorms, Moments
from parallelize.backends.balanced.device_transfer import Copies, DeviceTransfer
from parallelize.backends.balanced.stage_threads import Stage, saved_tensors_hooks
from parallelize.torch_patches.backward import is_in_backward

__all__ = ["MicrobatchRun", "StagedModel", "active_run", "user_hooks"]


class _ActiveRun(threading.local):
    """Thread-local variable: the run of the micro-batch that the current thread executes."""

    run: MicrobatchRun | None = None


_active = _ActiveRun()


def active_run() -> MicrobatchRun | None:
    """Return the run of the micro-batch that the current thread executes, or None."""
    return _active.run


def _check_recomputation() -> None:
    """Check that backward will not recompute operations of a further pipeline: it would do so in the first one.

    Raises:
        CannotSplitError: they are in an activation checkpoint, or another context of saved-tensor hooks.
    """
    run = _active.run
    if run is not None and run.pipeline and torch.is_grad_enabled() and run.is_in_checkpoint:
        raise refusals.one_pipeline("forward has an activation checkpoint, or other hooks of saved tensors")


class MicrobatchRun:
    """One forward of a micro-batch, or the recomputation of a module in backward.

    Args:
        copies: copies of parameters that all micro-batches of a forward share.
        locks: one lock per stage, if other threads run micro-batches; None: one thread runs all of them.
        on_unit: called with each unit that is about to run, and its arguments.
        microbatch: identifies the micro-batch in its graph; None: the batch is not split.
        pipeline: index of the pipeline in which the micro-batch runs.
    """

    device: torch.device  # of the current stage
    defers_statistics = True  # whether batch norms compute moments instead of updating their running statistics

    def __init__(
        self,
        staged: StagedModel,
        *,
        copies: Copies | None = None,
        locks: Sequence[threading.Lock] | None = None,
        on_unit: Callable[[nn.Module, Any], None] | None = None,
        microbatch: Microbatch | None = None,
        pipeline: int = 0,
    ) -> None:
        self.microbatch, self.pipeline = microbatch, pipeline
        self.moments: Moments | None = {}  # computed by batch norms; None: this is a recomputation in backward
        self.staged = staged
        self._first = pipeline * (len(staged.stages) // staged.pipelines)  # index of the pipeline's first stage
        self.transfer: DeviceTransfer | None = None
        if len(staged.devices) > 1:
            self.transfer = DeviceTransfer(staged.devices, copies, on_copy=_check_recomputation)
        self._locks = locks
        self._on_unit = on_unit
        self._saved_tensors_hooks: Any = None
        self._stage = -1
        self._calls: dict[int, int] = {}

    @contextlib.contextmanager
    def active(self, stage: int = 0) -> Iterator[None]:
        """Make this the active run of the thread, beginning on a stage."""
        before, _active.run = _active.run, self
        self._saved_tensors_hooks = saved_tensors_hooks()
        accelerator = next((each for each in self.staged.devices if each.type != "cpu"), None)
        current = None if accelerator is None else torch.accelerator.current_device_index()
        try:
            self._switch(stage)
            with _autocast_on_cpu(self.staged.stages), self.transfer or contextlib.nullcontext():
                yield
        finally:
            _active.run = before
            if current is not None:
                torch.accelerator.set_device_index(current)
            self._release()

    @property
    def is_in_checkpoint(self) -> bool:
        """Whether forward is inside an activation checkpoint, or another context that changes what autograd saves."""
        return self.moments is None or bool(saved_tensors_hooks() != self._saved_tensors_hooks)

    def recomputing(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Return a function that makes contexts in which backward recomputes what runs now, on the current stage."""
        return functools.partial(self.staged.recomputing, self._stage)

    def enter_unit(self, module: nn.Module, args: Any) -> Any:
        """Switch to the stage of a unit that is about to run; return its arguments, moved there, if it needs others."""
        route = self.staged.routes.get(id(module))
        if route is None:
            return None
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        stage = route[min(call, len(route) - 1)]
        if stage != self._stage:
            self._switch(stage)
        if self._on_unit is not None:
            self._on_unit(module, args)
        if self.microbatch is not None:
            mark_inside(args, self.microbatch)
        if self.transfer is None:
            return None
        _check_recomputation()
        return self.transfer.move_arguments(args)

    def _switch(self, stage: int) -> None:
        self._release()
        if self._locks is not None:
            self._locks[self._first + stage].acquire()
        self._stage, target = stage, self.staged.stages[self._first + stage]
        self.device = target.device
        if self._locks is not None or target.device.type != "cpu":
            target.bind_thread()
        if self.transfer is not None:
            self.transfer.device = target.device

    def _release(self) -> None:
        if self._locks is not None and self._stage >= 0:
            self._locks[self._first + self._stage].release()
        self._stage = -1


def _autocast_on_cpu(stages: Sequence[Stage]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which an accelerator's autocast includes the stages on the CPU, which run the same model."""
    kinds = {stage.device.type for stage in stages}
    enabled = next((kind for kind in kinds - {"cpu"} if torch.is_autocast_enabled(kind)), None)
    if enabled is None or "cpu" not in kinds:
        return contextlib.nullcontext()
    return torch.autocast("cpu", torch.get_autocast_dtype(enabled), cache_enabled=torch.is_autocast_cache_enabled())


class _Hook(functools.partial[Any]):
    """Hook of a module of the user's model; copies and pickles of the module have a function that does nothing."""

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext, "__exit__")  # takes any arguments, and loads without this package


def user_hooks(module: nn.Module) -> list[Any]:
    """Return the forward hooks and forward pre-hooks of a module, without those of `StagedModel`."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return []
    every = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [each for each in every if not isinstance(each, _Hook)]


class StagedModel:
    """A model whose units run on stages: hooks follow the calls of its modules on all threads, also in recomputations.

    Hooks are registered on construction, and removed by `close`. Only modules where something is to be done have one.

    Args:
        stages: the stages, in order, one pipeline after another.
        routes: id of a module -> the stages of its first, second, ... call; further calls use the last entry.
        borders: see `border_units`; None: every unit.
        pipelines: number of pipelines, each of which has the same stages.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Stage],
        routes: Mapping[int, Sequence[int]],
        *,
        output_device: torch.device,
        borders: Collection[int] | None = None,
        pipelines: int = 1,
    ) -> None:
        self.model, self.stages, self.routes, self.output_device = model, stages, routes, output_device
        self.pipelines = pipelines
        self.devices = tuple(dict.fromkeys([output_device, *(stage.device for stage in stages)]))
        self.norms = BatchNorms(model)
        self._has_ends = len(self.devices) > 1 or bool(self.norms)  # whether anything is to be done after a module
        # Thread -> the outermost module that it recomputes in backward, and the context of its run.
        self._recomputed: dict[int, tuple[nn.Module, contextlib.ExitStack]] = {}
        self._handles: list[Any] = []
        borders = routes if borders is None else borders
        for module in model.modules():
            if id(module) in borders or module in self.norms:
                self._handles.append(module.register_forward_pre_hook(_Hook(self._before), prepend=True))
                if self._has_ends:
                    self._handles.append(self._register_after(module))
            elif len(self.devices) > 1 and id(module) in routes:
                # An activation checkpoint may call it in backward, with arguments on several devices.
                self._handles.append(module.register_forward_pre_hook(_Hook(self._before_recomputation), prepend=True))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @contextlib.contextmanager
    def recomputing(self, stage: int) -> Iterator[None]:
        """Run modules again in backward, beginning on a stage; batch norms do not count them again."""
        run = MicrobatchRun(self)
        run.moments = None
        with run.active(stage):
            yield

    def _register_after(self, module: nn.Module) -> Any:
        return module.register_forward_hook(_Hook(self._after), prepend=True, always_call=True)

    def _before_recomputation(self, module: nn.Module, args: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        if _active.run is not None or not is_in_backward():
            return _check_recomputation()
        moved = self._before(module, args)
        self._recomputed[threading.get_ident()][1].callback(self._register_after(module).remove)
        return moved

    def _before(self, module: nn.Module, args: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        if _active.run is None and self._has_ends and is_in_backward():
            context = contextlib.ExitStack()
            context.enter_context(self.recomputing(self.routes.get(id(module), (0,))[0]))
            self._recomputed[threading.get_ident()] = module, context
        run = _active.run
        if run is None or run.staged is not self:
            return None
        moved = run.enter_unit(module, args)
        if run.defers_statistics:
            self.norms.before(module, args if moved is None else moved, run.device)
        return moved

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        del output
        run = None if torch.compiler.is_compiling() else _active.run
        if run is None or run.staged is not self:
            return
        self.norms.after(module, run.moments)
        if run.transfer is not None:
            run.transfer.write_back(args)
        outermost, context = self._recomputed.get(threading.get_ident(), (None, None))
        if context is not None and outermost is module:
            del self._recomputed[threading.get_ident()]
            context.close()
