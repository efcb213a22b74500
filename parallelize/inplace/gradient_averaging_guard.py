"""Where each gradient of a model came from, so that no optimizer steps on one that was not averaged over the ranks.

The rounds of a guard, as torch's reducer has them:

    forward through the engine    the round opens
    backward                      each parameter's gradient arrives and is averaged while backward goes on
    end of backward               the round closes once the engine has averaged everything
    any other backward            its gradients are this rank's own, until a later round averages what has accumulated
    optimizer.step()              refused while the round is open, or while a gradient is this rank's own
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parallelize.errors import SyncError
from parallelize.inplace.local_gradients import BYPASSED, UNFINISHED, UNSENT, Own
from parallelize.inplace.model_consistency import compare
from parallelize.inplace.model_structure import Structure
from parallelize.plugins.base import Engine
from parallelize.runtime.gradients import at_end_of_backward, is_in_backward, parameters_of

__all__ = ["Guard"]


class Guard:
    """Watches the gradients of one model while its engine runs.

    Args:
        structure: the model as the engine knows it.
        engine: averages the gradients of what went through it.
    """

    def __init__(self, structure: Structure, *, engine: Engine) -> None:
        self._structure = structure
        self._names = tuple(structure.trained)
        self._parameters = tuple(structure.trained.values())
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._engine = engine
        self._model_name = type(structure.model).__name__
        self._is_open = False
        self._arrived: set[int] = set()
        self._is_end_awaited = False
        self._own: dict[int, str] = {}
        self._inherited: dict[int, Own] = {}
        self._is_paused = False
        self._has_arrived = False
        self._has_stepped = False
        self._brought = 0  # by backwards so far: gradients of parameters
        # Looking for unused parameters, torch counts as used what any backward has reached since the last round, also a
        # paused one, and averages it with the rest.
        module = engine.module
        is_replica = isinstance(module, DistributedDataParallel)
        self._takes_unused = is_replica and module.find_unused_parameters and not module.static_graph
        self._spent: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on every parameter and on every optimizer's step, taken off at the end."""
        with contextlib.ExitStack() as stack:
            parameter: Any
            for index, parameter in enumerate(self._parameters):
                hook = functools.partial(self._on_gradient, index)
                stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            stack.callback(register_optimizer_step_pre_hook(self._on_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time of a no_sync: forwards open no round."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def before_forward(self) -> None:
        """The engine is about to run.

        Raises:
            SyncError: the last backward has left parameters without a gradient, so that others wait to be averaged.
        """
        if self._is_open and self._arrived and not self._is_paused and not self._has_settled(in_backward=False):
            raise self._unused()

    def after_forward(self) -> None:
        """The engine has run: unless paused, its next backward averages."""
        if self._has_stepped:
            self._has_stepped = self._has_arrived = False
        if not self._is_paused:
            self._is_open = True
            self._arrived.clear()

    def inherit(self, own: Iterable[Own]) -> None:
        """Take over what was known before of gradients, also of parameters that are not trained here."""
        self._inherited = {id(each.parameter): each for each in own}

    def left(self) -> list[Own]:
        """The gradients that are this rank's own."""
        left = dict(self._inherited)
        unfinished = {} if self._has_settled(in_backward=False) else dict.fromkeys(self._arrived, UNFINISHED)
        for index, why in {**unfinished, **self._own}.items():
            left[id(self._parameters[index])] = self._own_at(index, why)
        return list(left.values())

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        self._has_arrived = True
        self._brought += 1
        if not self._is_open:
            self._own[index] = UNSENT if self._is_paused else BYPASSED
            return
        if self._is_paused:
            raise SyncError(
                f"backward inside no_sync({self._model_name}) of a forward outside of it",
                why="the forward decides whether its backward averages gradients; this one's does",
                fix="put forward and backward of the micro-batch inside the same no_sync, and evaluate under no_grad",
            )
        self._arrived.add(index)
        # What it had of its own is averaged with the rest.
        if self._own:
            self._own.pop(index, None)
        if self._inherited:
            self._inherited.pop(id(parameter), None)
        if not self._is_end_awaited:
            self._is_end_awaited = True
            at_end_of_backward(self._on_backward_end)

    def _on_backward_end(self) -> None:
        # The engine may have queued its own end after ours; one more turn puts us last.
        at_end_of_backward(self._on_backward_settled)

    def _on_backward_settled(self) -> None:
        self._is_end_awaited = False
        self._has_settled(in_backward=True)

    def _has_settled(self, *, in_backward: bool) -> bool:
        if self._is_open and self._engine.is_reduced(in_backward=in_backward):
            self._is_open = False
            if self._takes_unused:
                self._own.clear()
        return not self._is_open

    def _on_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before any optimizer steps."""
        checked = _checked_closure(args, kwargs, check=functools.partial(self._check, optimizer))
        # What a closure is about to replace was not assigned for this step.
        self._check(optimizer, brings_gradients=checked is not None)
        return checked

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """After any optimizer's step: what it has found is no backward's gift the next time."""
        if any(id(each) in self._index for each in parameters_of(optimizer)):
            self._spent[optimizer] = self._brought

    def _check(self, optimizer: torch.optim.Optimizer, *, brings_gradients: bool = False) -> None:
        if not self._structure.is_current():
            self._refuse_newcomers(optimizer)
        if self._inherited:
            self._refuse_inherited(optimizer)
        if not any(id(each) in self._index for each in parameters_of(optimizer)):
            return
        # Until the next forward: several optimizers may share what one backward has brought, or the user has assigned.
        self._has_stepped = True
        is_unheard_of = not self._has_arrived or self._spent.get(optimizer) == self._brought
        is_assigned = is_unheard_of and not brings_gradients
        if not self._own and not (self._is_open and self._arrived) and not is_assigned:
            return
        held = {self._index[id(each)] for each in parameters_of(optimizer) if id(each) in self._index}
        if is_assigned:
            self._compare_assigned(held)
        if self._is_open and self._arrived:
            self._refuse_unfinished()
        for index in sorted(held & self._own.keys()):
            own = self._own_at(index, self._own[index])
            if own.parameter.grad is None:
                del self._own[index]
            elif own.matters:
                raise own.refusal()

    def _compare_assigned(self, held: set[int]) -> None:
        """Gradients that no backward has brought: from autograd.grad, averaged by the user or not."""
        gradients = {self._names[index]: self._parameters[index].grad for index in sorted(held)}
        assigned = {f"the gradient of {name}": each for name, each in gradients.items() if each is not None}
        compare(
            assigned,
            model_name=self._model_name,
            when="though it came from no backward here; parallelize.all_reduce it",
        )

    def _refuse_inherited(self, optimizer: torch.optim.Optimizer) -> None:
        for each in parameters_of(optimizer):
            own = self._inherited.get(id(each))
            if own is not None and each.grad is None:
                del self._inherited[id(each)]
            elif own is not None and own.matters:
                raise own.refusal()

    def _refuse_newcomers(self, optimizer: torch.optim.Optimizer) -> None:
        now = {id(each): name for name, each in self._structure.model.named_parameters() if each.requires_grad}
        for each in parameters_of(optimizer):
            if id(each) in now and id(each) not in self._index and each.grad is not None:
                raise SyncError(
                    f"the gradient of {now[id(each)]} of {self._model_name} is not averaged over the ranks",
                    why="it was unfrozen, added or replaced after the last forward of the model",
                    fix=f"call the {self._model_name} once more, then backward and step",
                )

    def _refuse_unfinished(self) -> None:
        if is_in_backward():
            raise SyncError(
                f"an optimizer steps on parameters of {self._model_name} inside backward",
                why="gradients are averaged over the ranks until backward ends",
                fix="step after backward, not from a hook in it",
            )
        if not self._has_settled(in_backward=False):
            raise self._unused()

    def _own_at(self, index: int, why: str) -> Own:
        return Own(self._parameters[index], f"{self._names[index]} of {self._model_name}", why)

    def _unused(self) -> SyncError:
        missing = [name for index, name in enumerate(self._names) if index not in self._arrived]
        if not missing:
            return SyncError(
                f"the gradients of {self._model_name} are not averaged over the ranks",
                why="static_graph=True takes its first backward from the tensors that forward returns, and found none",
                fix="return tensors, containers or a dataclass of them, or drop static_graph=True",
            )
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        return SyncError(
            f"backward gave no gradient to {listed} of {self._model_name}",
            why="gradients are averaged in groups, and the groups of these parameters still wait for them",
            fix="use backend=DDPBackend(find_unused_parameters=True), freeze them (requires_grad_(False)), or let all "
            "outputs take part in the loss",
        )


def _checked_closure(args: tuple[Any, ...], kwargs: dict[str, Any], *, check: Any) -> Any:
    """The arguments of step(closure) with a closure that is checked after each of its backwards; None without one."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    @functools.wraps(closure)
    def checked() -> Any:
        loss = closure()
        check()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": checked}
    return (args[0], checked, *args[2:]), kwargs
