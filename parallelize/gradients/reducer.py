"""Averages gradients over the ranks while backward runs, whichever call has produced them.

    a gradient accumulates     its parameter is noted, by a hook that runs no Python code
    that of a bucket's last    buckets that are complete are copied to flat tensors and all-reduced
    the pass has ended         the other buckets are sent, and the means are copied to `.grad`

What is averaged is `.grad` itself. The part from earlier passes is equal on all ranks and stays as
it is: mean(old + new) = old + mean(new). What was accumulated under `no_sync` is averaged by the
next pass outside of it.

Sparse gradients are sent as dense ones, which every process group can average.

A flat tensor ends with flags: whether this rank has a gradient of each parameter. A parameter that
no rank has used keeps `grad=None`; a rank reads the flags only where it lacks a gradient. A pass
that reaches a parameter of a model sends all buckets of that model, in one order on all ranks,
through a group of their own: a rank may send a bucket before a collective of the user's backward,
and another rank after it.

Source: Megatron-LM's DistributedDataParallel, https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import _utils as torch_utils
from torch import nn

from parallelize.errors import ConfigError, SyncError
from parallelize.gradients.autograd_graph import has_sparse_gradient
from parallelize.plugins.base import Reduction
from parallelize.run.context import current
from parallelize.run.process_group import GroupPurpose, separate_group
from parallelize.torch_patches.backward import Pass, Run
from parallelize.torch_patches.forward import routed_models
from parallelize.torch_patches.module_tensors import all_named_parameters

__all__ = ["Reducer", "Slot"]

_FIRST_BYTES = 2**20  # a small first bucket is sent early, as DistributedDataParallel's
_grad = attrgetter("grad")
_flatten: Any = torch_utils._flatten_dense_tensors
_unflatten: Any = torch_utils._unflatten_dense_tensors
_NOT_AVERAGED: Any = type(None)  # as a reference to nothing, its call returns None


class Slot:
    """A parameter, its name, and a reference to the gradient that was averaged."""

    def __init__(self, name: str, parameter: Any, *, is_sparse: bool) -> None:
        self.name, self.parameter, self.is_sparse = name, parameter, is_sparse
        self.averaged = _NOT_AVERAGED
        self.model: Any = None
        self.bucket: Any = None


class _Bucket:
    """Parameters whose gradients are sent together."""

    handle: Any = None  # of the hook on the last parameter
    is_plain = True  # whether this rank has a dense gradient of each parameter
    accumulates_twice = False  # in one pass, as under a reentrant checkpoint: never sent early

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        for each in slots:
            each.bucket = self

    def begin(self) -> None:
        """Begin a pass, with the parameters that are trained now."""
        trained = [each for each in self.slots if each.parameter.requires_grad]
        self.members = [each.parameter for each in trained]
        self.trained, self.missing = trained, set(trained)
        self.end()

    def end(self) -> None:
        """Free what was sent."""
        self.sent: list[Any] = []  # the gradients, or zeros
        self.flat: Any = None
        self.work: Any = None


class _Model:
    """The buckets of one model, for the parameters that have been trained in the block."""

    def __init__(self, slots: list[Slot], reduction: Reduction) -> None:
        self.slots, self.reduction = slots, reduction
        self.untrained = slots  # those that have never been
        self.buckets: list[_Bucket] = []
        self.trained: list[_Bucket] = []  # in the running pass
        self.next = 0  # number of the bucket to send
        self.holds = True  # the first pass sends nothing early: it learns what accumulates twice
        self.is_no_sync = False
        for each in slots:
            each.model = self

    def begin(self, on_last: Callable[..., None]) -> None:
        """Begin a pass: fill new buckets if other parameters are trained than ever before."""
        if any(each.parameter.requires_grad for each in self.untrained):
            self.remove_hooks()
            self.buckets = self._filled()
            self.untrained = [each for each in self.slots if each.bucket is None]
            self.holds = True
            for bucket in self.buckets:
                bucket.handle = _add_hook(bucket.slots[-1].parameter, functools.partial(on_last, self))
        for bucket in self.buckets:
            bucket.begin()
        self.trained = [each for each in self.buckets if each.members]

    def _filled(self) -> list[_Bucket]:
        filling: dict[Any, list[Slot]] = {}
        full: list[list[Slot]] = []
        for slot in reversed(self.slots):
            each = slot.parameter
            if each.requires_grad or slot.bucket is not None:
                kind = each.dtype, each.device
                members = filling.setdefault(kind, [])
                members.append(slot)
                limit = self.reduction.bucket_bytes
                if sum(each.parameter.nbytes for each in members) >= (limit if full else min(_FIRST_BYTES, limit)):
                    full.append(filling.pop(kind))
        return [_Bucket(slots) for slots in (*full, *filling.values())]

    def remove_hooks(self) -> None:
        """Remove the hooks of the buckets."""
        for bucket in self.buckets:
            bucket.handle.remove()


class Reducer:
    """Hooks on the parameters of one block, from its construction to `close`.

    Args:
        models: the models, and how their gradients are averaged; the gradient of a parameter that
            several have is sent with the first one's.

    Attributes:
        slots: id of a parameter -> its slot, in one order on all ranks.
        models: id of a model -> its buckets.
    """

    def __init__(self, models: Sequence[tuple[nn.Module, Reduction]]) -> None:
        self._size = dist.get_world_size()
        self._lock = threading.Lock()
        self._log: list[Any] = []  # parameters whose gradients have accumulated, in order
        self.slots: dict[int, Slot] = {}
        self.models: dict[int, _Model] = {}
        self._group_by_device_type: dict[str, Any] = {}
        self._is_running = False  # whether a pass is
        self._is_alone = False  # whether no other block is open, which would send at times of its own
        self._hooks = contextlib.ExitStack()
        self.refresh(models)

    def refresh(self, models: Sequence[tuple[nn.Module, Reduction]]) -> None:
        """Hook the present parameters; what was averaged before is compared at the next step."""
        self.close()
        self._is_ordered = any(reduction.is_ordered for _, reduction in models)  # then those of all are
        for model, reduction in models:
            own = []
            sparse = {id(each.weight) for each in model.modules() if has_sparse_gradient(each)}
            for name, each in all_named_parameters(model):
                is_trainable = each.is_floating_point() or each.is_complex()
                if is_trainable and id(each) not in self.slots:
                    slot = Slot(f"{name} of {type(model).__name__}", each, is_sparse=id(each) in sparse)
                    self.slots[id(each)] = slot
                    own.append(slot)
                    self._hooks.callback(_add_hook(each, self._log.append).remove)
            self.models[id(model)] = _Model(own, reduction)
        self._make_groups()

    def _make_groups(self) -> None:
        """Get a group for the parameters on the run's device, and one for those on the CPU, if there are some."""
        run = current()
        for slot in self.slots.values():
            device = slot.parameter.device
            if device.type == run.device.type:
                device = run.device
            if device.type not in self._group_by_device_type:
                self._group_by_device_type[device.type] = separate_group(run.world, device, GroupPurpose.TRAINING)

    def close(self) -> None:
        """Remove the hooks, and the references in cycles: parameters are freed with the last one of the user's."""
        self._log.clear()
        self._noted = 0  # how many of the log are noted in their buckets
        self._hooks.close()
        for entry in self.models.values():
            entry.remove_hooks()
        for slot in self.slots.values():
            slot.model = slot.bucket = None
        self.slots, self.models = {}, {}

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave the gradients of backward passes in the context local, unless they are averaged in order."""
        entry = self.models[id(model)]
        before, entry.is_no_sync = entry.is_no_sync, not entry.reduction.is_ordered
        try:
            yield
        finally:
            entry.is_no_sync = before

    def around_backward(self, each: Pass, run: Run) -> None:
        """Run a backward pass and average its gradients; a subscriber of torch_patches.backward."""
        if self._is_running:  # on another thread, which averages these gradients, too
            run(each)
            return
        self.require_seen()
        self._is_running, self._is_alone = True, len(routed_models()) == len(self.models)
        earlier = self._set_aside() if self._is_ordered else []
        try:
            run(each)
            self._finish()
        except BaseException:
            self._leave_local(self.models.values())
            raise
        finally:
            self._is_running = False
            if earlier:
                _add_to(earlier)

    def _set_aside(self) -> list[tuple[Slot, torch.Tensor]]:
        """Take the gradients of earlier passes, so that this one's are averaged alone, in one order."""
        found = [(slot, slot.parameter.grad) for slot in self.slots.values() if slot.parameter.grad is not None]
        for slot, _ in found:
            slot.parameter.grad = None
        return found

    def require_seen(self) -> None:
        """Refuse gradients of a pass that was not seen.

        Raises:
            ConfigError: some have accumulated since the latest pass that was.
        """
        if self._log:
            self._leave_local(self.models.values())
            raise ConfigError(
                "a backward pass that did not start at loss.backward() or torch.autograd.backward()",
                why="its function was imported before the block, so its gradients are not averaged over the ranks",
                fix="call loss.backward(), or torch.autograd.backward(...) by this name",
            )

    def _finish(self) -> None:
        """Send the other buckets of the models that the pass has reached, and keep the means."""
        if not self._log:
            return
        self._note()
        models = [self.slots[id(each)].model for each in self._log]
        entries = [each for each in self.models.values() if each in models]
        reached = sorted([each for each in entries if not each.is_no_sync], key=lambda each: each is not models[0])
        self._leave_local([each for each in entries if each.is_no_sync])
        for entry in reached:
            for bucket in entry.trained[entry.next :]:
                self._send(entry, bucket)
        buckets = [bucket for entry in reached for bucket in entry.trained]
        for each in [bucket.work for bucket in buckets if isinstance(bucket.work, _TreeSum)]:
            each.add()
        for bucket in buckets:
            _receive(bucket)
        for entry in reached:
            entry.next, entry.holds = 0, False

    def _leave_local(self, entries: Iterable[_Model]) -> None:
        """End the pass in these models: gradients that have accumulated are not averaged."""
        for slot in [self.slots[id(each)] for each in self._log]:
            if slot.model in entries:
                slot.averaged = _NOT_AVERAGED
        self._log.clear()
        self._noted = 0
        for entry in entries:
            entry.next = 0

    def _on_last(self, entry: _Model, _parameter: Any) -> None:
        """Send the buckets that are complete; called after the gradient of a bucket's last parameter."""
        with self._lock:  # autograd has a thread for each device
            self._send_complete(entry)

    def _send_complete(self, entry: _Model) -> None:
        if entry.is_no_sync or not self._is_running:
            return
        self._note()
        # Only of the model that the pass has reached first: others follow, in one order on all ranks.
        is_leader = self._is_alone and self.slots[id(self._log[0])].model is entry
        if entry.holds or not is_leader:
            return
        for each in entry.trained[entry.next :]:
            if each.missing or each.accumulates_twice or self._has_later_hook(each):
                break
            self._send(entry, each)
            entry.next += 1

    def _has_later_hook(self, bucket: _Bucket) -> bool:
        """Whether a hook of the user's may still change the gradient of the last parameter."""
        latest = next(reversed(bucket.slots[-1].parameter._post_accumulate_grad_hooks.values()))
        return bool(getattr(latest, "func", None) != self._on_last)

    def _note(self) -> None:
        """Note in their buckets which gradients have accumulated."""
        if not self._noted:
            for entry in self.models.values():
                if not entry.is_no_sync:
                    entry.begin(self._on_last)
        for each in self._log[self._noted :]:
            slot = self.slots[id(each)]
            bucket = slot.bucket
            # Frozen since the forward, it has accumulated nothing.
            if bucket is None or slot.model.is_no_sync or not slot.parameter.requires_grad:
                continue
            if slot in bucket.missing:
                bucket.missing.remove(slot)
                continue
            bucket.accumulates_twice = True
            if bucket.work is not None:
                raise SyncError(
                    f"the gradient of {slot.name} accumulated after it was sent",
                    why="in earlier passes it accumulated once, so that it was sent as complete",
                    fix="use torch.utils.checkpoint with use_reentrant=False, or from the first pass on",
                )
        self._noted = len(self._log)

    @torch.no_grad()
    def _send(self, entry: _Model, bucket: _Bucket) -> None:
        gradients = list(map(_grad, bucket.members))
        present = tuple([each is not None for each in gradients])
        bucket.is_plain = not [each for each in gradients if each is None or each.is_sparse]
        if not bucket.is_plain:
            pairs = zip(gradients, bucket.members, strict=True)
            gradients = [torch.zeros_like(each) if found is None else found.to_dense() for found, each in pairs]
        bucket.sent = gradients
        flat = _flatten([*gradients, _flags(present, gradients[0].dtype, gradients[0].device)])
        dtype = entry.reduction.dtype
        bucket.flat = flat if dtype is None or flat.is_complex() else flat.to(dtype)
        group = self._group_by_device_type[flat.device.type]
        if entry.reduction.is_ordered and self._size > 2:  # two numbers have one sum
            bucket.work = _TreeSum(bucket.flat, self._size, group)
            return
        bucket.flat.mul_(1.0 / self._size)
        bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)


