"""One order of the units on all ranks, also where the data of a rank decide which units it uses.

fully_shard makes collectives of all ranks wherever a unit is used: an all-gather of its parameters
before each forward and each backward, and a reduce-scatter of its gradients. Ranks whose batches
go to other experts, drop other layers or have other heads would make these collectives for other
units, and get the parameters and gradients of others in silence.

    unit          a submodule whose parameters are gathered together
    root          the model with the parameters outside of all units: each rank uses it
    script        the units that all ranks gather in a forward, in this order
    step          gathering a unit for its backward, or reducing its gradients
    to stand in   to make the collectives of a unit that other ranks use and this one does not

The forward of a model

    by vote      before it gathers a unit, each rank says which one. The first of them in the order
                 of the model is gathered by all ranks: some use it, others stand in.
    by script    when a forward by vote went through the same units on all ranks, the next ones
                 follow the same script, and nothing is said before a unit is gathered. A rank that
                 skips a unit stands in. A rank that needs another unit follows the script to its
                 end, and asks for a vote. Once ranks have differed, each forward is by vote.

At its end the ranks compare what they have gone through. If all have gone through the same units,
the steps of the backward are known, which are those of the forward in reverse:

    forward      enter A   leave A   enter B   leave B
    backward               reduce A  gather A  reduce B  gather B       <- from right to left

Otherwise its backward is by vote. See `unit_backward.py`.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from parallelize.agreement.fingerprint import digest, rows_of_ranks
from parallelize.agreement.gather import gather_objects
from parallelize.errors import SyncError
from parallelize.hang_detection.waiting import waiting_for
from parallelize.run.containers import leaves
from parallelize.torch_patches.backward import is_in_backward

ENDED = 2**62
"""A vote of a rank whose forward needs no more units: above the index of every unit."""
_NEEDS_VOTE = -1
"""What a rank says at the end of a script that lacks a unit which it needs."""


@dataclass(eq=False)
class Unit:
    """A submodule whose parameters are gathered together.

    Args:
        index: its place in the order of the model's modules, the same on all ranks.
        name: the name of the submodule.
        module: the submodule.
        group: fully_shard's parameters of the submodule.
    """

    index: int
    name: str
    module: nn.Module
    group: FSDPParamGroup

    def __post_init__(self) -> None:
        """Keep fully_shard's own functions, in place of which others are called."""
        self.pre_forward = self.group.pre_forward
        self.post_forward = self.group.post_forward
        self.pre_backward = self.group.pre_backward
        self.post_backward = self.group.post_backward


def units_in_order(
    inner: nn.Module, group_of_module: Mapping[nn.Module, FSDPParamGroup]
) -> tuple[list[Unit], Unit | None]:
    """Return the units of a model in the order of its modules, and the root.

    Args:
        inner: the module of the root.
        group_of_module: module of a unit -> its group, for all units that have parameters.
    """
    ordered: list[Unit] = []
    for name, module in inner.named_modules():
        if module is not inner and module in group_of_module:
            name_in_model = name.removeprefix("model.")
            ordered.append(Unit(len(ordered), name_in_model, module, group_of_module[module]))
    root = None
    if inner in group_of_module:
        root = Unit(len(ordered), "the other parameters", inner, group_of_module[inner])
    return ordered, root


class Action(enum.IntEnum):
    """What a step of a backward does."""

    GATHER = 0
    REDUCE = 1


class Step(NamedTuple):
    """A step of a backward."""

    action: Action
    unit: Unit


@dataclass(eq=False)
class _Visit:
    """A visit of a forward on this rank.

    Args:
        unit: what is visited.
        needs_backward: whether a backward through this rank's output of the unit is possible.
    """

    unit: Unit
    needs_backward: bool = False


class ForwardMode(NamedTuple):
    """What decides, beside the data, which units a forward uses."""

    method: str
    is_trained: bool


@dataclass(eq=False)
class Forward:
    """A forward of the model.

    Args:
        mode: what is called.
        script: the units that all ranks visit, or None: the ranks vote.
        position: number of units of the script that were visited.
        gathered: what all ranks have gathered, in this order, whether or not this rank has used it.
        bounds: where this rank has entered and left units, in this order.
        is_alike: whether all ranks have gone through the same units.
        steps: the steps of its backward, if it is alike; known when the forward has ended.
    """

    mode: ForwardMode
    script: tuple[Unit, ...] | None
    position: int = 0
    gathered: list[Unit] = field(default_factory=list)
    bounds: list[tuple[_Visit, Action]] = field(default_factory=list)
    is_alike: bool = True
    steps: tuple[Step, ...] = ()


