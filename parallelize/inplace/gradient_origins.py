"""Record of where gradients come from: averaged by an engine, or the reason why they are not.

States of a tracker, in step with DistributedDataParallel's reducer:

    forward through the engine    averaging begins
    backward                      gradients accumulate and are all-reduced while backward runs
    end of backward               averaging ends once the engine has reduced all buckets: these gradients are recorded
    any other backward            gradients are of this rank alone: the reason is recorded
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch.nn.parallel import DistributedDataParallel

from parallelize.errors import SyncError
from parallelize.inplace.model_structure import Structure
from parallelize.plugins.base import Engine
from parallelize.precision.replace_attribute import replace_attribute
from parallelize.runtime.gradients import at_end_of_backward

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


def record(parameter: torch.Tensor, reason: Reason | None) -> None:
    """Record the origin of the gradient that a parameter has now."""
    gradient = parameter.grad
    if gradient is not None:
        origins[id(parameter)] = ref(gradient), reason


_clock = itertools.count(1)


def _has_reason(parameter: torch.Tensor) -> bool:
    origin = origins.get(id(parameter))
    return origin is not None and origin[1] is not None


class GradientTracker:
    """Records the origins of one model's gradients, by hooks on its parameters.

    Args:
        structure: snapshot of the model for which the engine was built.
        engine: averages the gradients of each forward that its `module` runs.

    Attributes:
        accumulations: changes with every gradient that accumulates in the model.
    """

    def __init__(self, structure: Structure, *, engine: Engine) -> None:
        self._structure = structure
        self.accumulations = next(_clock)
        self._parameters = tuple(structure.trained.values())
        self._engine = engine
        self._model_name = type(structure.model).__name__
        self._is_averaging = False
        self._accumulated: set[int] = set()
        self._reached: set[int] = set()  # ids of parameters that a backward has reached since the last averaging
        self._is_end_callback_queued = False
        self._is_no_sync = False
        # With find_unused_parameters the reducer also averages gradients from earlier backward passes under no_sync:
        # it counts a parameter as used if any pass since the last averaging has reached it.
        module = engine.module
        is_replica = isinstance(module, DistributedDataParallel)
        self._averages_unused = is_replica and module.find_unused_parameters and not module.static_graph

    @contextlib.contextmanager
    def hooks_installed(self) -> Iterator[None]:
        """Keep hooks on every trained parameter while the context lasts."""
        with contextlib.ExitStack() as stack:
            parameter: Any
            for index, parameter in enumerate(self._parameters):
                hook = functools.partial(self._on_gradient, index)
                stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            stack.callback(self._record_incomplete)
            yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Treat gradients of forwards inside the context as local: these forwards begin no averaging."""
        with replace_attribute(self, "_is_no_sync", value=True):
            yield

    def averages(self, name: str) -> bool:
        """Whether the gradient of a parameter is averaged: by the engine, or because another model shares it."""
        return name in self._structure.trained or id(self._structure.parameters.get(name)) in self._structure.shared_ids

    def before_forward(self) -> None:
        """Check, before the engine's forward, that the averaging of the previous backward pass is complete.

        Raises:
            SyncError: the previous pass gave some parameters no gradient, so their buckets are not all-reduced.
        """
        if not self._is_no_sync:
            self.require_complete()

    def after_forward(self) -> None:
        """Begin an averaging after the engine's forward, unless under no_sync."""
        if not self._is_no_sync:
            self._is_averaging = True
            self._accumulated.clear()

    def require_complete(self) -> None:
        """Check that no averaging is half done, whose gradients may still be in flight.

        Raises:
            SyncError: the last backward pass gave some parameters no gradient.
        """
        if self._is_averaging and self._accumulated and not self._finish_averaging(in_backward=False):
            raise self._unused_parameters_error()

    def _record_incomplete(self) -> None:
        if not self._finish_averaging(in_backward=False):
            for each in self._accumulated:
                record(self._parameters[each], INCOMPLETE)

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        self.accumulations = next(_clock)
        if not self._is_averaging:
            record(parameter, UNDER_NO_SYNC if self._is_no_sync else BYPASSED)
            self._reached.add(id(parameter))
            return
        if self._is_no_sync:
            raise SyncError(
                f"backward inside no_sync({self._model_name}) of a forward outside of it",
                why="the forward decides whether its backward averages gradients; this one's does",
                fix="put forward and backward of the micro-batch inside the same no_sync, and evaluate under no_grad",
            )
        self._accumulated.add(index)
        self._reached.add(id(parameter))
        if not self._is_end_callback_queued:
            self._is_end_callback_queued = True
            at_end_of_backward(self._on_backward_end)

    def _on_backward_end(self) -> None:
        # The reducer may have queued its callback after this one; a callback queued now runs after both.
        at_end_of_backward(self._after_reducer)

    def _after_reducer(self) -> None:
        self._is_end_callback_queued = False
        self._finish_averaging(in_backward=True)

    def _finish_averaging(self, *, in_backward: bool) -> bool:
        """End the averaging if the engine has reduced all buckets; return whether no averaging is under way."""
        if self._is_averaging and self._engine.is_reduction_complete(in_backward=in_backward):
            self._is_averaging = False
            # The reducer averages the accumulated gradients, including the parts from local backward passes.
            averaged: Iterable[torch.Tensor] = self._parameters
            if self._averages_unused:
                unreduced = {id(each) for each in self._parameters if _has_reason(each)} - self._reached
                averaged = [each for each in self._parameters if id(each) not in unreduced]
                self._reached.clear()
            elif len(self._accumulated) < len(self._parameters):
                averaged = [self._parameters[each] for each in self._accumulated]
            for each in averaged:
                gradient = each.grad
                if gradient is not None:
                    origins[id(each)] = ref(gradient), None
        return not self._is_averaging

    def _unused_parameters_error(self) -> SyncError:
        missing = [name for index, name in enumerate(self._structure.trained) if index not in self._accumulated]
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
