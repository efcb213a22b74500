"""Guard that refuses optimizer steps on gradients that were not averaged over the ranks.

States of a guard, in step with DistributedDataParallel's reducer:

    forward through the engine    averaging begins
    backward                      gradients accumulate and are all-reduced while backward runs
    end of backward               averaging ends once the engine has reduced all buckets
    any other backward            gradients are local to this rank, until a later averaging includes them
    optimizer.step()              refused while averaging is incomplete, or while a gradient is local
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parallelize.errors import SyncError
from parallelize.inplace.closure_averaging import change_closure
from parallelize.inplace.local_gradients import BYPASSED, INCOMPLETE, UNDER_NO_SYNC, LocalGradient
from parallelize.inplace.model_consistency import require_equal
from parallelize.inplace.model_structure import Structure
from parallelize.plugins.base import Engine
from parallelize.precision.replace_attribute import replace_attribute
from parallelize.runtime.gradients import at_end_of_backward, is_in_backward, parameters_of

__all__ = ["GradientAveragingGuard"]


class GradientAveragingGuard:
    """Tracks which gradients of one model are averaged, by hooks on its parameters and on optimizer steps.

    Args:
        structure: snapshot of the model for which the engine was built.
        engine: averages the gradients of each forward that its `module` runs.
    """

    def __init__(self, structure: Structure, *, engine: Engine) -> None:
        self._structure = structure
        self._names = tuple(structure.trained)
        self._parameters = tuple(structure.trained.values())
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._engine = engine
        self._model_name = type(structure.model).__name__
        self._is_averaging = False
        self._accumulated: set[int] = set()
        self._is_end_callback_queued = False
        self._local: dict[int, str] = {}
        self._inherited: dict[int, LocalGradient] = {}
        self._is_no_sync = False
        self._has_new_gradients = False
        self._has_stepped = False
        self._gradient_count = 0  # accumulations so far, over all parameters and backward passes
        # With find_unused_parameters the reducer also averages gradients from earlier backward passes under no_sync:
        # it counts a parameter as used if any pass since the last averaging has reached it.
        module = engine.module
        is_replica = isinstance(module, DistributedDataParallel)
        self._averages_unused = is_replica and module.find_unused_parameters and not module.static_graph
        self._count_at_last_step: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def hooks_installed(self) -> Iterator[None]:
        """Keep hooks on every trained parameter and on all optimizer steps while the context lasts."""
        with contextlib.ExitStack() as stack:
            parameter: Any
            for index, parameter in enumerate(self._parameters):
                hook = functools.partial(self._on_gradient, index)
                stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Treat gradients of forwards inside the context as local: these forwards begin no averaging."""
        with replace_attribute(self, "_is_no_sync", value=True):
            yield

    def before_forward(self) -> None:
        """Check, before the engine's forward, that the averaging of the previous backward pass is complete.

        Raises:
            SyncError: the previous pass gave some parameters no gradient, so their buckets are not all-reduced.
        """
        is_waiting = self._is_averaging and self._accumulated and not self._is_no_sync
        if is_waiting and not self._finish_averaging(in_backward=False):
            raise self._unused_parameters_error()

    def after_forward(self) -> None:
        """Begin an averaging after the engine's forward, unless under no_sync."""
        if self._has_stepped:
            self._has_stepped = self._has_new_gradients = False
        if not self._is_no_sync:
            self._is_averaging = True
            self._accumulated.clear()

    def inherit(self, gradients: Iterable[LocalGradient]) -> None:
        """Track the local gradients of an earlier guard or block too, even of parameters that are now frozen."""
        self._inherited = {id(each.parameter): each for each in gradients}

    def local_gradients(self) -> list[LocalGradient]:
        """Return the gradients that are not averaged over the ranks."""
        found = dict(self._inherited)
        is_complete = self._finish_averaging(in_backward=False)
        incomplete = {} if is_complete else dict.fromkeys(self._accumulated, INCOMPLETE)
        for index, why in {**incomplete, **self._local}.items():
            found[id(self._parameters[index])] = self._local_gradient(index, why)
        return list(found.values())

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        self._has_new_gradients = True
        self._gradient_count += 1
        if not self._is_averaging:
            self._local[index] = UNDER_NO_SYNC if self._is_no_sync else BYPASSED
            return
        if self._is_no_sync:
            raise SyncError(
                f"backward inside no_sync({self._model_name}) of a forward outside of it",
                why="the forward decides whether its backward averages gradients; this one's does",
                fix="put forward and backward of the micro-batch inside the same no_sync, and evaluate under no_grad",
            )
        self._accumulated.add(index)
        # The reducer averages the accumulated gradient, including the part from local backward passes.
        if self._local:
            self._local.pop(index, None)
        if self._inherited:
            self._inherited.pop(id(parameter), None)
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
            if self._averages_unused:
                self._local.clear()
        return not self._is_averaging

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check an optimizer's gradients before its step, and after each call of the step's closure."""
        check = functools.partial(self._check, optimizer)
        checked = change_closure(functools.partial(_checked, check=check), args, kwargs)
        # The closure computes new gradients, so the current ones need not be compared between ranks.
        self._check(optimizer, has_closure=checked is not None)
        return checked

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Record the gradient count: its change until the next step shows that a backward pass ran in between."""
        if any(id(each) in self._index for each in parameters_of(optimizer)):
            self._count_at_last_step[optimizer] = self._gradient_count

    def _check(self, optimizer: torch.optim.Optimizer, *, has_closure: bool = False) -> None:
        if not self._structure.is_current():
            self._refuse_new_parameters(optimizer)
        if self._inherited:
            self._refuse_inherited(optimizer)
        if not any(id(each) in self._index for each in parameters_of(optimizer)):
            return
        # Only the next forward resets this: several optimizers may step on the gradients of one backward pass.
        self._has_stepped = True
        has_seen_all = self._count_at_last_step.get(optimizer) == self._gradient_count
        is_assigned = not has_closure and (has_seen_all or not self._has_new_gradients)
        if not self._local and not (self._is_averaging and self._accumulated) and not is_assigned:
            return
        held = {self._index[id(each)] for each in parameters_of(optimizer) if id(each) in self._index}
        if is_assigned:
            self._compare_assigned_gradients(held)
        if self._is_averaging and self._accumulated:
            self._refuse_incomplete()
        for index in sorted(held & self._local.keys()):
            local = self._local_gradient(index, self._local[index])
            if local.parameter.grad is None:
                del self._local[index]
            elif local.is_nonzero:
                raise local.error()

    def _compare_assigned_gradients(self, held: set[int]) -> None:
        """Require that gradients assigned by the user (from torch.autograd.grad) are equal on all ranks."""
        gradients = {self._names[index]: self._parameters[index].grad for index in sorted(held)}
        assigned = {f"the gradient of {name}": each for name, each in gradients.items() if each is not None}
        hint = "(no backward in this block computed it: average it with parallelize.all_reduce)"
        require_equal(assigned, model_name=self._model_name, when=hint)

    def _refuse_inherited(self, optimizer: torch.optim.Optimizer) -> None:
        for each in parameters_of(optimizer):
            local = self._inherited.get(id(each))
            if local is not None and each.grad is None:
                del self._inherited[id(each)]
            elif local is not None and local.is_nonzero:
                raise local.error()

    def _refuse_new_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        now = {id(each): name for name, each in self._structure.model.named_parameters() if each.requires_grad}
        known = self._index.keys() | self._structure.shared_ids
        for each in parameters_of(optimizer):
            if id(each) in now and id(each) not in known and each.grad is not None:
                raise SyncError(
                    f"the gradient of {now[id(each)]} of {self._model_name} is not averaged over the ranks",
                    why="the parameter was unfrozen, added or replaced after the last forward of the model",
                    fix=f"call the {self._model_name} again, then backward and step",
                )

    def _refuse_incomplete(self) -> None:
        if is_in_backward():
            raise SyncError(
                f"an optimizer steps on parameters of {self._model_name} inside backward",
                why="the averaging of gradients over the ranks is complete only when backward ends",
                fix="step after backward, not from a hook in it",
            )
        if not self._finish_averaging(in_backward=False):
            raise self._unused_parameters_error()

    def _local_gradient(self, index: int, why: str) -> LocalGradient:
        return LocalGradient(self._parameters[index], f"{self._names[index]} of {self._model_name}", why)

    def _unused_parameters_error(self) -> SyncError:
        missing = [name for index, name in enumerate(self._names) if index not in self._accumulated]
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


def _checked(closure: Callable[..., Any], *, check: Callable[[], None]) -> Callable[..., Any]:
    """Return a closure that ends by calling `check`."""

    @functools.wraps(closure)
    def checked(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        check()
        return loss

    return checked