class ForwardOrder:
    """Lets all ranks gather the same units, in one order, in each forward of a model.

    Args:
        units: the units of the model, in the order of its modules.
        recomputed: called before a checkpoint repeats the forward of a unit in backward.
        hook: hooks inputs and outputs of units: a gradient of one begins the forward's backward.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        recomputed: Callable[[Unit], None],
        hook: Callable[[Forward, Sequence[Any]], None],
    ) -> None:
        self._units = units
        self._recomputed = recomputed
        self._hook = hook
        self._scripts: dict[ForwardMode, tuple[Unit, ...] | None] = {}
        self._open: dict[Unit, _Visit] = {}
        self.forward: Forward | None = None
        # Whether a forward has raised an error. Other ranks may have gathered more, or less, of it.
        self._has_failed = False
        for unit in units:
            group: Any = unit.group
            group.pre_forward = bound_to_unit(self._enter, unit)
            group.post_forward = bound_to_unit(self._leave, unit)

    @contextlib.contextmanager
    def running(self, mode: ForwardMode) -> Iterator[Forward]:
        """Run a forward of the model in the context; a collective, as each forward is.

        Args:
            mode: what is called: all ranks call the same.

        Raises:
            SyncError: the ranks have gathered different units.
        """
        if self.forward is not None:  # a method of the model that its forward calls
            yield self.forward
            return
        forward = self.forward = Forward(mode, self._scripts.get(mode))
        try:
            yield forward
            self._end(forward)
        except Exception:
            self._has_failed = True
            raise
        finally:
            self.forward = None
            self._open.clear()

    def _enter(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather a unit before its forward, when all ranks do. Called by fully_shard."""
        forward = self.forward
        if is_in_backward():
            self._recomputed(unit)
        elif forward is not None:
            self._meet(forward, unit)
            visit = _Visit(unit)
            forward.gathered.append(unit)
            forward.bounds.append((visit, Action.REDUCE))
            self._open[unit] = visit
            gather_from_all_ranks(unit)
        inputs = unit.pre_forward(module, args, kwargs)
        if forward is not None and torch.is_grad_enabled() and not is_in_backward():
            self._hook(forward, leaves(inputs))
        return inputs

    def _leave(self, unit: Unit, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Note the end of the forward of a unit. Called by fully_shard."""
        visit = self._open.pop(unit, None)
        if visit is not None and self.forward is not None:
            outputs = leaves(output)
            visit.needs_backward = torch.is_grad_enabled() and any(map(_has_graph, outputs))
            self.forward.bounds.append((visit, Action.GATHER))
            if visit.needs_backward:
                self._hook(self.forward, outputs)
        return unit.post_forward(module, inputs, output)

    def _meet(self, forward: Forward, unit: Unit) -> None:
        """Stand in for what other ranks visit before this rank may visit a unit."""
        if forward.script is not None:
            remaining = forward.script[forward.position :]
            if unit in remaining:
                self._follow_script(forward, remaining.index(unit))
                forward.position += 1
                return
            self._follow_script(forward, len(remaining))
            self._say(forward, _NEEDS_VOTE)
            forward.script = None
        self._vote(forward, unit.index)

    def _follow_script(self, forward: Forward, num_units: int) -> None:
        """Stand in for the next units of the script."""
        assert forward.script is not None
        skipped = forward.script[forward.position : forward.position + num_units]
        forward.position += num_units
        for unit in skipped:
            self._stand_in(forward, unit)

    def _vote(self, forward: Forward, index: int) -> None:
        """Stand in for units until it is the turn of this rank's: the one with this index."""
        while True:
            next_index = min(self._say(forward, index))
            if next_index == index:
                return
            self._stand_in(forward, self._units[next_index])

    def _stand_in(self, forward: Forward, unit: Unit) -> None:
        """Gather a unit that other ranks use, and free it."""
        forward.gathered.append(unit)
        if unit in self._open:
            # Ranks that are not in the forward of the unit have only their shards.
            if unit.group.post_forward_mesh_info is not None:
                gather_again(unit)
            return
        gather_from_all_ranks(unit)
        unit.pre_forward(unit.module, (), {})
        unit.post_forward(unit.module, (), None)

    def _end(self, forward: Forward) -> None:
        """Stand in for what other ranks still visit, and find the steps of the backward."""
        while True:
            if forward.script is None:
                self._vote(forward, ENDED)
            else:
                self._follow_script(forward, len(forward.script) - forward.position)
            answers = self._say(forward, _number_of(forward.bounds))
            if _NEEDS_VOTE not in answers:
                break
            forward.script = None
        forward.is_alike = len(set(answers)) == 1
        self._learn(forward)
        if forward.is_alike and forward.mode.is_trained:
            steps = [
                Step(action, visit.unit)
                for visit, action in reversed(forward.bounds)
                if visit.needs_backward
            ]
            forward.steps = tuple(steps)

    def _learn(self, forward: Forward) -> None:
        """Decide whether the next forward of this kind follows a script."""
        is_new = forward.mode not in self._scripts
        if is_new and forward.is_alike:
            self._scripts[forward.mode] = tuple(forward.gathered)
        elif not forward.is_alike or forward.script is None:
            self._scripts[forward.mode] = None

    def _say(self, forward: Forward, number: int) -> list[int]:
        """Exchange a number, and check that the ranks have visited the same units so far.

        Returns:
            the numbers of all ranks.
        """
        indices = [unit.index for unit in forward.gathered]
        # Hashes of integers are the same in all processes, and those of texts are not.
        method = int(digest(forward.mode.method))
        state = hash((method, forward.mode.is_trained, *indices))
        with waiting_for(f"the next block of the model in {forward.mode.method}"):
            table = rows_of_ranks(torch.tensor([state, number]))
        if bool((table[:, 0] != state).any()):
            action = forward.mode.method
            if self._has_failed:
                action += ", after a call that has failed"
            refuse_different(action, [unit.name for unit in forward.gathered])
        numbers: list[int] = table[:, 1].tolist()
        return numbers


def gather_from_all_ranks(unit: Unit) -> None:
    """Let fully_shard gather a unit from all ranks, as those do that stand in.

    With reshard_after_forward=2, it would gather what it has gathered before from two ranks alone.
    """
    if unit.group.is_sharded_post_forward:
        unit.group._to_sharded()  # type: ignore[no-untyped-call]  # torch's


def gather_again(unit: Unit) -> None:
    """Gather a unit whose parameters this rank has, for ranks that do not have them.

    fully_shard would gather nothing here.
    """
    unit.group._sharded_state = ShardedState.SHARDED
    for parameter in unit.group.fsdp_params:
        parameter.sharded_state = ShardedState.SHARDED
    unit.group.unshard()
    unit.group.wait_for_unshard()


def refuse_different(action: str, names: Sequence[str]) -> None:
    """Raise the error of ranks that have gathered different units; a collective.

    Args:
        action: what this rank has called.
        names: names of the units that it has gathered, in this order.

    Raises:
        SyncError: always.
    """
    texts = gather_objects(f"{action}: {', '.join(names[-8:]) or 'none'}")
    lines = "; ".join([f"rank {rank}, in {text}" for rank, text in enumerate(texts)])
    raise SyncError(
        f"the ranks have gathered different blocks of the model (the latest of each: {lines})",
        why="under fsdp a forward or backward gathers parameters from all ranks, so that each rank "
        "has to call the same method, with or without gradients; a call that fails, if the "
        "program goes on, has to fail on all ranks before the same block",
        fix="call the same methods of the model on all ranks, or use backend='ddp'",
    )


def _has_graph(output: Any) -> bool:
    """Whether a backward may reach a unit through one of its outputs."""
    return isinstance(output, torch.Tensor) and output.requires_grad


def _number_of(bounds: Sequence[tuple[_Visit, Action]]) -> int:
    """Return a number that is equal for equal bounds, and never a rank's wish for a vote."""
    facts = [(visit.unit.index, action, visit.needs_backward) for visit, action in bounds]
    return abs(hash(tuple(facts)))


def bound_to_unit(function: Callable[..., Any], unit: Unit) -> Callable[..., Any]:
    """Return a function with its unit, which fully_shard calls in place of its own."""

    def call(*args: Any) -> Any:
        return function(unit, *args)

    return call
