"""Averages gradients over the ranks while backward runs, whichever call has produced them.

    a gradient accumulates         a hook, `list.append`, adds its parameter to a list
    the last gradient of a bucket  the hook of the bucket notes the parameters of the list in their
    accumulates                    buckets, sends the buckets that are complete, in their order, and
                                   receives the buckets whose means are there
    the pass has ended             the other buckets are sent, and all buckets are received
    ... and a model is learning    the ranks agree on the order of its buckets

Glossary:

    pass       one call of backward by the user, with all that it calls
    arrive     a gradient arrives when it has accumulated in `.grad` of its parameter
    slot       a parameter of a block's model, with what is known of its gradient
    bucket     gradients of a model that are sent together, as a flat tensor
    send       copy gradients to the flat tensor, and begin to average it over the ranks
    receive    copy the means from the flat tensor to `.grad`
    reach      a pass reaches a model if a gradient of its parameters arrives
    learn      find the order in which the gradients of a model arrive, and make buckets in it

The reducer averages `.grad` itself, which may contain gradients of earlier passes. If these were
averaged, they are equal on all ranks and stay as they are: mean(old + new) = old + mean(new).
Gradients that accumulated under `no_sync` are averaged by the next pass outside of `no_sync`. Under
`logical=`, whose means are ordered, only the gradients of the pass are averaged: the gradients of
earlier passes are set aside, and added again at the end.

A pass that reaches a model sends all of the model's buckets, in one order on all ranks. Buckets
have a process group of their own, because a rank may send a bucket before a collective of the
user's backward, and another rank after it.

Source: Megatron-LM's DistributedDataParallel, https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from weakref import ref

import torch
from torch import nn

from parallelize.errors import ConfigError
from parallelize.gradients.autograd_graph import has_sparse_gradient
from parallelize.gradients.buckets import Bucket, Place, Slot, Usage, add_hook, read_flags
from parallelize.gradients.mean_over_ranks import MeanOverRanks
from parallelize.gradients.model_buckets import ModelBuckets
from parallelize.hang_detection.waiting import waiting_for
from parallelize.plugins.base import Reduction
from parallelize.run.context import current, is_capturing
from parallelize.run.groups import GroupPurpose, group_of_data_ranks
from parallelize.torch_patches.backward import Pass, Run
from parallelize.torch_patches.forward import routed_models
from parallelize.torch_patches.module_tensors import all_named_parameters

_model = attrgetter("model")


@dataclass
class _RunningPass:
    """The pass that runs.

    Args:
        is_alone: whether no other block is open, whose reducer would send in the same group.
        reached: the models that the pass has reached outside of `no_sync`, in this order.
    """

    is_alone: bool
    reached: list[ModelBuckets] = field(default_factory=list)

    def may_send_early(self, model: ModelBuckets) -> bool:
        """Whether buckets of a model may be sent before the end of the pass.

        Only the model that was reached first may send early. It must be the same on all ranks. The
        buckets of two models may become complete in different orders on different ranks, so the
        other models send at the end.
        """
        if not self.is_alone or not self.reached:
            return False
        return self.reached[0] is model


class Reducer:
    """Averages the gradients of one block, by hooks on its parameters until `close`.

    Args:
        models: the models, and how their gradients are averaged. If several models share a
            parameter, its gradient is sent with the gradients of the first of these models.

    Attributes:
        slots: id of a parameter -> its slot, in one order on all ranks.
        models: id of a model -> its buckets, in the order of the block.
    """

    def __init__(self, models: Sequence[tuple[nn.Module, Reduction]]) -> None:
        self.slots: dict[int, Slot] = {}
        self.models: dict[int, ModelBuckets] = {}
        # Whether the run has the option `logical=`, so that means are `OrderedMean`s.
        self._is_ordered = False
        self._mean_by_device_type: dict[str, MeanOverRanks] = {}
        # Parameters whose gradients have accumulated and are not noted in their buckets yet. The
        # hooks of parameters append to this very list, so it is emptied and never replaced.
        self._arrived: list[torch.Tensor] = []
        # None between passes.
        self._pass: _RunningPass | None = None
        self._lock = threading.Lock()
        self._waiting = waiting_for("backward", is_blocked=True)
        self._hooks = contextlib.ExitStack()
        self.refresh(models)

    def refresh(self, models: Sequence[tuple[nn.Module, Reduction]]) -> None:
        """Follow modules and parameters that were added or replaced, with new slots and buckets.

        No new slot has an averaged gradient. So the next step compares the gradients of earlier
        passes across the ranks.
        """
        self.close()
        # The option `logical=` is of the run: either all reductions are ordered, or none.
        self._is_ordered = any(reduction.is_ordered for _, reduction in models)
        for model, reduction in models:
            slots = self._slots_of(model)
            self.models[id(model)] = ModelBuckets(slots, reduction, self._on_last)
        self._make_groups()

    def _slots_of(self, model: nn.Module) -> list[Slot]:
        """Make a slot, and add a hook, for each parameter of a model that has no slot yet."""
        ids_of_sparse = set()
        for module in model.modules():
            if has_sparse_gradient(module):
                ids_of_sparse.add(id(module.weight))
        slots: list[Slot] = []
        for name, parameter in all_named_parameters(model):
            is_trainable = parameter.is_floating_point() or parameter.is_complex()
            if not is_trainable or id(parameter) in self.slots:
                continue
            slot = Slot(
                f"{name} of {type(model).__name__}",
                parameter,
                is_sparse=id(parameter) in ids_of_sparse,
                # Backward reaches the parameters that were registered last first.
                place=Place(Usage.EVERYWHERE, -len(slots)),
            )
            slots.append(slot)
            self.slots[id(parameter)] = slot
            self._hooks.callback(add_hook(parameter, self._arrived.append).remove)
        return slots

    def _make_groups(self) -> None:
        """Get a group for each type of device that has parameters; a collective."""
        run = current()
        for slot in self.slots.values():
            device = slot.parameter.device
            if device.type == run.device.type:
                device = run.device
            if device.type not in self._mean_by_device_type:
                purpose = GroupPurpose.GRADIENTS
                group = group_of_data_ranks(run.data_ranks, run.world, device, purpose)
                mean = MeanOverRanks(group, is_ordered=self._is_ordered)
                self._mean_by_device_type[device.type] = mean

    def close(self) -> None:
        """Remove the hooks, and cut the references between slots, buckets and models.

        They are cycles, and would keep parameters alive after the user has dropped them.
        """
        self._arrived.clear()
        self._hooks.close()
        for model in self.models.values():
            model.remove_hooks()
        for slot in self.slots.values():
            slot.model = slot.bucket = None
        self.slots = {}
        self.models = {}

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave the gradients that a model gets from passes in the context local.

        Under `logical=`, average them nevertheless: an ordered mean must not be of a sum of
        passes, see `_set_aside`.
        """
        buckets = self.models[id(model)]
        before = buckets.is_no_sync
        buckets.is_no_sync = not buckets.reduction.is_ordered
        try:
            yield
        finally:
            buckets.is_no_sync = before

    def around_backward(self, started: Pass, run: Run) -> None:
        """Run a pass and average its gradients; a subscriber of torch_patches.backward.

        If the pass raises, the gradients of all models that it has reached count as not averaged.
        """
        if self._pass is not None:
            # The running pass is on another thread, which will average these gradients, too.
            run(started)
            return
        self.require_seen()
        running = _RunningPass(is_alone=len(routed_models()) == len(self.models))
        self._pass = running
        earlier: list[tuple[Slot, torch.Tensor]] = []
        if self._is_ordered:
            earlier = self._set_aside()
        try:
            run(started)
            with torch.no_grad():
                self._finish(running)
        except BaseException:
            self._fail(running)
            raise
        finally:
            self._pass = None
            if earlier:
                _add_to(earlier)

    def _set_aside(self) -> list[tuple[Slot, torch.Tensor]]:
        """Take the gradients of earlier passes from `.grad`, and return them for `_add_to`.

        An ordered mean has the same bits at any number of ranks. If a pass added its gradients to
        `.grad` of earlier passes, each rank would round its sum, and the mean of the sums would
        depend on how the batch is divided.
        """
        earlier = []
        for slot in self.slots.values():
            if slot.parameter.grad is not None:
                earlier.append((slot, slot.parameter.grad))
                slot.parameter.grad = None
        return earlier

    def require_seen(self) -> None:
        """Refuse gradients that accumulated in a pass without `around_backward`.

        Called before each pass, before each step and at the end of the block.

        Raises:
            ConfigError: such gradients have accumulated since the latest call.
        """
        if self._arrived:
            self._take_arrived()
            raise ConfigError(
                "a backward pass that did not start at loss.backward() or "
                "torch.autograd.backward()",
                why="its function was imported before the block, so its gradients are not averaged "
                "over the ranks",
                fix="call loss.backward(), or torch.autograd.backward(...) by this name",
            )

    def unaveraged(self, slots: Sequence[Slot]) -> set[Slot]:
        """Return the slots with a gradient that is not the tensor that the ranks have averaged."""
        # A loop without calls of functions: it runs at every step, for every parameter.
        unaveraged = set()
        for slot in slots:
            gradient, averaged = slot.parameter.grad, slot.averaged
            if gradient is not None and (averaged is None or averaged() is not gradient):
                unaveraged.add(slot)
        return unaveraged

    def _on_last(self, model: ModelBuckets, _parameter: torch.Tensor) -> None:
        """Send the buckets that are complete, and receive the buckets whose means are there.

        This is the hook of a bucket, on the parameter whose gradient is expected last.
        """
        running = self._pass
        if running is None or model.is_no_sync:
            return
        # The lock is needed because autograd has a thread for each device. Without no_grad, a pass
        # under create_graph=True would record the copies in the graph.
        with self._lock, torch.no_grad():
            self._note(running)
            if not running.may_send_early(model):
                return
            # While a CUDA graph is captured, no event may be queried.
            if model.under_way and not is_capturing():
                model.receive_completed()
            while (bucket := model.next_complete()) is not None:
                model.send_next(self._mean_by_device_type[bucket.device_type])

    def _take_arrived(self) -> list[Slot]:
        """Return the slots of the gradients that have arrived since the last call.

        The gradients count as not averaged from now on, until their buckets are received.
        """
        # Another thread may append to the list meanwhile. Only what was copied is deleted.
        arrived = self._arrived[:]
        del self._arrived[: len(arrived)]
        slots = list(map(self.slots.__getitem__, map(id, arrived)))
        for slot in slots:
            slot.averaged = None
        return slots

    def _note(self, running: _RunningPass) -> None:
        """Note in their buckets which gradients have arrived.

        The first gradient of a model begins the pass in the model's buckets. Before that, it is not
        known whether the pass reaches the model, and the user may still freeze parameters.
        """
        for model, slots in groupby(self._take_arrived(), _model):
            if model.is_no_sync:
                continue
            if model not in running.reached:
                running.reached.append(model)
                model.begin()
            model.arrive(list(slots))

    def _finish(self, running: _RunningPass) -> None:
        """Send the unsent buckets of the models that the pass has reached, and receive all.

        All ranks send in one order. The model that was reached first comes first, because it may
        have sent buckets early. The later ones were reached in an order that may differ between the
        ranks, so they come in the order of the block.
        """
        if self._arrived:
            self._note(running)
        # A slice, because the pass may have reached no model.
        models_in_order = running.reached[:1]
        reached_later = running.reached[1:]
        for model in self.models.values():
            if model in reached_later:
                models_in_order.append(model)
        for model in models_in_order:
            while model.unsent:
                model.send_next(self._mean_by_device_type[model.unsent[0].device_type])
        self._receive(models_in_order)
        for model in models_in_order:
            if model.is_learning and not is_capturing():
                model.learn(self._mean_by_device_type[model.device_type])

    def _receive(self, reached: Sequence[ModelBuckets]) -> None:
        """Wait for the means of all buckets that are under way, and copy them to `.grad`.

        Args:
            reached: the models, in one order on all ranks: each `OrderedMean` begins its second
                collective here.
        """
        buckets: list[Bucket] = []
        for model in reached:
            buckets += model.under_way
            model.under_way.clear()
        lacking = [bucket for bucket in buckets if bucket.lacks_gradients]
        with self._waiting:
            if self._is_ordered:
                for bucket in buckets:
                    bucket.add_pieces()
            for bucket in buckets:
                if not bucket.lacks_gradients:
                    bucket.receive()
            if lacking:
                for bucket, is_used in zip(lacking, read_flags(lacking), strict=True):
                    bucket.receive(is_used)

    def _fail(self, running: _RunningPass) -> None:
        """End a pass that has raised.

        The arrivals are dropped: otherwise `require_seen` would refuse the next pass.
        """
        self._take_arrived()
        for model in running.reached:
            model.fail()


@torch.no_grad()
def _add_to(earlier: Sequence[tuple[Slot, torch.Tensor]]) -> None:
    """Add the gradients of a pass to the gradients of earlier passes, and put the sums in `.grad`.

    Args:
        earlier: as `_set_aside` has returned it.
    """
    for slot, gradient in earlier:
        parameter = slot.parameter
        if parameter.grad is not None:
            is_averaged = slot.averaged is not None and slot.averaged() is parameter.grad
            gradient.add_(parameter.grad)
            slot.averaged = None
            if is_averaged:
                slot.averaged = ref(gradient)
        parameter.grad = gradient