class _TreeSum:
    """The mean of the ranks' flat tensors, added by pairs of ranks: each rank adds a piece of all, and sends it."""

    def __init__(self, flat: torch.Tensor, size: int, group: Any) -> None:
        self._flat, self._size, self._group = flat, size, group
        self._padded = nn.functional.pad(flat, (0, -len(flat) % size))
        self._pieces = torch.empty_like(self._padded)
        self._work: Any = dist.all_to_all_single(self._pieces, self._padded, group=group, async_op=True)

    def add(self) -> None:
        """Add the pieces, and send the mean to all ranks."""
        self._work.wait()
        rows = list(self._pieces.view(self._size, -1))
        while len(rows) > 1:
            rows = [sum(rows[index + 1 : index + 2], rows[index]) for index in range(0, len(rows), 2)]
        mean = rows[0] / self._size
        self._work = dist.all_gather(list(self._padded.chunk(self._size)), mean, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait for the mean."""
        self._work.wait()
        self._flat.copy_(self._padded[: len(self._flat)])


@torch.no_grad()
def _add_to(earlier: list[tuple[Slot, torch.Tensor]]) -> None:
    for slot, gradient in earlier:
        parameter = slot.parameter
        if parameter.grad is not None:
            is_averaged = slot.averaged() is parameter.grad
            gradient.add_(parameter.grad)
            slot.averaged = ref(gradient) if is_averaged else _NOT_AVERAGED
        parameter.grad = gradient


@torch.no_grad()
def _receive(bucket: _Bucket) -> None:
    """Copy the means to `.grad`; give one to a parameter without, if another rank has used it."""
    bucket.work.wait()
    torch._foreach_copy_(bucket.sent, _unflatten(bucket.flat, bucket.sent))
    if not bucket.is_plain:
        flags = bucket.flat[-len(bucket.members) :].abs().tolist()  # waits for the device
        for slot, mean, flag in zip(bucket.trained, bucket.sent, flags, strict=True):
            gradient = slot.parameter.grad
            if flag and (gradient is None or gradient.is_sparse):
                is_sparse = slot.is_sparse or gradient is not None
                slot.parameter.grad = mean.to_sparse(1) if is_sparse else mean
    for slot, gradient in zip(bucket.trained, map(_grad, bucket.members), strict=True):
        slot.averaged = _NOT_AVERAGED if gradient is None else ref(gradient)
    bucket.end()


@functools.lru_cache(maxsize=64)  # a copy to a device would wait for it
def _flags(present: tuple[bool, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(present, dtype=dtype, device=device)


def _add_hook(parameter: Any, hook: Callable[[Any], None]) -> Any:
    is_trained, parameter.requires_grad = parameter.requires_grad, True  # else torch refuses the hook
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad = is_trained
    return handle
