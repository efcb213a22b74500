"""The one pair of hooks around the steps of all optimizers: subscribers run in a declared order.

    optimizer.step()
    │   the user's hooks of all optimizers, from before the block
    ├── BeforeStep.WATCH     counts the collectives that the user's code has made
    ├── BeforeStep.SCALE     fp16: refuses a closure; lets a step with inf or nan change nothing
    ├── BeforeStep.PLACE     balanced: moves the optimizer's state to the devices of the parameters
    │                        fsdp: refuses gradients that would be lost
    ├── BeforeStep.VERIFY    compares gradients of the ranks, also those of each call of a closure
    │   hooks of this optimizer: those of fsdp, and the user's
    │       the step itself
    │   hooks of this optimizer
    │   the user's hooks of all optimizers, from before the block
    ├── AfterStep.COUNT      counts the step, before a subscriber that may raise
    ├── AfterStep.SCALE      removes from the optimizer what BeforeStep.SCALE has set there
    └── AfterStep.RECORD     keeps gradients and weights for train.compare, and may end the function

The order is declared, because contexts are entered in another order: backend="auto" builds an
engine at the first batch, after the checks of the block, and blocks lie in blocks.

    WATCH before VERIFY     WATCH must not count the collectives of VERIFY
    SCALE before VERIFY     SCALE looks for the user's closure, which VERIFY replaces
    VERIFY last             it waits for other ranks, which is needless if a hook refuses the step
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

Closure = Callable[..., Any]
"""Function that computes the gradients of an optimizer's step, and returns the loss."""
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of a call of `step`; args[0] is the optimizer, as `self`."""
BeforeStepHook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Any]
"""Gets (optimizer, args, kwargs) of a step; returns StepArguments, or None to change nothing."""
AfterStepHook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]
"""Gets (optimizer, args, kwargs) of a step that has been made."""


class BeforeStep(enum.IntEnum):
    """The place of a hook before steps; of two with one place, the first entered runs first."""

    WATCH = 0
    SCALE = 1
    PLACE = 2
    VERIFY = 3


class AfterStep(enum.IntEnum):
    """The place of a hook after steps; of two with one place, the first entered runs first."""

    COUNT = 0
    SCALE = 1
    RECORD = 2


class _OrderedHooks:
    """Runs hooks in their declared order. torch knows one hook, which calls all of them.

    Args:
        register: torch's function that registers a hook for all optimizers.
    """

    def __init__(self, register: Callable[..., RemovableHandle]) -> None:
        self._register = register
        self._entries: list[tuple[int, Callable[..., Any]]] = []
        self._handle: RemovableHandle | None = None

    @contextlib.contextmanager
    def subscribed(self, order: int, hook: Callable[..., Any]) -> Iterator[None]:
        """Call a hook at each step in the context."""
        entry = (order, hook)
        self._entries.append(entry)
        self._entries.sort(key=itemgetter(0))
        # torch calls its hooks in the order of their registration. A hook that the user has
        # registered before this context must run before this package's, so that this package's is
        # registered anew, as the last.
        self._remove_from_torch()
        self._handle = self._register(self._run)
        try:
            yield
        finally:
            self._entries.remove(entry)
            if not self._entries:
                self._remove_from_torch()

    def _remove_from_torch(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _run(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        """Call the hooks, each with the arguments of the step that the hook before has returned.

        Returns:
            The arguments of the step; None: no hook has changed them.
        """
        is_changed = False
        for _, hook in tuple(self._entries):
            changed = hook(optimizer, args, kwargs)
            if changed is not None:
                args, kwargs = changed
                is_changed = True
        if is_changed:
            return args, kwargs
        return None


# Global, because torch's hooks of all optimizers belong to the process.
_before = _OrderedHooks(register_optimizer_step_pre_hook)
_after = _OrderedHooks(register_optimizer_step_post_hook)


def before_step(order: BeforeStep, hook: BeforeStepHook) -> contextlib.AbstractContextManager[None]:
    """Call a hook before the steps of all optimizers in the context.

    Args:
        order: the place of the hook.
        hook: may raise, which refuses the step, or return other arguments for the step.
    """
    return _before.subscribed(order, hook)


def after_step(order: AfterStep, hook: AfterStepHook) -> contextlib.AbstractContextManager[None]:
    """Call a hook after the steps of all optimizers in the context.

    The hook must neither enter nor leave such a context: torch iterates over its dictionary of
    hooks while a hook runs, and the context changes that dictionary.

    Args:
        order: the place of the hook.
        hook: is not called if the step raises.
    """
    return _after.subscribed(order, hook)


class StepCount:
    """A hook after steps that counts them, for `parallelize top`.

    Attributes:
        number: the number of steps so far.
    """

    number = 0

    def __call__(self, *_: Any) -> None:
        """Count a step."""
        self.number += 1


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of an optimizer, param group by param group."""
    parameters: list[Any] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def change_closure(
    change: Callable[[Closure], Closure], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepArguments | None:
    """Return the arguments of a call of `step` with another closure; None: it has no closure.

    Args:
        change: gets the closure, and returns the other one.
        args: the positional arguments of the call, with the optimizer as the first.
        kwargs: the keyword arguments of the call.
    """
    closure = kwargs.get("closure")
    if callable(closure):
        return args, {**kwargs, "closure": change(closure)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], change(args[1]), *args[2:]), kwargs
    return None
