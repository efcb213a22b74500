"""Proof that the ranks train one model.

    entry of the block               the models get rank 0's values
    optimizer.step()                 gradients that were not averaged are compared
        every `verify_every` steps   parameters, and settings of optimizers, are compared
    end of the block                 parameters, settings and buffers are compared

A gradient that the reducer has averaged is equal on all ranks. Any other gradient that an optimizer
uses (assigned, of torch.autograd.grad, of a tensor in no block) is compared at the step. What no
gradient shows, such as noise that was added to weights, is found when parameters are compared.

Glossary:
    reducer     averages the gradients of the block during backward (`gradients/reducer.py`)
    slot        a parameter of the block, and what the reducer knows of its gradient
    replica     a model, or a part of it, of which each rank holds a copy
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
"""Attribute of a closure whose value is the mean over the ranks already."""


class VerifiedBlock(Protocol):
    """What the checks need of a `block.Block`, whose folder may not be imported here.

    Attributes:
        run: the run in this process.
    """

    run: Runtime

    @property
    def warns_of_buffers(self) -> bool:
        """Whether to warn of buffers that differ between the ranks."""

    def replicas(self) -> Sequence[nn.Module]:
        """Return the models of which each rank holds a copy."""

    def models_with_buffers(self) -> Sequence[nn.Module]:
        """Return the models of whose buffers each rank holds a copy."""

    def loss_weight(self) -> Weight:
        """Return the weight of this rank's latest loss in the mean over the ranks."""

    def before_first_step(self) -> None:
        """Do the checks that end with the first optimizer step of the block; a collective."""


