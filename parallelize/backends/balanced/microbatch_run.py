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
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced.batchnorm import BatchNorms, Moments
from parallelize.backends.balanced.device_transfer import DeviceTransfer
from parallelize.backends.balanced.graph_entries import Microbatch, mark_inside
from parallelize.backends.balanced.stage_threads import Stage, saved_tensors_hooks
from parallelize.runtime.gradients import is_in_backward

__all__ = ["MicrobatchRun", "ModuleHooks", "active_run", "user_hooks"]

Routes = Mapping[int, Sequence[int]]


class _ActiveRun(threading.local):
    """Thread-local variable: the run of the micro-batch that the current thread executes."""

    run: MicrobatchRun | None = None


_active = _ActiveRun()


def active_run() -> MicrobatchRun | None:
    """Return the run of the micro-batch that the current thread executes, or None."""
    return _active.run


class MicrobatchRun:
    """One forward of a micro-batch, or the recomputation of a module in backward.

    Args:
        stages: the stages, in pipeline order.
        routes: id of a module -> the stages of its first, second, ... call; further calls use the last entry.
        transfer: moves tensors between stages; None: all stages are on one device.
        locks: one lock per stage, if other threads run micro-batches; None: one thread runs all of them.
        on_unit: called with each unit that is about to run, and its arguments.
        microbatch: identifies the micro-batch in its graph; None: the batch is not split.

    Attributes:
        moments: moments of the micro-batch, computed by batch norms.
        defers_statistics: whether batch norms compute moments instead of updating their running statistics.
        is_recomputing: whether this is a recomputation in backward.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        routes: Routes,
        *,
        transfer: DeviceTransfer | None = None,
        locks: Sequence[threading.Lock] | None = None,
        on_unit: Callable[[nn.Module, Any], None] | None = None,
        microbatch: Microbatch | None = None,
    ) -> None:
        self.microbatch = microbatch
        self.moments = Moments()
        self.defers_statistics = True
        self.is_recomputing = False
        self.routes = routes
        self._stages = stages
        self._transfer = transfer
        self._locks = locks
        self._on_unit = on_unit
        self._saved_tensors_hooks: Any = None
        self._stage = -1
        self._calls: dict[int, int] = {}

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function`, which calls the model, beginning on stage 0."""
        with self.active():
            return function()

    @contextlib.contextmanager
    def active(self, stage: int = 0) -> Iterator[None]:
        """Make this the active run of the thread, beginning on a stage."""
        before, _active.run = _active.run, self
        self._saved_tensors_hooks = saved_tensors_hooks()
        accelerator = next((each.device for each in self._stages if each.device.type != "cpu"), None)
        current = None if accelerator is None else torch.accelerator.current_device_index()
        try:
            self._switch(stage)
            with _autocast_on_cpu(self._stages), contextlib.nullcontext() if self._transfer is None else self._transfer:
                yield
        finally:
            _active.run = before
            if current is not None:
                torch.accelerator.set_device_index(current)
            self._release()

    @property
    def is_in_checkpoint(self) -> bool:
        """Whether forward is inside an activation checkpoint, or another context that changes what autograd saves."""
        return self.is_recomputing or bool(saved_tensors_hooks() != self._saved_tensors_hooks)

    def recomputing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward recomputes what runs now, on the current stage."""
        devices = None if self._transfer is None else self._transfer.devices
        return _recomputation(self._stages, self.routes, devices, stage=self._stage)

    def enter_unit(self, module: nn.Module, args: Any) -> Any:
        """Switch to the stage of a unit that is about to run; return its arguments, moved there, if it needs others."""
        route = self.routes.get(id(module))
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
        return None if self._transfer is None else self._transfer.move_arguments(module, args)

    def leave_module(self, module: nn.Module) -> None:
        """Copy arguments that a unit has changed in place back to where they came from."""
        if self._transfer is not None:
            self._transfer.write_back(module)

    def _switch(self, stage: int) -> None:
        self._release()
        if self._locks is not None:
            self._locks[stage].acquire()
        self._stage = stage
        device = self._stages[stage].device
        if self._locks is not None or device.type != "cpu":
            self._stages[stage].bind_thread()
        if self._transfer is not None:
            self._transfer.device = device

    def _release(self) -> None:
        if self._locks is not None and self._stage >= 0:
            self._locks[self._stage].release()
        self._stage = -1


def _autocast_on_cpu(stages: Sequence[Stage]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which an accelerator's autocast includes the stages on the CPU, which run the same model."""
    kinds = {stage.device.type for stage in stages}
    enabled = next((kind for kind in kinds - {"cpu"} if torch.is_autocast_enabled(kind)), None)
    if enabled is None or "cpu" not in kinds:
        return contextlib.nullcontext()
    return torch.autocast("cpu", torch.get_autocast_dtype(enabled), cache_enabled=torch.is_autocast_cache_enabled())


