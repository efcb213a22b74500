"""The backward of units: the same steps on all ranks, zeros for what a rank has not used.

A backward goes through the forwards of the model, the latest first. Each of them begins with a
gradient of an output, or of a unit's input, and ends with the next one or with the pass:

    by script    if all ranks have gone through the same units in forward. When fully_shard gathers
                 or reduces a unit, the steps before that one are made first: this rank has no
                 gradients there, and stands in. At the end, it stands in for those that remain.
                 That is not too early: autograd computes what was computed last in forward first,
                 so that the gradients of a unit are complete when an earlier one begins.
    by vote      otherwise. Before each step, each rank says which one, and all make the first of
                 them in the order of the model, from its end; at the end of the forward ranks stand
                 in until no rank has another step.

All parameters of a unit are reduced together, so that a rank sends zeros for those that it has not
used. After the pass, the ranks exchange which parameters they have used. What no rank has used has
no gradient, as in one process: an optimizer skips it, where zeros would decay it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributions import Distribution

from parallelize.agreement.fingerprint import comparison_group, rows_of_ranks
from parallelize.backends.fsdp.stand_in import register_gathered
from parallelize.backends.fsdp.unit_order import (
    ENDED,
    Action,
    Forward,
    Step,
    Unit,
    bound_to_unit,
    gather_again,
    gather_from_all_ranks,
    refuse_different,
)
from parallelize.hang_detection.waiting import waiting_for
from parallelize.run.containers import tensors_of_distribution
from parallelize.torch_patches.backward import Pass, Run

_PREFETCHES = False
"""fully_shard would gather ahead what its own rank has used, which another rank may not have."""

_BITS = 32
"""Number of parameters whose use one integer tells."""


class BackwardOrder:
    """Lets all ranks gather and reduce the same units, in one order, in each backward.

    Args:
        units: the units of the model, in the order of its modules.
        root: the parameters outside of all units; None: there are none.
        states: fully_shard's states of all modules, one of which ends a backward.
    """

    def __init__(self, units: Sequence[Unit], root: Unit | None, states: Sequence[Any]) -> None:
        self._units = units
        self._root = root
        self._forward: Forward | None = None
        self._position = 0
        self._passed: list[Forward] = []
        self._open: set[Unit] = set()
        self._accumulates = False
        self._is_closed = False
        self._use = _UseOfParameters([*units, root] if root is not None else units)
        for unit in units:
            group: Any = unit.group
            group.pre_backward = bound_to_unit(self._gather, unit)
            group.post_backward = bound_to_unit(self._reduce, unit)
        if root is not None:
            group = root.group
            group.pre_backward = self._gather_root
            group.post_backward = self._reduce_root
        for state in states:
            state._root_post_backward_final_callback = _before(
                self._end, state._root_post_backward_final_callback
            )

    def around_pass(self, backward_pass: Pass, run: Run) -> None:
        """Run a backward pass, and exchange which parameters it has used. A subscriber."""
        # torch.autograd.grad, which gives parameters no gradients, is no such pass.
        self._accumulates = True
        try:
            run(backward_pass)
        finally:
            self._accumulates = False
        self._use.exchange()

    def settle(self) -> None:
        """Wait for the exchange after the latest backward.

        Raises:
            SyncError: the ranks have gathered or reduced different units.
        """
        self._use.settle()

    def close(self, *, failed: bool) -> None:
        """End with the block: a later backward is refused, and makes no steps."""
        if not failed:
            self.settle()
        self._is_closed = True

    def hook_tensors(self, forward: Forward, leaves: Sequence[Any]) -> None:
        """Let the backward of a forward begin with a gradient of one of these.

        They are outputs of the model, and what units take and return: a penalty of a gradient may
        reach a unit without passing the outputs of the model, or those of the unit.
        """

        def begin(_gradient: torch.Tensor) -> None:
            self._begin(forward)

        for leaf in leaves:
            tensors = [leaf]
            if isinstance(leaf, Distribution):
                tensors = tensors_of_distribution(leaf)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(begin)  # type: ignore[no-untyped-call]  # torch's

    def _begin(self, forward: Forward) -> None:
        is_known = forward is self._forward or forward in self._passed
        if is_known or self._is_closed:
            return
        self._complete()
        self._forward = forward
        self._position = 0

    def gather_for_recomputation(self, unit: Unit) -> None:
        """Let all ranks gather a unit whose forward a checkpoint repeats in backward."""
        if self._forward is not None and not self._forward.is_alike:
            self._await_gather(unit)
        if unit.group.is_unsharded:
            # fully_shard registers parameters only when it gathers them. Of a unit that is still
            # gathered from forward, the originals are registered since.
            register_gathered(unit.group)

    def _gather(self, unit: Unit, _prefetches: bool, *hooked: Any) -> None:  # noqa: FBT001  # torch's
        """Gather a unit before its backward, when all ranks do. Called by fully_shard."""
        if self._forward is not None and not self._forward.is_alike:
            self._await_gather(unit)
            self._open.add(unit)
            unit.pre_backward(_PREFETCHES, *hooked)
            return
        is_first = unit not in self._open
        if is_first:
            self._play_until(Step(Action.GATHER, unit))
            self._use.steps.append(Step(Action.GATHER, unit))
            self._open.add(unit)
        unit.pre_backward(_PREFETCHES, *hooked)
        if is_first:
            self._prefetch()

    def _reduce(self, unit: Unit, *hooked: Any) -> None:
        """Reduce the gradients of a unit, when all ranks do. Called by fully_shard."""
        self._open.discard(unit)
        is_planned = False
        if self._forward is None or self._forward.is_alike:
            is_planned = self._play_until(Step(Action.REDUCE, unit))
        elif self._accumulates and _has_gradients(unit):
            self._vote(Step(Action.REDUCE, unit))
        self._reduce_now(unit, *hooked, is_planned=is_planned)

    def _gather_root(self, _prefetches: bool, *hooked: Any) -> None:  # noqa: FBT001  # torch's
        """Gather the root at the begin of the backward of a forward, as all ranks do."""
        assert self._root is not None
        self._root.pre_backward(_PREFETCHES, *hooked)
        self._prefetch()

    def _reduce_root(self, *hooked: Any) -> None:
        """Reduce the gradients of the root at the end of a pass, as all ranks do.

        fully_shard would reduce them where the gradient of an input of the model is ready. Then
        other ranks may still make steps of units.
        """
        assert self._root is not None
        if self._forward is None:
            self._reduce_now(self._root, *hooked, is_planned=bool(self._passed))

    def _reduce_now(self, unit: Unit, *hooked: Any, is_planned: bool) -> None:
        if self._accumulates:
            self._use.complete(unit, is_planned=is_planned)
        unit.post_backward(*hooked)

    def _complete(self) -> None:
        """End the backward of a forward: stand in for the steps that other ranks still make."""
        forward = self._forward
        if forward is None:
            return
        if forward.is_alike:
            self._stand_in_by_script(len(forward.steps))
        else:
            # fully_shard reduces a unit whose inputs need no gradients at the end of the pass.
            for unit in reversed(self._units):
                if unit in self._open:
                    self._reduce(unit)
            self._vote(None)
            for unit in self._units:
                unit.group._to_sharded()  # type: ignore[no-untyped-call]  # torch's
        self._passed.append(forward)
        self._forward = None

    def _end(self) -> None:
        """Complete the steps at the end of a pass. Called by torch, before fully_shard's end."""
        self._complete()
        if self._root is not None and self._passed:
            self._reduce_root()
        self._passed.clear()
        self._open.clear()

    # By script

    def _play_until(self, step: Step) -> bool:
        """Stand in for the steps before this one, and say whether it is in the script."""
        if self._forward is None or step not in self._forward.steps[self._position :]:
            return False
        self._stand_in_by_script(self._forward.steps.index(step, self._position))
        self._position += 1
        return True

    def _stand_in_by_script(self, position: int) -> None:
        """Stand in for the steps up to a position in the script."""
        assert self._forward is not None
        while self._position < position:
            action, unit = self._forward.steps[self._position]
            self._position += 1
            if action is Action.GATHER:
                self._use.steps.append(Step(action, unit))
                unit.pre_backward(_PREFETCHES)
                self._prefetch()
            else:
                self._open.discard(unit)
                self._reduce_now(unit, is_planned=True)

    def _prefetch(self) -> None:
        """Begin to gather the next unit of the script, while this one computes."""
        if self._forward is None:
            return
        for action, unit in self._forward.steps[self._position :]:
            if action is Action.GATHER:
                unit.group._prefetch_unshard(unit.group, "backward")
                return

    # By vote

    def _await_gather(self, unit: Unit) -> None:
        """Stand in until it is the turn of a unit that this rank gathers, if it has not yet."""
        if not unit.group.is_unsharded:
            self._vote(Step(Action.GATHER, unit))
            self._use.steps.append(Step(Action.GATHER, unit))
            gather_from_all_ranks(unit)

    def _vote(self, step: Step | None) -> None:
        """Stand in for steps until it is the turn of this rank's, or until no rank has one."""
        number = ENDED if step is None else self._number_of(step)
        while True:
            first_number = min(self._use.say(number))
            if first_number == number:
                return
            self._stand_in(self._step_of(first_number))

    def _number_of(self, step: Step) -> int:
        """Return a number that is lower for a step of a later unit: backward begins at the end."""
        return (len(self._units) - step.unit.index) * len(Action) + step.action

    def _step_of(self, number: int) -> Step:
        index, action = divmod(number, len(Action))
        return Step(Action(action), self._units[len(self._units) - index])

    def _stand_in(self, step: Step) -> None:
        """Make the collective of a step that is none of this rank's, which keeps what it has."""
        action, unit = step
        has_gathered = unit.group.is_unsharded
        if action is Action.REDUCE:
            unit.group.reshard_after_backward = not has_gathered
            self._reduce_now(unit, is_planned=True)
            unit.group.reshard_after_backward = True
            return
        self._use.steps.append(step)
        gather_again(unit)
        if not has_gathered:
            unit.group._to_sharded()  # type: ignore[no-untyped-call]  # torch's