@dataclass(frozen=True)
class _HeldTensors:
    """The tensors that an optimizer holds.

    Args:
        slots: the slots of its tensors whose gradients the reducer averages.
        foreign: its tensors that are in no block, such as master parameters of Apex.
        is_of_block: whether any of its tensors is in a block, this one or another.
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
        """Check the optimizer steps in the context, and the models at its end.

        If the block raises, nothing is compared: the other ranks may not be at its end.
        """
        with before_step(BeforeStep.VERIFY, self._before_step):
            yield
        # A backward pass that was not seen explains differences: this error comes first.
        self._reducer.require_seen()
        self.compare("at the end of the block")

    def compare(self, when: str) -> None:
        """Compare parameters, settings and buffers across the ranks; a collective.

        It is called at the end of the block, and before a checkpoint is written. A rank sends 16
        bytes, and 8 more in a second exchange if there are buffers.

        Args:
            when: such as "at the end of the block", for messages.

        Raises:
            SyncError: parameters or settings differ.
        """
        if is_interrupted():
            # After Ctrl-C, the other ranks would not answer.
            return
        self._compare_parameters_and_settings(when)
        if self._warns_of_buffers:
            buffers = floating_buffers_of(self._block.models_with_buffers())
            # A block warns once: the next comparison would say the same again.
            self._warns_of_buffers = not warn_of_differing_buffers(buffers)

    def _compare_parameters_and_settings(self, when: str) -> None:
        """Compare parameters and settings; a collective.

        One exchange says whether they differ. Only if they do, more exchanges find the tensors and
        settings for the error.

        Args:
            when: as for `compare`.

        Raises:
            SyncError: parameters or settings differ.
        """
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
        """Check an optimizer before its step; a hook of `before_step`.

        A closure computes the gradients during the step. It is replaced by one that checks the
        gradients after each call.

        Args:
            optimizer: the optimizer.
            args: positional arguments of the step; the first is the optimizer.
            kwargs: keyword arguments of the step.

        Returns:
            The arguments of the step, with another closure; None: there is no closure.
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
        # Most steps have no argument, and so no closure.
        if len(args) > 1 or kwargs:
            change = functools.partial(self._checked_closure, optimizer)
            changed = change_closure(change, args, kwargs)
            if changed is not None:
                return changed
        self.compare_unaveraged_gradients(optimizer, held)
        return None

    def _count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer of a block, and do the checks that are due before it.

        A step that a CUDA graph captures is no first step: its values cannot be read.
        """
        if not self._has_stepped and not is_capturing():
            self._has_stepped = True
            self._block.before_first_step()
        self._settings.add(optimizer)
        # The steps before this one: before the first, the models have rank 0's values.
        steps, every = self._steps, self._verify_every
        if every and steps and steps % every == 0 and not is_capturing():
            self._compare_parameters_and_settings(f"after {steps} optimizer steps")
        self._steps += 1

    def _held_by(self, optimizer: torch.optim.Optimizer) -> _HeldTensors:
        """Return the tensors that an optimizer holds; it is called at every step."""
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
        return _HeldTensors(slots, foreign, is_of_block=len(foreign) < len(tensors))

    def _foreign_among(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the foreign tensors among tensors that have no slot.

        A tensor without a slot may also be of another block, or of a model whose gradients its
        engine averages.

        Args:
            tensors: an optimizer's tensors without a slot.
        """
        ids_in_blocks: set[int] = set()
        for model in routed_models():
            # A parameter without a slot in a model of the reducer is newer than the latest forward.
            # Nothing has averaged its gradient, so that it counts as foreign.
            if id(model) not in self._reducer.models:
                ids_in_blocks.update(map(id, all_parameters(model)))
        foreign = []
        for tensor in tensors:
            # A DTensor is this rank's shard of a parameter: its gradient is another on each rank.
            is_shard = hasattr(tensor, "full_tensor")
            if id(tensor) not in ids_in_blocks and not is_shard:
                foreign.append(tensor)
        return foreign

    def _checked_closure(self, optimizer: torch.optim.Optimizer, closure: Closure) -> Closure:
        """Return a closure that checks gradients after each call, and returns the mean loss.

        The mean is over the ranks. A line search compares losses: ranks that compared their own
        losses would make different steps, or call the closure different numbers of times, and then
        wait for each other.
        """

        @functools.wraps(closure)
        def checked(*args: Any, **kwargs: Any) -> Any:
            value = closure(*args, **kwargs)
            held = self._held_by(optimizer)
            self.compare_unaveraged_gradients(optimizer, held)
            # An optimizer may pass its closure on to another optimizer, which has a hook, too. A
            # wrapper of the closure has the mark as well: `functools.wraps` copies it.
            is_averaged_already = hasattr(closure, _MARK)
            if not held.is_of_block or is_averaged_already:
                return value
            return map_leaves(self._mean_over_ranks, value)

        checked.__dict__[_MARK] = True
        return checked

    def _mean_over_ranks(self, value: Any) -> Any:
        """Return the mean of a loss over the ranks, weighted as the gradients are; a collective.

        A tensor keeps the graph of this rank's loss, because some optimizers call backward on what
        a closure returns. A value that is no floating-point number is returned as it is.
        """
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            # They meet on the host: a line search reads its loss there anyway.
            losses = gather_objects((value.detach() * self._block.loss_weight()).cpu())
            # The copy has the graph of `value`; the detached tensor lets its number be written.
            mean = value.clone()
            mean.detach().copy_(torch.stack(losses).mean(0, dtype=torch.float64))
            return mean
        if isinstance(value, float):
            losses = gather_objects(value * float(self._block.loss_weight()))
            return sum(losses) / len(losses)
        return value

    def compare_unaveraged_gradients(
        self, optimizer: torch.optim.Optimizer, held: _HeldTensors
    ) -> None:
        """Compare the gradients that the reducer has not averaged; a collective if there are any.

        The reducer makes sure during backward that all ranks have such gradients, or none.

        Raises:
            SyncError: a gradient differs.
        """
        suspects = self._unaveraged(optimizer, held)
        if not suspects or is_capturing():
            return
        with waiting_for(f"the comparison of gradients in {type(optimizer).__name__}.step()"):
            self._require_equal_gradients(suspects, held)

    def _require_equal_gradients(self, suspects: list[NamedTensor], held: _HeldTensors) -> None:
        """Compare the names of gradients across the ranks, and then the gradients.

        The names come first, because ranks can only compare equally many gradients.

        Args:
            suspects: tensors whose gradients were not averaged, one or more.
            held: the tensors of the optimizer.

        Raises:
            SyncError: the names differ, or a gradient differs; the error names the first one.
        """
        names = ", ".join(name for name, _tensor in suspects)
        if differences([digest(names)]):
            name = listed_names(suspects, 1)
            raise _not_averaged_error(
                name, "another rank compares other gradients", is_foreign=False
            )
        gradients: list[Any] = [tensor.grad for _name, tensor in suspects]
        for difference in differences(gradients):
            name, tensor = suspects[difference.index]
            is_foreign = any(tensor is foreign for foreign in held.foreign)
            fault = f"it differs between rank {difference.reference} and rank {difference.rank}"
            raise _not_averaged_error(name, fault, is_foreign=is_foreign)

    def _unaveraged(
        self, optimizer: torch.optim.Optimizer, held: _HeldTensors
    ) -> list[NamedTensor]:
        """Return the tensors of an optimizer whose gradient was not averaged.

        The order is the same on all ranks. It is called at every step.

        Raises:
            ConfigError: a backward pass was not seen.
        """
        suspects = []
        for tensor in held.foreign:
            name = f"a tensor of shape {tuple(tensor.shape)} in {type(optimizer).__name__}"
            suspects.append(NamedTensor(name, tensor))
        if held.slots:
            self._reducer.require_seen()
        unaveraged_slots = self._reducer.unaveraged(held.slots)
        if unaveraged_slots:
            # The reducer has one order on all ranks. An optimizer that was made of a set of
            # parameters has another order on each rank.
            slots = [slot for slot in self._reducer.slots.values() if slot in unaveraged_slots]
            suspects += [NamedTensor(slot.name, slot.parameter) for slot in slots]
        return [suspect for suspect in suspects if suspect.tensor.grad is not None]


def _not_averaged_error(name: str, fault: str, *, is_foreign: bool) -> SyncError:
    """Return the error for a gradient that is not equal on all ranks.

    Args:
        name: what the error calls the tensor of the gradient.
        fault: how the comparison has failed.
        is_foreign: whether the tensor is in no block, which has other reasons and another fix.
    """
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