@contextlib.contextmanager
def _recomputation(
    stages: Sequence[Stage], routes: Routes, devices: Collection[torch.device] | None, *, stage: int
) -> Iterator[None]:
    """Run modules again in backward, beginning on a stage; batch norms do not count them again."""
    run = MicrobatchRun(stages, routes, transfer=None if devices is None else DeviceTransfer(devices))
    run.is_recomputing = True
    with run.active(stage):
        yield


class _Hook:
    """Hook of a module of the user's model; copies and pickles of the module have a function that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext, "__exit__")  # takes any arguments, and loads without this package


def user_hooks(module: nn.Module) -> list[Any]:
    """Return the forward hooks and forward pre-hooks of a module, without those of `ModuleHooks`."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return []
    every = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [each for each in every if not isinstance(each, _Hook)]


class ModuleHooks:
    """Hooks that follow the calls of a model's modules on all threads: in runs, and in recomputations in backward.

    Hooks are registered on construction, and removed by `close`. Only modules where something is to be done have one.

    Args:
        model: the user's model.
        stages: the stages, in pipeline order.
        routes: those of the runs that are followed.
        norms: the model's batch norms.
        output_device: device of the inputs and outputs.
        borders: see `border_units`; None: every unit.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Stage],
        routes: Routes,
        norms: BatchNorms,
        *,
        output_device: torch.device,
        borders: Collection[int] | None = None,
    ) -> None:
        self._stages, self._routes, self._norms = stages, routes, norms
        devices = {output_device, *(stage.device for stage in stages)}
        self._devices = devices if len(devices) > 1 else None
        self._has_ends = self._devices is not None or bool(norms)  # whether anything is to be done after a module
        # Thread -> the outermost module that it recomputes in backward, and the context of its run.
        self._recomputed: dict[int, tuple[nn.Module, contextlib.ExitStack]] = {}
        self._handles: list[Any] = []
        borders = routes if borders is None else borders
        for module in model.modules():
            if id(module) in borders or module in norms:
                self._handles.append(module.register_forward_pre_hook(_Hook(self._before), prepend=True))
                if self._has_ends:
                    self._handles.append(self._register_after(module))
            elif self._devices is not None and id(module) in routes:
                # An activation checkpoint may call it in backward, with arguments on several devices.
                self._handles.append(module.register_forward_pre_hook(_Hook(self._before_recomputation), prepend=True))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _register_after(self, module: nn.Module) -> Any:
        return module.register_forward_hook(_Hook(self._after), prepend=True, always_call=True)

    def _before_recomputation(self, module: nn.Module, args: Any) -> Any:
        if torch.compiler.is_compiling() or _active.run is not None or not is_in_backward():
            return None
        moved = self._before(module, args)
        self._recomputed[threading.get_ident()][1].callback(self._register_after(module).remove)
        return moved

    def _before(self, module: nn.Module, args: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        if _active.run is None and self._has_ends and is_in_backward():
            context = contextlib.ExitStack()
            stage = self._routes.get(id(module), (0,))[0]
            context.enter_context(_recomputation(self._stages, self._routes, self._devices, stage=stage))
            self._recomputed[threading.get_ident()] = module, context
        run = _active.run
        if run is None or run.routes is not self._routes:
            return None
        moved = run.enter_unit(module, args)
        if run.defers_statistics:
            self._norms.before(module, args if moved is None else moved)
        return moved

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        del args, output
        run = None if torch.compiler.is_compiling() else _active.run
        if run is None or run.routes is not self._routes:
            return
        self._norms.after(module, None if run.is_recomputing else run.moments)
        run.leave_module(module)
        outermost, context = self._recomputed.get(threading.get_ident(), (None, None))
        if context is not None and outermost is module:
            del self._recomputed[threading.get_ident()]
            context.close()
