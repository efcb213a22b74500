"""Proof that the ranks train one model: at the entry, at steps where it is needed, and at the end.

A gradient that the reducer has averaged is known to be equal on all ranks. Any other one that an
optimizer uses (assigned, of torch.autograd.grad, of a tensor in no block) is compared at the step.
What no gradient shows (noise, weights written by hand) is compared at the end of the block, and every
`verify_every` steps.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from parallelize.agreement.fingerprint import differences, digest, fingerprint
from parallelize.agreement.gather import gather_objects
from parallelize.errors import SyncError
from parallelize.gradients import differentiable
from parallelize.gradients.batch_weights import Weight
from parallelize.gradients.buckets import Slot
from parallelize.gradients.reducer import Reducer
from parallelize.hang_detection.waiting import waiting_for
from parallelize.run.containers import map_leaves
from parallelize.run.context import Runtime, is_capturing
from parallelize.run.group_abort import is_interrupted
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.backward import is_in_backward
from parallelize.torch_patches.forward import routed_models
from parallelize.torch_patches.module_tensors import all_parameters
from parallelize.torch_patches.step import BeforeStep, Closure, before_step, change_closure

__all__ = ["Verification"]

_params = itemgetter("params")
_MARK = "_parallelize_is_averaged"


class Verification:
    """Checks of one block over several ranks.

    Args:
        run: the run in this process.
        models: returns those of which each rank holds a copy.
        reducer: averages their gradients.
        warns_of_buffers: whether to warn of buffers that differ.
        loss_weight: returns the weight of this rank's latest loss in the mean over the ranks.
        before_first_step: called before the first optimizer step.
    """

    def __init__(
        self,
        run: Runtime,
        models: Callable[[], Sequence[nn.Module]],
        *,
        reducer: Reducer,
        warns_of_buffers: bool,
        loss_weight: Callable[[], Weight],
        before_first_step: Callable[[], None],
    ) -> None:
        self._run, self._models, self._reducer = run, models, reducer
        self._warns_of_buffers, self._loss_weight = warns_of_buffers, loss_weight
        self._before_first_step: Callable[[], None] | None = before_first_step
        self._verify_every, self._steps = run.config.verify_every, 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Check the optimizer steps in the context, and the models at its end, unless it raises."""
        with before_step(BeforeStep.VERIFY, self._before_step):
            yield
        self._reducer.require_seen()
        self.compare("at the end of the block")

    def compare(self, when: str) -> None:
        """Compare the models across the ranks: two collectives of 8 bytes per rank, of which one is for buffers.

        Raises:
            SyncError: some parameters differ.
        """
        if is_interrupted():
            return
        self.compare_parameters(when)
        buffers = _named(self._models(), nn.Module.named_buffers) if self._warns_of_buffers else []
        found = _different([each for each in buffers if each[1].is_floating_point()])
        self._warns_of_buffers = not found
        if found and self._run.world.is_main:
            names = _listed(found)
            exact = " On GPUs, nn.SyncBatchNorm.convert_sync_batchnorm(model) trains batch norm as one process does."
            warnings.warn(
                f"buffers differ between the ranks, and rank 0's are kept: {names}. Each rank has "
                "updated its own from its part of the batch. parallel_model(model, buffers='mean') keeps "
                "their mean, buffers='rank0' keeps rank 0's without this warning." + exact * ("running_mean" in names),
                stacklevel=user_stacklevel(),
            )

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        slots, unknown, is_of_block = self._held_by(optimizer)
        if slots and is_in_backward():
            raise SyncError(
                f"{type(optimizer).__name__}.step() inside backward, on parameters of a parallel_model block",
                why="the averaging of gradients over the ranks is complete only when backward ends",
                fix="call step() after backward(), not from a hook in it",
            )
        if self._before_first_step is not None and is_of_block and not is_capturing():
            self._before_first_step()
            self._before_first_step = None
        if is_of_block:
            if self._verify_every and self._steps and self._steps % self._verify_every == 0:
                self.compare_parameters(f"after {self._steps} optimizer steps")
            self._steps += 1
        if len(args) > 1 or kwargs:
            changed = change_closure(functools.partial(self._checked, optimizer), args, kwargs)
            if changed is not None:
                return changed
        with waiting_for(_comparison(optimizer)):
            self.compare_unaveraged_gradients(optimizer, slots, unknown)
        return None

    def _held_by(self, optimizer: torch.optim.Optimizer) -> tuple[list[Slot], list[Any], bool]:
        """Return what an optimizer holds: parameters of the reducer, tensors in no block, and whether any is in one.

        Master parameters of Apex are in no block, too.
        """
        tensors = list(chain.from_iterable(map(_params, optimizer.param_groups)))
        known = self._reducer.slots
        unknown = [each for each in tensors if id(each) not in known]
        if unknown:
            # Other parameters of one's own models have not been in a forward since they were added.
            others = [each for each in routed_models() if id(each) not in self._reducer.models]
            inside = {id(each) for model in others for each in all_parameters(model)}
            # A DTensor is the shard of a model in a block.
            unknown = [each for each in unknown if id(each) not in inside and not hasattr(each, "full_tensor")]
        slots = [known[id(each)] for each in tensors if id(each) in known]
        return slots, unknown, len(unknown) < len(tensors)

    def _checked(self, optimizer: torch.optim.Optimizer, closure: Closure) -> Closure:
        """Return a closure whose gradients are checked, and whose value is averaged over the ranks.

        A line search compares losses. Ranks that compare their own losses would take other steps, or
        evaluate the closure another number of times and then wait for each other.
        """

        @functools.wraps(closure)
        def checked(*args: Any, **kwargs: Any) -> Any:
            value, (slots, unknown, is_of_block) = closure(*args, **kwargs), self._held_by(optimizer)
            with waiting_for(_comparison(optimizer)):
                self.compare_unaveraged_gradients(optimizer, slots, unknown)
            # An optimizer may pass its closure on to another one; `wraps` copies the mark.
            is_averaged = is_of_block and not hasattr(closure, _MARK)
            return map_leaves(self._mean, value) if is_averaged else value

        checked.__dict__[_MARK] = True
        return checked

    def _mean(self, value: Any) -> Any:
        """Return the mean of a loss over the ranks, weighted as the gradients are; other values unchanged.

        The gradient of a tensor flows to this rank's loss: some optimizers call backward on it.
        """
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            weighted_losses = gather_objects(value.detach() * self._loss_weight())
            averaged = value.clone()
            averaged.detach().copy_(torch.stack(weighted_losses).mean(0, dtype=torch.float64))
            return averaged
        if isinstance(value, float):
            return sum(gather_objects(value * float(self._loss_weight()))) / self._run.world.world_size
        return value

    def compare_unaveraged_gradients(
        self, optimizer: torch.optim.Optimizer, slots: list[Slot], unknown: list[Any]
    ) -> None:
        """Compare the gradients that the reducer has not averaged across the ranks.

        Raises:
            SyncError: one differs.
        """
        name = type(optimizer).__name__
        suspects = [(f"a tensor of shape {tuple(each.shape)} in {name}", each) for each in unknown]
        if slots:
            self._reducer.require_seen()
            wrong = self._reducer.unaveraged(slots)
            # In the reducer's order: an optimizer that was given a set has another order on each rank.
            ordered = self._reducer.slots.values() if wrong else ()
            suspects += [(slot.name, slot.parameter) for slot in ordered if slot in wrong]
        suspects = [each for each in suspects if each[1].grad is not None]
        if not suspects or is_capturing():
            return
        for _ in differences([digest(", ".join(each for each, _ in suspects))]):
            raise _not_averaged(_listed(suspects, 1), "another rank compares other gradients", is_unknown=False)
        for index, rank in differences([each.grad for _, each in suspects]):
            found = f"it differs between rank 0 and rank {rank}"
            what, tensor = suspects[index]
            raise _not_averaged(what, found, is_unknown=any(tensor is each for each in unknown))

    def compare_parameters(self, when: str) -> None:
        """Compare the parameters across the ranks: one collective of 8 bytes per rank.

        Raises:
            SyncError: some differ.
        """
        parameters = _named(self._models(), nn.Module.named_parameters)
        wrong = _different(parameters)
        if wrong:
            shown = [f"{name} by up to {_largest_difference(each):.3g}" for name, each in wrong[:3]]
            raise SyncError(
                f"{len(wrong)} of {len(parameters)} parameters differ between the ranks {when}: {', '.join(shown)}",
                why="code that only some ranks run, or that draws random numbers, has changed gradients "
                "after their averaging, or the parameters themselves",
                fix="make the same changes on every rank, with numbers that are equal on all of them "
                "(parallelize.all_reduce, generators with equal seeds); verify_every=1 finds the step",
            )


