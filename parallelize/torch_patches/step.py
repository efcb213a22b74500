"""The one pair of hooks around the steps of all optimizers: subscribers run in a declared order.

    optimizer.step()
    │   the user's hooks of all optimizers, from before the block
    ├── BeforeStep.WATCH     counts the collectives of the user's code, before those of a check
    ├── BeforeStep.SCALE     fp16: refuses a closure, or lets a step with inf change nothing
    ├── BeforeStep.PLACE     engines: state follows parameters; lost gradients are refused
    ├── BeforeStep.VERIFY    compares gradients of the ranks, also those of each call of a closure
    │   hooks of this optimizer: those of fsdp, and the user's
    │       the step itself
    │   hooks of this optimizer
    │   the user's hooks of all optimizers, from before the block
    ├── AfterStep.COUNT      the step was made, whatever a later subscriber raises
    ├── AfterStep.SCALE      removes from the optimizer what BeforeStep.SCALE has set there
    ├── AfterStep.MEASURE    takes the time, before a subscriber that reads all weights
    └── AfterStep.RECORD     keeps gradients and weights for train.compare, and may end the function

The order is not that in which contexts are entered: "auto" builds an engine on the first batch,
when the checks of the block are active already, and blocks lie in blocks. WATCH must not count what
VERIFY sends. SCALE refuses a closure as the user has passed it, and VERIFY replaces it. VERIFY is
the last before a step, because only it waits for other ranks: a step that all ranks refuse is
refused without it.
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
"""(args, kwargs) of a call of `step`; args[0] is the optimizer."""
BeforeStepHook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Any]
"""Gets (optimizer, args, kwargs) of a step; may return others: StepArguments."""
AfterStepHook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]
"""Gets (optimizer, args, kwargs) of a step that has been made."""


class BeforeStep(enum.IntEnum):
    """When a hook before steps runs; of one place, that which was entered first."""

    WATCH = 0
    SCALE = 1
    PLACE = 2
    VERIFY = 3


class AfterStep(enum.IntEnum):
    """When a hook after steps runs; of one place, that which was entered first."""

    COUNT = 0
    SCALE = 1
    MEASURE = 2
    RECORD = 3


class _OrderedHooks:
    """Hooks in their order behind one of torch's global hooks, which exists while there are any.

    Args:
        register: torch's function that registers a hook of all optimizers.
    """

    def __init__(self, register: Callable[..., RemovableHandle]) -> None:
        self._register = register
        self._entries: list[tuple[int, Callable[..., Any]]] = []
        self._handle: RemovableHandle | None = None

    @contextlib.contextmanager
    def subscribed(self, order: int, hook: Callable[..., Any]) -> Iterator[None]:
        """Call a hook in the context."""
        entry = (order, hook)
        self._entries.append(entry)
        self._entries.sort(key=itemgetter(0))
        # A hook that the user has registered before a block runs before those of the block. Torch
        # calls its hooks in the order of their registration, so that this one becomes the last.
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
        """Call the hooks, each with the arguments that the one before it has returned."""
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
        order: its place among the hooks.
        hook: may raise, which refuses the step, or return other arguments of it.
    """
    return _before.subscribed(order, hook)


def after_step(order: AfterStep, hook: AfterStepHook) -> contextlib.AbstractContextManager[None]:
    """Call a hook after the steps of all optimizers in the context.

    It must not leave its context while it runs: torch iterates over its hooks.

    Args:
        order: its place among the hooks.
        hook: a step that raises does not reach it.
    """
    return _after.subscribed(order, hook)


class StepCount:
    """A hook after steps that counts them.

    Attributes:
        number: of the steps so far.
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
    """Return the arguments of an optimizer's `step` with another closure; None: it has none."""
    closure = kwargs.get("closure")
    if callable(closure):
        return args, {**kwargs, "closure": change(closure)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], change(args[1]), *args[2:]), kwargs
    return None
