"""Averages gradients over the ranks while backward runs, whichever call has produced them.

    a gradient accumulates     its parameter is noted, by a hook that runs no Python code
    that of a bucket's last    buckets that are complete are copied to flat tensors and all-reduced
    the pass has ended         the other buckets are sent, and the means are copied to `.grad`

What is averaged is `.grad` itself. The part from earlier passes is equal on all ranks and stays as
it is: mean(old + new) = old + mean(new). What was accumulated under `no_sync` is averaged by the
next pass outside of it.

A flat tensor ends with flags: whether this rank has a gradient of each parameter; in the last bucket
of a model also a number that tells the model and the parity of the block's optimizer steps. A
parameter that no rank has used keeps `grad=None`; a rank reads the flags only where it lacks a
gradient. A pass that reaches a parameter of a model sends all buckets of that model, in one order on
all ranks, through a group of their own: a rank may send a bucket before a collective of the user's
backward, and another rank after it.

Source: Megatron-LM's DistributedDataParallel, https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import _utils as torch_utils
from torch import nn

from parallelize.errors import SyncError
from parallelize.plugins.base import Reduction
from parallelize.runtime.autograd_graph import has_sparse_gradient
from parallelize.runtime.context import current, is_capturing
from parallelize.runtime.host_copy import HostCopy
from parallelize.runtime.process_group import separate_group
from parallelize.torch_patches.backward import Pass, Run
from parallelize.torch_patches.forward import routed_models

__all__ = ["Reducer", "Slot"]

_MAX_LAYOUTS = 8  # of a model: random freezing would make ever new ones
_FIRST_BYTES = 2**20  # a small first bucket is sent early, as DistributedDataParallel's
_grad = attrgetter("grad")
_flatten: Any = torch_utils._flatten_dense_tensors
_unflatten: Any = torch_utils._unflatten_dense_tensors
_NOT_AVERAGED: Any = type(None)  # as a reference to nothing, its call returns None


class Slot:
    """A parameter, its name, and a reference to the gradient that was averaged."""

    def __init__(self, name: str, parameter: Any) -> None:
        self.name, self.parameter = name, parameter
        self.averaged = _NOT_AVERAGED
        self.model: Any = None
        self.bucket: Any = None


class _Bucket:
    """Parameters whose gradients are sent together; has the methods of torch's GradBucket."""

    is_end = False
    has_all = True  # whether this rank has a gradient of each parameter
    handle: Any = None  # of the hook on the last parameter
    accumulates_twice = False  # in one pass, as under a reentrant checkpoint: never sent early

    def __init__(self, number: int, slots: list[Slot], *, is_sparse: bool) -> None:
        self.number, self.slots, self.is_sparse = number, slots, is_sparse
        self.members = [each.parameter for each in slots]
        self.begin()

    def begin(self) -> None:
        """Forget the latest pass."""
        self.missing = set(self.slots)
        self.sent: list[Any] = []  # the gradients, or zeros
        self.flat: Any = None
        self.work: Any = None

    def index(self) -> int:
        """Return its number."""
        return self.number

    def parameters(self) -> list[Any]:
        """Return its parameters."""
        return self.members

    def is_last(self) -> bool:
        """Whether it is the last one of a pass."""
        return self.is_end

    def buffer(self) -> Any:
        """Return the flat gradients."""
        return self.flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the flat gradients."""
        self.flat = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the flat gradients."""
        return list(_unflatten(self.flat, self.sent))


class _Model:
    """The buckets of one model: a layout for each set of parameters that are trained."""

    def __init__(self, model: nn.Module, slots: list[Slot], reduction: Reduction, number: int) -> None:
        self.name, self.slots, self.reduction = type(model).__name__, slots, reduction
        self.number = number
        self.sparse = {id(each.weight) for each in model.modules() if has_sparse_gradient(each)}
        self.layouts: dict[tuple[bool, ...], list[_Bucket]] = {}
        self.trained: tuple[bool, ...] = ()
        self.buckets: list[_Bucket] = []
        self.next = 0  # number of the bucket to send
        self.holds = True  # the first pass of a layout sends nothing early: it learns what accumulates twice
        self.is_reached = self.is_no_sync = False
        self.told: tuple[float, HostCopy] | None = None  # place of this rank, and the mean
        for each in slots:
            each.model = self

    def forget_layouts(self) -> None:
        """Remove the hooks of all layouts."""
        for bucket in itertools.chain.from_iterable(self.layouts.values()):
            bucket.handle.remove()
        self.layouts.clear()


