"""Slots and buckets: a parameter with its gradient, and gradients that are sent together."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import _utils as torch_utils

from parallelize.errors import SyncError
from parallelize.gradients.host_copy import HostCopy
from parallelize.gradients.mean_over_ranks import OrderedMean, PendingMean

if TYPE_CHECKING:
    from parallelize.gradients.model_buckets import ModelBuckets


_FIRST_BYTES = 2**20
"""Size of the first bucket, which is sent early for being small, as DistributedDataParallel's."""

_grad = attrgetter("grad")
_is_sparse = attrgetter("is_sparse")
_flatten: Any = torch_utils._flatten_dense_tensors
_unflatten: Any = torch_utils._unflatten_dense_tensors


class Usage(enum.IntEnum):
    """Which ranks have had a gradient of a parameter, in the pass from which a model has learned.

    Parameters of different usage are in different buckets, in this order: one without a gradient
    holds back only the buckets after its own.
    """

    EVERYWHERE = 0
    """All ranks, once in the pass."""

    SOMEWHERE = 1
    """Some ranks, or twice in the pass."""

    NOWHERE = 2
    """No rank."""


class Place(NamedTuple):
    """Where a gradient is sent among those of its model; lower ones are sent earlier."""

    usage: Usage
    position: int


class Slot:
    """A parameter of a model, and what is known of its gradient.

    Args:
        name: of the parameter, for errors.
        parameter: the parameter.
        is_sparse: whether the gradient is sparse, on a rank that has none of its own.
        place: its place in the order of the model.

    Attributes:
        averaged: the gradient that the ranks have averaged; None: what `.grad` has is of this rank.
        repeats: whether the gradient accumulates twice in a pass on this rank.
        model: the buckets of the model that has the parameter; None: the block has ended, or the
            slots are made anew.
        bucket: the bucket that sends the gradient; None: the parameter was never trained.
    """

    def __init__(self, name: str, parameter: Any, *, is_sparse: bool, place: Place) -> None:
        self.name = name
        self.parameter = parameter
        self.is_sparse = is_sparse
        self.place = place
        self.averaged: ref[torch.Tensor] | None = None
        self.repeats = False
        self.model: ModelBuckets | None = None
        self.bucket: Bucket | None = None


class BucketState(enum.Enum):
    """What a bucket does in a pass.

    Each arrow is a method of `Bucket`:

    EMPTY ── begin ──> FILLING ── arrive: the last ──> COMPLETE ── send ──> SENT
      ^                 ^   │  ^                         │                   ^ │
      │                 │   │  └────── arrive: again ────┘                   │ │
      │               begin └──────── send, at the end of the pass ──────────┘ │
      │                 │                                                      │
      │                 └────────────── RECEIVED <── receive ──────────────────┘
      └── empty: from each state, if the pass has failed
    """

    EMPTY = enum.auto()
    """No gradient is expected: no parameter is trained, or there was no pass."""

    FILLING = enum.auto()
    """Gradients are missing, or may accumulate again."""

    COMPLETE = enum.auto()
    """All gradients have accumulated, and are sent when it is the bucket's turn."""

    SENT = enum.auto()
    """A copy of the gradients is averaged over the ranks."""

    RECEIVED = enum.auto()
    """`.grad` of the parameters are the means, and the copy is dropped."""


