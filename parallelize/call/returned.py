"""The way back of a call: what rank 0's function has left reaches the caller.

    rank 0, by WayBack                                the caller, by `bring_back`
    value of the function            ─┐
    states of stateful objects        │               written into the caller's own objects
    states of random generators       ├─ Outcome ──>  written into the caller's generators
    names of what else has changed    │               named in a warning
    a number, if it was evaluated    ─┘               compared with those of the other ranks

Other ranks send their value, where the call asks for it, and the number that they have evaluated.

Glossary:

    stateful     an object with a state to read and write, such as a module: see `object_states`
    data         everything else that the function can change, by the name that a user knows it by
    unreturned   data that has changed: it stays in the worker, see `unreturned`
    outcome      what one rank sends back: see `outcome`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from parallelize.call.object_states import ObjectState, restore, states_of
from parallelize.call.outcome import Outcome
from parallelize.call.random_states import RandomStates, advances_caller
from parallelize.call.unreturned import UnreturnedChanges, unreturned_warnings
from parallelize.cluster.world import World

if TYPE_CHECKING:
    from parallelize.call.task import Task


class WayBack:
    """Collects what a rank sends back; made before the function runs.

    Args:
        task: the call, as this rank has read it.
        world: this rank.
    """

    def __init__(self, task: Task, world: World) -> None:
        self._task = task
        self._world = world
        self._changes: UnreturnedChanges | None = None
        if world.is_main and task.layout.config.update_modules:
            self._changes = UnreturnedChanges(task.stateful, task.data)

    def outcome(
        self,
        value: object,
        *,
        has_exited: bool,
        devices: Sequence[torch.device],
        has_evaluated: bool,
    ) -> Outcome:
        """Return the outcome of the function, which has just ended without an error.

        Args:
            value: what it has returned; None if it has exited.
            has_exited: whether it has called sys.exit() in place of a return.
            devices: the devices of this rank.
            has_evaluated: whether it has read the samples of this rank from a loader without
                training, so that a number which it returns may be of these samples alone.
        """
        task = self._task
        is_main = self._world.is_main
        states: dict[int, ObjectState] = {}
        random_states: RandomStates | None = None
        unreturned: list[str] = []
        evaluated: str | None = None
        # Before anything is read below: `state_dict` of a user's class may draw numbers.
        if is_main and advances_caller(task.layout.config):
            random_states = RandomStates.capture(devices)
        if self._changes is not None:
            states = states_of(task.stateful)
            unreturned = self._changes.names()
        if has_evaluated and not task.all_ranks and type(value) in (int, float):
            evaluated = repr(value)
        return Outcome.returned(
            self._world,
            value if is_main or task.all_ranks else None,
            states=states,
            unreturned=unreturned,
            evaluated=evaluated,
            has_exited=has_exited,
            random_states=random_states,
        )


def bring_back(task: Task, outcomes: Sequence[Outcome]) -> list[str]:
    """Write what a call has left into the caller's objects and generators.

    Args:
        task: the call, as the caller has made it.
        outcomes: of all ranks, in rank order, or of rank 0 alone.

    Returns:
        Warnings about what could not be written, and about what does not come back.
    """
    first = outcomes[0]
    problems = restore(task.stateful, first.states)
    if first.random_states is not None:
        first.random_states.restore(task.layout.devices[0])
    problems += unreturned_warnings(outcomes)
    return problems
