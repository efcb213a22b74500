"""Record of where gradients come from: averaged by an engine, or the reason why they are not.

States of a tracker, in step with DistributedDataParallel's reducer:

    forward through the engine    averaging begins
    backward                      gradients accumulate and are all-reduced while backward runs
    after backward                averaging ends once the engine has reduced all buckets: these gradients are recorded
    any other backward            gradients are of this rank alone: the reason is recorded
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any
from weakref import ref

import torch
from torch.nn.parallel import DistributedDataParallel

from parallelize.errors import SyncError
from parallelize.inplace.model_structure import Structure
from parallelize.plugins.base import Engine
from parallelize.runtime.gradients import at_end_of_backward
from parallelize.runtime.replace_attribute import replace_attribute

__all__ = [
    "AFTER_BLOCK",
    "ASSIGNED",
    "CHANGED",
    "REPLACED",
    "UNDER_NO_SYNC",
    "UNFROZEN",
    "UNMANAGED",
    "GradientTracker",
    "Origin",
    "Reason",
    "origins",
    "record",
]


@dataclass(frozen=True)
class Reason:
    """Why a gradient may differ between ranks.

    Args:
        why: the reason, for the error.
        fix: what to change, for the error.
    """

    why: str
    fix: str

    def error(self, name: str, found: str) -> SyncError:
        """Build the error for the gradient of a parameter.

        Args:
            name: name of the parameter and its model.
            found: what a comparison has shown.
        """
        return SyncError(f"the gradient of {name} is not averaged over the ranks{found}", why=self.why, fix=self.fix)


_AVERAGE = "average it with parallelize.all_reduce before the step"
ASSIGNED = Reason("no backward in this block computed it since the last step", f"call backward, or {_AVERAGE}")
AFTER_BLOCK = Reason(
    "backward ran after the parallel_model block, for a forward inside it: it covers this rank's batch alone",
    "put the whole loop inside the block: with parallel_model(model): for x, y in loader: ...",
)
BYPASSED = Reason(
    "it was computed from this rank's batch alone: a submodule or a method other than forward was called, the model "
    "was used functionally, or backward ran more often than the model's forward",
    "call the model itself; name the methods that compute it in parallel_model(model, methods=[...]); for several "
    f"forwards call backward once, on the sum of their losses; or {_AVERAGE}",
)
CHANGED = Reason(
    "it was changed after its averaging, in another way on each rank",
    "change it equally on all ranks: draw noise from generators with equal seeds, average what is added to it",
)
INCOMPLETE = Reason(
    "its backward gave other parameters no gradient, so the averaging was never completed",
    "use backend=DDPBackend(find_unused_parameters=True), or call zero_grad before the next backward",
)
REPLACED = Reason(
    "it was replaced after its averaging, as by p.grad = p.grad + torch.autograd.grad(loss, p)[0]",
    "call backward once, on the sum of all losses; or average what is added with parallelize.all_reduce",
)
UNDER_NO_SYNC = Reason(
    "it was accumulated under no_sync, and no backward outside of no_sync has averaged it since",
    "run forward and backward of the last micro-batch outside of no_sync, with every parameter in use",
)
UNFROZEN = Reason(
    "the parameter was unfrozen, added or replaced after the last forward of the model",
    "call the model again, then backward and step",
)
UNMANAGED = Reason(
    "the parameter is in no model of a parallel_model block, and only gradients of these are averaged",
    "pass its module to the block too, parallel_model(model, criterion), and call the module; or average the gradient "
    "with parallelize.all_reduce before the step",
)


# A gradient, and why it may differ between ranks; None: an engine has averaged it. A tuple: a class would be slow.
Origin = tuple[ref[torch.Tensor], Reason | None]

# id of a parameter -> origin of its gradient, for all models in a block.
origins: dict[int, Origin] = {}


def _has_changed(old: torch.Tensor | None, version: int, new: torch.Tensor | None) -> bool:
    """Whether a gradient was replaced or modified in place."""
    return new is not None and (new is not old or new._version != version)


def record(parameter: torch.Tensor, reason: Reason | None) -> None:
    """Record the origin of the gradient that a parameter has now."""
    gradient = parameter.grad
    if gradient is not None:
        origins[id(parameter)] = ref(gradient), reason


_clock = itertools.count(1)
_gradient_of = attrgetter("grad")
_REFERENT: Any = ref.__call__
_NO_GRADIENT: Any = ref(Reason("", ""))  # a reference to nothing


class GradientTracker:
    """Records the origins of one model's gradients, by comparing them before and after each backward pass.

    A hook per parameter would tell the same, and costs more than these comparisons, which call no Python code.

    Args:
        structure: snapshot of the model for which the engine was built.
        engine: averages the gradients of each forward that its `module` runs.

    Attributes:
        accumulations: changes with every backward pass that accumulates gradients in the model.
        parameters: the trained parameters.
    """

    def __init__(self, structure: Structure, *, engine: Engine) -> None:
        self._structure = structure
        self.accumulations = next(_clock)
        self.parameters = tuple(structure.trained.values())
        self._ids = list(map(id, self.parameters))
        self._engine = engine
        self._model_name = type(structure.model).__name__
        self._is_averaging = False
        # The gradients before the running backward pass, and their version counters; None: no pass is running.
        self._before: tuple[list[torch.Tensor | None], list[int]] | None = None
        # For each parameter, its gradient (None: it had none), if the latest backward pass that reached the model has
        # averaged all of them; these are not in `origins`. Empty: `origins` has all that is known.
        self._averaged: list[Any] = []
        self._accumulated: set[int] = set()  # ids of parameters, since averaging began
        self._raised = ""  # the class of the exception that has ended the last pass of this averaging
        self._reached: set[int] = set()  # ids of parameters that a backward has reached since the last averaging
        self._is_no_sync = False
        # With find_unused_parameters the reducer also averages gradients from earlier backward passes under no_sync:
        # it counts a parameter as used if any pass since the last averaging has reached it.
        module = engine.module
        is_replica = isinstance(module, DistributedDataParallel)
        self._averages_unused = is_replica and module.find_unused_parameters and not module.static_graph

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Leave what is known of the gradients in `origins` at the end of the context."""
        try:
            yield
        finally:
            self.after_backward()
            if self._is_averaging:
                self._record(self._accumulated, INCOMPLETE)
            self.store_averaged()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Treat gradients of forwards inside the context as local: these forwards begin no averaging."""
        return replace_attribute(self, "_is_no_sync", value=True)

    def averages(self, name: str) -> bool:
        """Whether the gradient of a parameter is averaged: by the engine, or because another model shares it."""
        return name in self._structure.trained or id(self._structure.parameters.get(name)) in self._structure.shared_ids

    def after_forward(self) -> None:
        """Begin an averaging after the engine's forward, unless under no_sync."""
        if not self._is_no_sync:
            self._is_averaging = True
            self._accumulated = set()

    def require_complete(self) -> None:
        """Check that no averaging is half done, whose gradients may still be in flight.

        Raises:
            SyncError: the last backward pass raised, or gave some parameters no gradient.
        """
        if self._before is not None:
            self.after_backward()
        if self._is_averaging and self._accumulated:
            raise self._incomplete_error()

    def before_backward(self) -> None:
        """Note the gradients before a backward pass."""
        if self._before is not None:
            self.after_backward()  # of a pass that has raised, and that this package's patch of backward has not seen
        gradients = list(map(_gradient_of, self.parameters))
        self._before = gradients, [0 if each is None else each._version for each in gradients]

    def on_backward(self) -> bool:
        """Note the gradients if no pass is known to run; return whether one was: this package's patch has seen it."""
        if self._before is not None:
            return True
        self.before_backward()
        # The reducer may queue its callback after this one; a callback that this one queues runs after both.
        at_end_of_backward(lambda: at_end_of_backward(self.after_backward))
        return False

    def after_backward(self, *, raised: str = "") -> None:
        """Record the origins of the gradients that the backward pass has changed.

        Args:
            raised: the class of the exception that has ended the pass.

        Raises:
            SyncError: the pass ran inside no_sync, after a forward outside of it.
        """
        if self._before is None:
            return
        (before, versions), self._before = self._before, None
        reached = self._ids
        after = list(map(_gradient_of, self.parameters))
        if any(map(is_, before, after)):
            changes = zip(self._ids, before, versions, after, strict=True)
            reached = [key for key, old, version, new in changes if _has_changed(old, version, new)]
        if not reached:
            return
        self.accumulations = next(_clock)
        self._reached.update(reached)
        if not self._is_averaging:
            self._record(reached, UNDER_NO_SYNC if self._is_no_sync else BYPASSED)
            return
        if self._is_no_sync:
            raise SyncError(
                f"backward inside no_sync({self._model_name}) of a forward outside of it",
                why="the forward decides whether its backward averages gradients; this one's does",
                fix="put forward and backward of the micro-batch inside the same no_sync, and evaluate under no_grad",
            )
        self._accumulated.update(reached)
        self._raised = raised
        if self._engine.is_reduction_complete():
            self._end_averaging(after)

    def _end_averaging(self, gradients: list[torch.Tensor | None]) -> None:
        """Record that the engine has averaged gradients, with the parts from earlier local backward passes."""
        self._is_averaging = False
        averaged = self._accumulated
        if self._averages_unused:
            averaged = set(self._ids) - ({key for key, (_, why) in origins.items() if why is not None} - self._reached)
        self._reached = set()
        if len(averaged) < len(self._ids):
            self._record(averaged, None)
            return
        self._averaged = [_NO_GRADIENT if each is None else ref(each) for each in gradients]
        for key in self._ids if origins else ():
            origins.pop(key, None)

    def _record(self, ids: Collection[int], reason: Reason | None) -> None:
        self.store_averaged()
        for key, each in zip(self._ids, self.parameters, strict=True):
            if key in ids:
                record(each, reason)

    def has_averaged_all(self) -> bool:
        """Return whether every gradient of the model is the one that the latest backward pass has averaged.

        Raises:
            SyncError: as `require_complete`.
        """
        self.require_complete()
        averaged = map(_REFERENT, self._averaged)
        return bool(self._averaged) and all(map(is_, averaged, map(_gradient_of, self.parameters)))

    def store_averaged(self) -> None:
        """Record in `origins` what `has_averaged_all` compares with."""
        for key, gradient in zip(self._ids, self._averaged, strict=False):
            if gradient is not _NO_GRADIENT:
                origins[key] = gradient, None
        self._averaged = []

    def _incomplete_error(self) -> SyncError:
        if self._raised:
            return SyncError(
                f"the gradients of {self._model_name} are not averaged over the ranks",
                why=f"backward raised {self._raised}, and gradients are all-reduced while it runs",
                fix="let the exception end the parallel_model block; the model can enter another one, on all ranks",
            )
        missing = [name for name, each in self._structure.trained.items() if id(each) not in self._accumulated]
        if not missing:
            return SyncError(
                f"the gradients of {self._model_name} are not averaged over the ranks",
                why="static_graph=True needs hooks on the tensors that forward returns, and found no tensors",
                fix="return tensors, containers or a dataclass of them, or drop static_graph=True",
            )
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        return SyncError(
            f"backward gave no gradient to {listed} of {self._model_name}",
            why="gradients are all-reduced in buckets, and the buckets of these parameters are incomplete",
            fix="use backend=DDPBackend(find_unused_parameters=True), freeze them (requires_grad_(False)), or let all "
            "outputs take part in the loss",
        )