class Bucket:
    """Parameters whose gradients are sent together.

    Args:
        slots: those of the parameters, in the order in which their gradients are expected.

    Its methods run without autograd: under create_graph=True it would record what they do.

    Attributes:
        device_type: the type of the device that all parameters are on.
        state: what the bucket does in the running pass.
        trained: the slots of the parameters that are trained in the running pass.
        missing: the slots of those whose gradient has not accumulated yet.
        repeats: whether a gradient accumulates twice in a pass, as under a reentrant checkpoint:
            that all have accumulated is known at the end of the pass only.
        lacks_gradients: whether this rank has sent zeros for a parameter without a gradient.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self.device_type: str = slots[0].parameter.device.type
        self.state = BucketState.EMPTY
        self.trained: list[Slot] = []
        self.missing: set[Slot] = set()
        self.repeats = any(slot.repeats for slot in slots)
        self.lacks_gradients = False
        self._is_dense = True
        self._gradients: list[Any] = []
        self._flat: torch.Tensor | None = None
        self._mean: PendingMean | None = None
        self._on_last: Callable[[Any], None] | None = None
        self._handle: Any = None
        for slot in slots:
            slot.bucket = self

    def add_hook(self, on_last: Callable[[Any], None]) -> None:
        """Call a function when the gradient that is expected last has accumulated."""
        self._on_last = on_last
        self._handle = add_hook(self.slots[-1].parameter, on_last)

    def remove_hook(self) -> None:
        """Remove the hook, if there is one."""
        if self._handle is not None:
            self._handle.remove()

    def has_later_hook(self) -> bool:
        """Whether a hook of the user's may change the last gradient after the bucket's hook."""
        hooks = self.slots[-1].parameter._post_accumulate_grad_hooks
        return next(reversed(hooks.values())) is not self._on_last

    def begin(self) -> None:
        """Expect the gradients of the parameters that are trained now."""
        self.trained = [slot for slot in self.slots if slot.parameter.requires_grad]
        self.missing = set(self.trained)
        self.state = BucketState.EMPTY
        if self.trained:
            self.state = BucketState.FILLING

    def arrive(self, slots: list[Slot]) -> None:
        """Note that the gradients of some of the parameters have accumulated.

        Raises:
            SyncError: one of them has been sent.
        """
        expected = len(self.missing) - len(slots)
        self.missing.difference_update(slots)
        if len(self.missing) > expected:
            self._arrive_again(slots, len(self.missing) - expected)
        if self.state is BucketState.FILLING and not self.missing and not self.repeats:
            self.state = BucketState.COMPLETE

    def _arrive_again(self, slots: list[Slot], surplus: int) -> None:
        """Note that more gradients have arrived than were missing.

        Args:
            slots: the slots of all that have arrived.
            surplus: the number of those that were not missing.
        """
        # The hook of a parameter that was frozen after the forward runs, and nothing accumulates.
        accumulated = [slot for slot in slots if slot.parameter.requires_grad]
        if len(slots) - len(accumulated) >= surplus:
            return
        if self.state in (BucketState.SENT, BucketState.RECEIVED):
            raise SyncError(
                f"the gradient of {accumulated[0].name} accumulated after it was sent",
                why="in earlier passes it accumulated once, so that it was sent as complete",
                fix="use torch.utils.checkpoint with use_reentrant=False, or from the first pass "
                "on",
            )
        self.repeats = True
        if self.state is BucketState.COMPLETE:
            self.state = BucketState.FILLING

    def send(self, start: Callable[[torch.Tensor], PendingMean], dtype: torch.dtype | None) -> None:
        """Copy the gradients to a flat tensor, and begin to average it.

            flat     [ gradient | gradient | ... | flag | flag | ... ]

        A flag for each parameter is 1 if this rank has a gradient; if not, zeros are sent. Sparse
        gradients are sent as dense ones, which every process group can average.

        Args:
            start: begins to replace the values of a tensor by their means over the ranks.
            dtype: in which real numbers are sent; None: in their own.
        """
        parameters = [slot.parameter for slot in self.trained]
        gradients = list(map(_grad, parameters))
        has_gradient = tuple([gradient is not None for gradient in gradients])
        self.lacks_gradients = not all(has_gradient)
        self._is_dense = not self.lacks_gradients and not any(map(_is_sparse, gradients))
        if not self._is_dense:
            gradients = list(map(_dense, parameters, gradients))
        flags = _flags(has_gradient, gradients[0].dtype, gradients[0].device)
        self._flat = _gathered([*gradients, flags], dtype)
        self._gradients = gradients
        self._mean = start(self._flat)
        self.state = BucketState.SENT

    def add_pieces(self) -> None:
        """Go on with a mean of two collectives; all ranks must call this in one order."""
        if isinstance(self._mean, OrderedMean):
            self._mean.add()

    def can_be_received(self) -> bool:
        """Whether `receive` would neither wait nor need flags of other ranks; does not wait."""
        assert self._mean is not None
        return not self.lacks_gradients and self._mean.is_completed()

    def flags(self) -> torch.Tensor:
        """Wait for the means, and return those of the flags: 0 where no rank has a gradient."""
        assert self._mean is not None
        assert self._flat is not None
        self._mean.wait()
        return self._flat[-len(self.trained) :]

    def receive(self, is_used: Sequence[bool] = ()) -> None:
        """Wait for the means, copy them to `.grad`, and drop the flat tensor.

        Args:
            is_used: whether any rank has a gradient of a parameter, for all that are trained. Only
                a rank that lacks gradients needs it.
        """
        assert self._mean is not None
        assert self._flat is not None
        self._mean.wait()
        if self._flat.device.type != "cpu":
            # The allocator would give its memory to the next work of the stream on which it was
            # allocated, that of the last gradient, while the current stream still reads it.
            self._flat.record_stream(torch.accelerator.current_stream(self._flat.device))
        torch._foreach_copy_(self._gradients, _unflatten(self._flat, self._gradients))
        if self._is_dense:
            for slot, mean in zip(self.trained, self._gradients, strict=True):
                slot.averaged = ref(mean)
        else:
            self._set_gradients(is_used or [True] * len(self.trained))
        self.empty()
        self.state = BucketState.RECEIVED

    def _set_gradients(self, is_used: Sequence[bool]) -> None:
        """Set `.grad` to the means where it is not the tensor into which they were copied.

            `.grad` of this rank   some rank has a gradient     no rank has a gradient
            None                   the mean                     stays None
            sparse                 the mean, as a sparse tensor
            dense                  is the mean already

        A parameter that no rank has used keeps `grad=None`, as in one process: with zeros, an
        optimizer would decay its weight.

        Args:
            is_used: as for `receive`.
        """
        for slot, mean, is_needed in zip(self.trained, self._gradients, is_used, strict=True):
            parameter = slot.parameter
            is_missing = parameter.grad is None
            # A rank without a gradient cannot see whether those of other ranks are sparse.
            is_sparse = slot.is_sparse if is_missing else parameter.grad.is_sparse
            if is_sparse and is_needed:
                parameter.grad = mean.to_sparse(1)
            elif is_missing and is_needed:
                parameter.grad = mean
            if parameter.grad is not None:
                slot.averaged = ref(parameter.grad)

    def empty(self) -> None:
        """Drop the flat tensor, and expect no gradient."""
        self._gradients = []
        self._flat = None
        self._mean = None
        self.state = BucketState.EMPTY


def add_hook(parameter: Any, hook: Callable[[Any], Any]) -> Any:
    """Add a hook that runs when the gradient of a parameter has accumulated; return its handle."""
    is_trained = parameter.requires_grad
    parameter.requires_grad = True  # torch refuses a hook on a frozen parameter
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad = is_trained
    return handle


def divide(slots: Iterable[Slot], bucket_bytes: float) -> list[Bucket]:
    """Divide the slots of a model into buckets, by their places.

    The parameters of a bucket have one dtype and device, and have been used by the same ranks. The
    bucket whose last gradient is expected first comes first.
    """
    filling: dict[Any, list[Slot]] = {}
    bytes_of_filling: dict[Any, int] = {}
    full: list[list[Slot]] = []
    limit = min(_FIRST_BYTES, bucket_bytes)
    for slot in sorted(slots, key=_place):
        parameter = slot.parameter
        key = parameter.dtype, parameter.device, slot.place.usage
        filling.setdefault(key, []).append(slot)
        bytes_of_filling[key] = bytes_of_filling.get(key, 0) + parameter.nbytes
        if bytes_of_filling[key] >= limit:
            full.append(filling.pop(key))
            del bytes_of_filling[key]
            limit = bucket_bytes
    slots_of_buckets = sorted([*full, *filling.values()], key=_last_place)
    return list(map(Bucket, slots_of_buckets))


def read_flags(buckets: Sequence[Bucket]) -> list[list[bool]]:
    """Return for each bucket whether any rank has used each of its trained parameters.

    The flags of all buckets are copied to the host together, so that it waits for a device once.
    """
    flags_by_device: dict[torch.device, list[torch.Tensor]] = {}
    for bucket in buckets:
        flags = bucket.flags()
        flags_by_device.setdefault(flags.device, []).append(flags.abs().float())
    copies = {}
    for device, flags_of_device in flags_by_device.items():
        copies[device] = HostCopy(torch.cat(flags_of_device))
    values_by_device = {}
    for device, copied in copies.items():
        values_by_device[device] = iter((copied.read() > 0).tolist())
    is_used = []
    for bucket in buckets:
        values = values_by_device[bucket.flags().device]
        is_used.append(list(itertools.islice(values, len(bucket.trained))))
    return is_used


def _place(slot: Slot) -> Place:
    return slot.place


def _last_place(slots: list[Slot]) -> Place:
    return slots[-1].place


def _dense(parameter: Any, gradient: Any) -> torch.Tensor:
    """Return a gradient as a dense tensor; zeros if there is none."""
    if gradient is None:
        return torch.zeros_like(parameter)
    dense: torch.Tensor = gradient.to_dense()
    return dense


def _gathered(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> torch.Tensor:
    """Return a flat copy of tensors, one after another.

    The copy and the conversion are one kernel on a GPU. To flatten first, and to convert the flat
    copy then, would be two.

    Args:
        tensors: are of one dtype, on one device.
        dtype: of the copy, if the tensors are real; complex ones keep their dtype. None: all do.
    """
    source_dtype, device = tensors[0].dtype, tensors[0].device
    keeps_dtype = dtype is None or source_dtype.is_complex or dtype == source_dtype
    if keeps_dtype:
        flat: torch.Tensor = _flatten(tensors)
        return flat
    size = sum([tensor.numel() for tensor in tensors])
    converted = torch.empty(size, dtype=dtype, device=device)
    torch._foreach_copy_(_unflatten(converted, tensors), tensors)
    return converted


@functools.lru_cache(maxsize=64)
def _flags(
    has_gradient: tuple[bool, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the flags of a bucket on its device. They are kept: a copy to a GPU waits for it."""
    return torch.tensor(has_gradient, dtype=dtype, device=device)
