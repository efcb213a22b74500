"""Proof that the ranks train one model.

    entry of the block       the models get rank 0's values
    optimizer.step()         gradients that were not averaged are compared
      every verify_every     parameters, and settings of optimizers, are compared
    end of the block         the same, and buffers

A gradient that the reducer has averaged is equal on all ranks. Any other one that an optimizer
uses (assigned, of torch.autograd.grad, of a tensor in no block) is compared at the step. What no
gradient shows, such as noise or weights that were written by hand, is compared at the end.

Glossary:
    slot        a parameter of the block with a gradient that the reducer has averaged
    foreign     of a tensor: it is in no block
    setting     a number of an optimizer's param group, such as its learning rate
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from parallelize.agreement.fingerprint import differences, digest
from parallelize.agreement.gather import gather_objects
from parallelize.agreement.model_comparison import (
    NamedTensor,
    differing_parameters_error,
    fingerprint_of,
    floating_buffers_of,
    listed_names,
    parameters_of_models,
    warn_of_differing_buffers,
)
from parallelize.agreement.optimizer_settings import OptimizerSettings
from parallelize.errors import SyncError
from parallelize.gradients.batch_weights import Weight
from parallelize.gradients.buckets import Slot
from parallelize.gradients.reducer import Reducer
from parallelize.hang_detection.waiting import waiting_for
from parallelize.run.containers import map_leaves
from parallelize.run.context import Runtime, is_capturing
from parallelize.run.group_abort import is_interrupted
from parallelize.torch_patches.backward import is_in_backward
from parallelize.torch_patches.forward import routed_models
from parallelize.torch_patches.module_tensors import all_parameters
from parallelize.torch_patches.step import (
    BeforeStep,
    Closure,
    before_step,
    change_closure,
    parameters_of,
)

_MARK = "_parallelize_is_averaged"


class VerifiedBlock(Protocol):
    """What a block of several ranks tells of itself.

    Attributes:
        run: the run in this process.
    """

    run: Runtime

    @property
    def warns_of_buffers(self) -> bool:
        """Whether to warn of buffers that differ."""

    def replicas(self) -> Sequence[nn.Module]:
        """Return the models of which each rank holds a copy."""

    def loss_weight(self) -> Weight:
        """Return the weight of this rank's latest loss in the mean over the ranks."""

    def before_first_step(self) -> None:
        """Do what is done once, at the first step of an optimizer; all ranks call it together."""


@dataclass(frozen=True)
class _Held:
    """What an optimizer holds.

    Args:
        slots: of its parameters that the reducer averages.
        foreign: its tensors that are in no block; master parameters of Apex are so, too.
        is_of_block: whether any of its tensors is in a block.
    """

    slots: list[Slot]
    foreign: list[Any]
    is_of_block: bool