class _UseOfParameters:
    """Which parameters of a model the backward of some rank has used.

    Args:
        units: the units of the model.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._parameters = [parameter for unit in units for parameter in unit.group.fsdp_params]
        self._used: set[FSDPParam] = set()
        self._unused: set[FSDPParam] = set()
        self._pending: _Exchange | None = None
        self.steps: list[Step] = []

    def complete(self, unit: Unit, *, is_planned: bool) -> None:
        """Give zeros to the parameters of a unit that have no gradient, before it is reduced.

        Args:
            unit: a unit that is about to be reduced.
            is_planned: whether other ranks reduce it even if this one has no gradients in it.
        """
        trained = list(_trained_parameters(unit))
        used = {parameter for parameter in trained if _has_gradient(parameter)}
        if not used and not is_planned:
            return
        self.steps.append(Step(Action.REDUCE, unit))
        self._used |= used
        if any(parameter.sharded_param._post_accumulate_grad_hooks for parameter in trained):
            trained = _used_by_any_rank(trained, used)
        for parameter in trained:
            if parameter in used:
                continue
            if parameter.sharded_param.grad is None:
                self._unused.add(parameter)
            gathered = parameter.unsharded_param
            gathered.grad = torch.zeros_like(gathered)

    def say(self, number: int) -> list[int]:
        """Exchange a number, and check that the ranks have made the same steps so far.

        Returns:
            the numbers of all ranks.
        """
        state = _state_of(self.steps)
        with waiting_for("the next block of the model in backward"):
            table = rows_of_ranks(torch.tensor([state, number]))
        if bool((table[:, 0] != state).any()):
            refuse_different("backward", [unit.name for _, unit in self.steps])
        numbers: list[int] = table[:, 1].tolist()
        return numbers

    def exchange(self) -> None:
        """Begin the exchange after a pass; wait for it if this rank does not know what others used.

        Other ranks need not wait: each of their parameters has a gradient, whatever others say.
        """
        if not self.steps:
            return
        self.settle()
        self._pending = _Exchange(
            tuple(self.steps), _words([parameter in self._used for parameter in self._parameters])
        )
        must_wait = bool(self._unused - self._used)
        self.steps.clear()
        self._used.clear()
        if must_wait:
            self.settle()

    def settle(self) -> None:
        """Take the gradients from parameters that no rank has used."""
        if self._pending is None:
            return
        exchange, self._pending = self._pending, None
        words = exchange.words_of_any_rank()
        unused, self._unused = self._unused, set()
        for index, parameter in enumerate(self._parameters):
            is_used = words[index // _BITS] >> index % _BITS & 1
            if parameter in unused and not is_used:
                parameter.sharded_param.grad = None


class _Exchange:
    """What the ranks tell each other after a pass; a collective, which begins at once.

    Args:
        steps: what this rank has gathered and reduced.
        words: which parameters this rank has used.
    """

    def __init__(self, steps: Sequence[Step], words: Sequence[int]) -> None:
        self._names = [unit.name for _, unit in steps]
        self._row = torch.tensor([_state_of(steps), *words])
        self._rows = [torch.empty_like(self._row) for _ in range(dist.get_world_size())]
        self._work = dist.all_gather(self._rows, self._row, group=comparison_group(), async_op=True)

    def words_of_any_rank(self) -> list[int]:
        """Return which parameters any rank has used.

        Raises:
            SyncError: the ranks have gathered or reduced different units.
        """
        with waiting_for("the backward of the model"):
            self._work.wait()
        table = torch.stack(self._rows)
        if bool((table[:, 0] != self._row[0]).any()):
            refuse_different("backward", self._names)
        words: list[int] = table[0, 1:].tolist()
        for row in table[1:, 1:].tolist():
            words = [word | word_of_rank for word, word_of_rank in zip(words, row, strict=True)]
        return words


def _used_by_any_rank(parameters: Sequence[FSDPParam], used: set[FSDPParam]) -> list[FSDPParam]:
    """Return the parameters of a unit that some rank has used; a collective.

    A hook of the program's on a parameter runs when the unit is reduced, so that it would get zeros
    for what no rank has used, before the exchange after the pass. An optimizer in it would decay.
    """
    flags = [parameter in used for parameter in parameters]
    with waiting_for("the backward of the model"):
        table = rows_of_ranks(torch.tensor(flags, dtype=torch.int64))
    used_by_any_rank = []
    for parameter, is_used in zip(parameters, table.any(dim=0).tolist(), strict=True):
        if is_used:
            used_by_any_rank.append(parameter)
    return used_by_any_rank


def _state_of(steps: Sequence[Step]) -> int:
    """Return a number that is equal for equal steps: hashes of integers are, in all processes."""
    return hash(tuple([(action, unit.index) for action, unit in steps]))


def _words(flags: Sequence[bool]) -> list[int]:
    """Return flags as integers of 32 bits each."""
    words = [0] * (len(flags) // _BITS + 1)
    for index, flag in enumerate(flags):
        if flag:
            words[index // _BITS] |= 1 << index % _BITS
    return words


def _trained_parameters(unit: Unit) -> Iterator[FSDPParam]:
    """Yield the parameters of a unit that are trained and were gathered."""
    for parameter in unit.group.fsdp_params:
        gathered = getattr(parameter, "unsharded_param", None)
        if gathered is not None and gathered.requires_grad:
            yield parameter


def _has_gradient(parameter: FSDPParam) -> bool:
    """Whether a gathered parameter has a gradient that is not reduced yet."""
    is_accumulated = parameter.unsharded_accumulated_grad is not None
    return is_accumulated or parameter.unsharded_param.grad is not None


def _has_gradients(unit: Unit) -> bool:
    """Whether a unit has gradients that are not reduced yet."""
    return any(_has_gradient(parameter) for parameter in _trained_parameters(unit))


def _before(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls two."""

    def call() -> None:
        first()
        then()

    return call