class Reducer:
    """Hooks on the parameters of one block, from its construction to `close`.

    Args:
        models: the models, and how their gradients are averaged; the gradient of a parameter that
            several have is sent with the first one's.

    Attributes:
        slots: id of a parameter -> its slot, in one order on all ranks.
        models: id of a model -> its buckets.
        steps: number of optimizer steps in the block.
        before_unpatched: called before a pass is averaged that torch_patches has not seen.
        is_seen: whether the running pass began at torch.autograd.backward.
    """

    def __init__(self, models: Sequence[tuple[nn.Module, Reduction]], *, before_unpatched: Callable[[], None]) -> None:
        self._size = dist.get_world_size()
        self._log: list[Any] = []  # parameters whose gradients have accumulated, in order
        self._numbers = itertools.count()  # of buckets: hooks keep state by number
        self.slots: dict[int, Slot] = {}
        self.models: dict[int, _Model] = {}
        run = current()
        self._new_group = functools.partial(separate_group, run.world, run.device)
        self._group = self._new_group() if models else None
        self.is_seen = False
        self._is_alone = False  # whether no other block is open, which would send at times of its own
        self._hooks = contextlib.ExitStack()
        self.before_unpatched, self.steps = before_unpatched, 0
        self.refresh(models)

    def refresh(self, models: Sequence[tuple[nn.Module, Reduction]]) -> None:
        """Hook the present parameters; what was averaged before is compared at the next step."""
        self.close()
        for model, reduction in models:
            own = []
            for name, each in model.named_parameters():
                is_trainable = each.is_floating_point() or each.is_complex()
                if is_trainable and id(each) not in self.slots:
                    slot = Slot(f"{name} of {type(model).__name__}", each)
                    self.slots[id(each)] = slot
                    own.append(slot)
                    self._hooks.callback(_add_hook(each, self._log.append).remove)
            self.models[id(model)] = _Model(model, own, reduction, len(self.models))

    def close(self) -> None:
        """Remove the hooks, and the references in cycles: parameters are freed with the last one of the user's."""
        self._log.clear()
        self._noted = 0  # how many of the log are noted in their buckets
        self._hooks.close()
        for entry in self.models.values():
            entry.forget_layouts()
        for slot in self.slots.values():
            slot.model = slot.bucket = None
        self.slots, self.models = {}, {}

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave the gradients of backward passes in the context local."""
        entry = self.models[id(model)]
        before, entry.is_no_sync = entry.is_no_sync, True
        try:
            yield
        finally:
            entry.is_no_sync = before

    def around_backward(self, each: Pass, run: Run) -> None:
        """Run a backward pass and average its gradients; a subscriber of torch_patches.backward."""
        if self.is_seen:  # on another thread, which averages these gradients, too
            run(each)
            return
        self.finish_unpatched()
        with self._ending():
            run(each)

    def finish_unpatched(self) -> None:
        """End a pass that has not begun at torch.autograd.backward, if there is one."""
        if self._log:
            with self._ending():
                self.before_unpatched()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """End a pass after the context; forget it if the context raises."""
        self.is_seen, self._is_alone = True, len(routed_models()) == len(self.models)
        try:
            yield
        except BaseException:
            self._leave_local(self.models.values())
            raise
        finally:
            self.is_seen = False
        self._finish()

    def _finish(self) -> None:
        """Send the other buckets of the models that the pass has reached, and keep the means."""
        if not self._log:
            return
        self._note()
        leader = self.slots[id(self._log[0])].model
        entries = [each for each in self.models.values() if each.is_reached]
        reached = sorted([each for each in entries if not each.is_no_sync], key=lambda each: each is not leader)
        self._leave_local([each for each in entries if each.is_no_sync])
        for entry in reached:
            for bucket in entry.buckets[entry.next :]:
                self._send(entry, bucket)
        for entry in reached:
            self._compare_steps(entry)  # of the pass before: a device has answered by now
            self._receive(entry)
            entry.next, entry.holds, entry.is_reached = 0, False, False
        for entry in reached:
            if entry.told is not None and entry.told[1].event is None:
                self._compare_steps(entry)

    def _leave_local(self, entries: Collection[_Model]) -> None:
        """End the pass in these models: gradients that have accumulated are not averaged."""
        for slot in [self.slots[id(each)] for each in self._log]:
            if slot.model in entries:
                slot.averaged = _NOT_AVERAGED
        self._log.clear()
        self._noted = 0
        for entry in entries:
            entry.next, entry.is_reached = 0, False
            for bucket in entry.buckets:
                bucket.begin()

    def _on_last(self, entry: _Model, buckets: list[_Bucket], _parameter: Any) -> None:
        """Send the buckets that are complete; called after the gradient of a bucket's last parameter."""
        if entry.holds or entry.is_no_sync:
            return
        self._note()
        # Only of the model that the pass has reached first: others follow, in one order on all ranks.
        is_leader = self._is_alone and self.slots[id(self._log[0])].model is entry
        if entry.buckets is not buckets or not is_leader:
            return
        for bucket in buckets[entry.next :]:
            if bucket.missing or bucket.accumulates_twice or self._has_later_hook(bucket):
                break
            self._send(entry, bucket)
            entry.next += 1

    def _has_later_hook(self, bucket: _Bucket) -> bool:
        """Whether a hook of the user's may still change the gradient of the last parameter."""
        latest = next(reversed(bucket.members[-1]._post_accumulate_grad_hooks.values()))
        return bool(getattr(latest, "func", None) != self._on_last)

    def _note(self) -> None:
        """Note in their buckets which gradients have accumulated."""
        if not self._noted:
            for entry in self.models.values():
                self._arrange(entry)
        for each in self._log[self._noted :]:
            slot = self.slots[id(each)]
            bucket = slot.bucket
            if bucket is None:  # frozen since the forward: it has accumulated nothing
                continue
            slot.model.is_reached = True
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

    def _arrange(self, entry: _Model) -> None:
        """Choose the layout of the parameters that are trained now."""
        trained = tuple([each.parameter.requires_grad for each in entry.slots])
        if trained == entry.trained:
            return
        entry.trained = trained
        if trained not in entry.layouts:
            if len(entry.layouts) == _MAX_LAYOUTS:
                entry.forget_layouts()
            entry.layouts[trained] = self._layout(entry)
            entry.holds = True
        entry.buckets = entry.layouts[trained]
        for slot in entry.slots:
            slot.bucket = None
        for bucket in entry.buckets:
            bucket.begin()
            for slot in bucket.slots:
                slot.bucket = bucket

    def _layout(self, entry: _Model) -> list[_Bucket]:
        filling: dict[Any, list[Slot]] = {}
        full: list[list[Slot]] = []
        for slot in reversed(entry.slots):
            each = slot.parameter
            if each.requires_grad:
                kind = id(each) if id(each) in entry.sparse else (each.dtype, each.device)
                members = filling.setdefault(kind, [])
                members.append(slot)
                limit = entry.reduction.bucket_bytes if full else min(_FIRST_BYTES, entry.reduction.bucket_bytes)
                if sum(each.parameter.nbytes for each in members) >= limit:
                    full.append(filling.pop(kind))
        buckets = [
            _Bucket(next(self._numbers), slots, is_sparse=id(slots[0].parameter) in entry.sparse)
            for slots in [*full, *filling.values()]
        ]
        for bucket in buckets:
            bucket.is_end = bucket is buckets[-1]
            bucket.handle = _add_hook(bucket.members[-1], functools.partial(self._on_last, entry, buckets))
        return buckets

    @torch.no_grad()
    def _send(self, entry: _Model, bucket: _Bucket) -> None:
        gradients = list(map(_grad, bucket.members))
        present = tuple([each is not None for each in gradients])
        if bucket.is_sparse:
            gradient = gradients[0] if present[0] else torch.zeros_like(bucket.members[0])
            rows = gradient if gradient.is_sparse else gradient.to_sparse(1)
            bucket.flat = rows.coalesce() / self._size
            bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
            return
        bucket.has_all = all(present)
        if not bucket.has_all:
            pairs = zip(gradients, bucket.members, strict=True)
            gradients = [torch.zeros_like(each) if found is None else found for found, each in pairs]
        bucket.sent = gradients
        if entry.reduction.hook is not None:
            bucket.flat = torch.cat([each.reshape(-1) for each in gradients])
            bucket.work = entry.reduction.hook(bucket)
            return
        flags = (*present, self._place(entry)) if bucket.is_end else present
        flat = _flatten([*gradients, _tail(flags, gradients[0].dtype, gradients[0].device)])
        dtype = entry.reduction.dtype
        bucket.flat = flat if dtype is None or flat.is_complex() else flat.to(dtype)
        bucket.flat.mul_(1.0 / self._size)
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    @torch.no_grad()
    def _receive(self, entry: _Model) -> None:
        used = self._used(entry) if entry.reduction.hook is not None else None
        for bucket in entry.buckets:
            result = bucket.work.wait()
            if bucket.is_sparse:
                parameter, mean = bucket.members[0], bucket.flat
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    mean = mean.to_dense()  # e.g. of a weight that another module uses, too
                if parameter.grad is not None or bucket.flat._nnz():
                    parameter.grad = mean
            else:
                if used is not None:  # the result of a communication hook
                    bucket.flat = result[0] if isinstance(result, (list, tuple)) else result
                elif bucket.is_end and bucket.flat.dtype.itemsize >= 4 and not is_capturing():
                    entry.told = self._place(entry), HostCopy(bucket.flat[-1:].real)
                _keep(bucket, used)
            for slot, gradient in zip(bucket.slots, map(_grad, bucket.members), strict=True):
                slot.averaged = _NOT_AVERAGED if gradient is None else ref(gradient)
            bucket.begin()

    def _used(self, entry: _Model) -> set[int]:
        """Return ids of the parameters that a rank has used: a hook sends gradients without flags."""
        members = [each.parameter for each in entry.slots]
        present = [float(each.grad is not None) for each in members]
        flags = torch.tensor([*present, self._place(entry)], device="cpu") / self._size
        dist.all_reduce(flags, group=self._new_group(backend="gloo"))
        entry.told = self._place(entry), HostCopy(flags[-1:])
        return {id(each) for each, flag in zip(members, flags.tolist(), strict=False) if flag}

    def _place(self, entry: _Model) -> float:
        """Return what other ranks have alike: twice the number of the model, and the parity of the block's steps."""
        return float(2 * entry.number + (self.steps & 1))

    def _compare_steps(self, entry: _Model) -> None:
        if entry.told is None or is_capturing():
            return
        (place, mean), entry.told = entry.told, None
        if abs(float(mean.read()) - place) > 0.5 / self._size:
            raise SyncError(
                f"ranks have made different optimizer steps or backward passes, of {entry.name} or with it",
                why="a rank has skipped a step, made a backward pass of its own, or one of another model, so "
                "that gradients of different batches were averaged",
                fix="make the same backward passes and steps on every rank; decide by a number that is "
                "equal on all of them: parallelize.all_reduce(loss.detach(), 'mean')",
            )


def _keep(bucket: _Bucket, used: set[int] | None) -> None:
    """Copy the means to `.grad`; give one to a parameter without, if another rank has used it."""
    torch._foreach_copy_(bucket.sent, _unflatten(bucket.flat, bucket.sent))
    if bucket.has_all:
        return
    if used is None:
        start = sum(each.numel() for each in bucket.sent)
        flags = bucket.flat[start : start + len(bucket.members)].abs().tolist()  # waits for the device
        used = {id(each) for each, flag in zip(bucket.members, flags, strict=True) if flag}
    for parameter, mean in zip(bucket.members, bucket.sent, strict=True):
        if parameter.grad is None and id(parameter) in used:
            parameter.grad = mean


@functools.lru_cache(maxsize=64)  # a copy to a device would wait for it
def _tail(flags: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(flags, dtype=dtype, device=device)


def _add_hook(parameter: Any, hook: Callable[[Any], None]) -> Any:
    is_trained, parameter.requires_grad = parameter.requires_grad, True  # else torch refuses the hook
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad = is_trained
    return handle