class Verification:
    """The checks of one block of several ranks.

    Args:
        block: the block.
        reducer: averages the gradients of the block.
    """

    def __init__(self, block: VerifiedBlock, reducer: Reducer) -> None:
        self._block, self._reducer = block, reducer
        self._warns_of_buffers = block.warns_of_buffers
        self._verify_every = block.run.config.verify_every
        self._settings = OptimizerSettings()
        self._has_stepped = False
        self._steps = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Check the optimizer steps in the context, and the models at its end, unless it raises."""
        with before_step(BeforeStep.VERIFY, self._before_step):
            yield
        self._reducer.require_seen()
        self.compare("at the end of the block")

    def compare(self, when: str) -> None:
        """Compare parameters, settings and buffers across the ranks; a collective.

        It is one exchange of 16 bytes per rank, and one of 8 if there are buffers.

        Args:
            when: such as "at the end of the block", for messages.

        Raises:
            SyncError: parameters or settings differ.
        """
        if is_interrupted():
            return
        self._compare_parameters_and_settings(when)
        if self._warns_of_buffers:
            buffers = floating_buffers_of(self._block.replicas())
            # The next comparison would say the same again.
            self._warns_of_buffers = not warn_of_differing_buffers(buffers)

    def _compare_parameters_and_settings(self, when: str) -> None:
        """Compare parameters and settings in one exchange; a second one finds what differs."""
        parameters = parameters_of_models(self._block.replicas())
        compared = [fingerprint_of(parameters), self._settings.digest()]
        differing = [difference.index for difference in differences(compared)]
        are_parameters_different, are_settings_different = 0 in differing, 1 in differing
        # The error is about settings if both differ: parameters differ because settings do.
        if are_settings_different:
            self._settings.require_equal(when)
        if are_parameters_different:
            raise differing_parameters_error(when, parameters)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Check an optimizer before its step, or, if it has a closure, after each call of that.

        Returns:
            The arguments of the step, with another closure; None: they stay.
        """
        held = self._held_by(optimizer)
        if held.slots and is_in_backward():
            raise SyncError(
                f"{type(optimizer).__name__}.step() inside backward, on parameters of a "
                "parallel_model block",
                why="the averaging of gradients over the ranks is complete only when backward ends",
                fix="call step() after backward(), not from a hook in it",
            )
        if held.is_of_block:
            self._count_step(optimizer)
        if len(args) > 1 or kwargs:
            change = functools.partial(self._checked, optimizer)
            changed = change_closure(change, args, kwargs)
            if changed is not None:
                return changed
        self.compare_unaveraged_gradients(optimizer, held)
        return None

    def _count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what is done at the first step of the block, and every `verify_every` steps.

        A captured step of a CUDA graph is no first step: its values cannot be read.
        """
        if not self._has_stepped and not is_capturing():
            self._has_stepped = True
            self._block.before_first_step()
        self._settings.add(optimizer)
        steps, every = self._steps, self._verify_every
        if every and steps and steps % every == 0:
            self._compare_parameters_and_settings(f"after {steps} optimizer steps")
        self._steps += 1

    def _held_by(self, optimizer: torch.optim.Optimizer) -> _Held:
        """Return what an optimizer holds; it is called at every step."""
        slots_by_id = self._reducer.slots
        slots, without_slot = [], []
        tensors = parameters_of(optimizer)
        for tensor in tensors:
            slot = slots_by_id.get(id(tensor))
            if slot is None:
                without_slot.append(tensor)
            else:
                slots.append(slot)
        foreign = self._foreign_among(without_slot) if without_slot else []
        return _Held(slots, foreign, is_of_block=len(foreign) < len(tensors))

    def _foreign_among(self, tensors: Sequence[Any]) -> list[Any]:
        """Return those of an optimizer's tensors without a slot that are in no block."""
        ids_in_blocks: set[int] = set()
        for model in routed_models():
            # New parameters of the reducer's own models have not been in a forward yet.
            if id(model) not in self._reducer.models:
                ids_in_blocks.update(map(id, all_parameters(model)))
        foreign = []
        for tensor in tensors:
            # A DTensor is the shard of a model in a block.
            is_shard = hasattr(tensor, "full_tensor")
            if id(tensor) not in ids_in_blocks and not is_shard:
                foreign.append(tensor)
        return foreign

    def _checked(self, optimizer: torch.optim.Optimizer, closure: Closure) -> Closure:
        """Return a closure whose gradients are checked, and whose value is that of all ranks.

        A line search compares losses. Ranks that compare their own losses would take other steps,
        or evaluate the closure another number of times and then wait for each other.
        """

        @functools.wraps(closure)
        def checked(*args: Any, **kwargs: Any) -> Any:
            value = closure(*args, **kwargs)
            held = self._held_by(optimizer)
            self.compare_unaveraged_gradients(optimizer, held)
            # An optimizer may pass its closure on to another one; `wraps` copies the mark.
            is_averaged_already = hasattr(closure, _MARK)
            if not held.is_of_block or is_averaged_already:
                return value
            return map_leaves(self._mean_over_ranks, value)

        checked.__dict__[_MARK] = True
        return checked

    def _mean_over_ranks(self, value: Any) -> Any:
        """Return the mean of a loss, weighted as the gradients are; other values unchanged.

        The gradient of a tensor flows to this rank's loss: some optimizers call backward on it.
        """
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            losses = gather_objects(value.detach() * self._block.loss_weight())
            mean = value.clone()
            mean.detach().copy_(torch.stack(losses).mean(0, dtype=torch.float64))
            return mean
        if isinstance(value, float):
            losses = gather_objects(value * float(self._block.loss_weight()))
            return sum(losses) / len(losses)
        return value

    def compare_unaveraged_gradients(self, optimizer: torch.optim.Optimizer, held: _Held) -> None:
        """Compare the gradients that the reducer has not averaged.

        It is a collective if there are any, and the reducer's backward makes sure that all ranks
        have the same ones.

        Raises:
            SyncError: one differs.
        """
        suspects = self._unaveraged(optimizer, held)
        if not suspects or is_capturing():
            return
        with waiting_for(f"the comparison of gradients in {type(optimizer).__name__}.step()"):
            self._require_equal_gradients(suspects, held)

    def _require_equal_gradients(self, suspects: list[NamedTensor], held: _Held) -> None:
        """Compare the names of gradients across the ranks, and then the gradients.

        The names come first, because ranks can only compare equally many gradients.

        Raises:
            SyncError: the names differ, or a gradient does; the error is of the first one.
        """
        names = ", ".join(name for name, _tensor in suspects)
        if differences([digest(names)]):
            name = listed_names(suspects, 1)
            raise _not_averaged(name, "another rank compares other gradients", is_foreign=False)
        gradients: list[Any] = [tensor.grad for _name, tensor in suspects]
        for difference in differences(gradients):
            name, tensor = suspects[difference.index]
            is_foreign = any(tensor is foreign for foreign in held.foreign)
            fault = f"it differs between rank 0 and rank {difference.rank}"
            raise _not_averaged(name, fault, is_foreign=is_foreign)

    def _unaveraged(self, optimizer: torch.optim.Optimizer, held: _Held) -> list[NamedTensor]:
        """Return the tensors of an optimizer with a gradient that was not averaged."""
        suspects = []
        for tensor in held.foreign:
            name = f"a tensor of shape {tuple(tensor.shape)} in {type(optimizer).__name__}"
            suspects.append(NamedTensor(name, tensor))
        if held.slots:
            self._reducer.require_seen()
        wrong = self._reducer.unaveraged(held.slots)
        if wrong:
            # In the reducer's order: an optimizer that was made of a set has another one on each
            # rank.
            slots = [slot for slot in self._reducer.slots.values() if slot in wrong]
            suspects += [NamedTensor(slot.name, slot.parameter) for slot in slots]
        return [suspect for suspect in suspects if suspect.tensor.grad is not None]


def _not_averaged(name: str, fault: str, *, is_foreign: bool) -> SyncError:
    """Return the error for a gradient that is not equal on all ranks."""
    why = (
        "it was assigned, computed by torch.autograd.grad, or accumulated under no_sync or on some "
        "ranks only: backward on all ranks, in the block and outside of no_sync, averages what it "
        "accumulates"
    )
    fix = (
        "call backward on every rank, or average the gradient with parallelize.all_reduce before "
        "the step"
    )
    if is_foreign:
        why = (
            "the tensor is in no parallel_model block, or was added to a model that has not been "
            "called since"
        )
        fix = (
            "pass it, or its module, to the block: parallel_model(model, tensor); step what each "
            "rank trains for itself outside of the block, or update it by hand"
        )
    return SyncError(
        f"the gradient of {name} is not averaged over the ranks: {fault}", why=why, fix=fix
    )