def _comparison(optimizer: torch.optim.Optimizer) -> str:
    """Return how reports of hangs name the wait for the gradients of the other ranks."""
    return f"the comparison of gradients in {type(optimizer).__name__}.step()"


def _not_averaged(name: str, found: str, *, is_unknown: bool) -> SyncError:
    why = (
        "it was assigned, computed by torch.autograd.grad, or accumulated under no_sync or on some ranks only: "
        "backward on all ranks, in the block and outside of no_sync, averages what it accumulates"
    )
    fix = "call backward on every rank, or average the gradient with parallelize.all_reduce before the step"
    if is_unknown:
        why = "the tensor is in no parallel_model block, or was added to a model that has not been called since"
        fix = (
            "pass it, or its module, to the block: parallel_model(model, tensor); step what each rank trains for "
            "itself outside of the block, or update it by hand"
        )
    return SyncError(f"the gradient of {name} is not averaged over the ranks: {found}", why=why, fix=fix)


_Named = tuple[str, torch.Tensor]


def _named(models: Iterable[nn.Module], parts: Callable[[nn.Module], Iterable[_Named]]) -> list[_Named]:
    return [(f"{name} of {type(model).__name__}", each) for model in models for name, each in parts(model)]


def _different(named: Sequence[_Named]) -> list[_Named]:
    """Return the tensors that differ across the ranks."""
    tensors = [each for _, each in named]
    if not tensors or not any(differences([fingerprint(tensors)])):
        return []
    return [named[index] for index, _ in differences(tensors)]


def _largest_difference(tensor: torch.Tensor) -> float:
    values = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    of_rank_0 = differentiable.broadcast(values, 0)
    return float(differentiable.all_reduce((values - of_rank_0).abs().max(), "max"))


def _listed(named: Sequence[_Named], most: int = 3) -> str:
    more = f" and {len(named) - most} more" if len(named) > most else ""
    return ", ".join(name for name, _ in named[:most]) + more
