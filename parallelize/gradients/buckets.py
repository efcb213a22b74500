"""Slots and buckets: a parameter with its gradient, and gradients that are sent together.

The terms and the protocol of a pass are at the top of `reducer.py`.
"""

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
from parallelize.torch_patches.module_tensors import is_dtensor, local_part

if TYPE_CHECKING:
    from parallelize.gradients.model_buckets import ModelBuckets


_FIRST_BYTES = 2**20
"""Size at which the first bucket is full, as in DistributedDataParallel.

It is small, so that sending begins early in backward.
"""

_grad = attrgetter("grad")
_is_sparse = attrgetter("is_sparse")
_flatten: Any = torch_utils._flatten_dense_tensors
_unflatten: Any = torch_utils._unflatten_dense_tensors


class Usage(enum.IntEnum):
    """Which ranks have had a gradient of a parameter in the pass from which a model has learned.

    Parameters of different usage are in different buckets, which are sent in the order below. A
    parameter without a gradient holds back its bucket and all later ones. So the parameters that
    always have gradients are in the first buckets.
    """

    EVERYWHERE = 0
    """All ranks, and the gradient has accumulated once in the pass."""

    SOMEWHERE = 1
    """Some ranks, or the gradient has accumulated twice in the pass on some rank."""

    NOWHERE = 2
    """No rank."""


class Place(NamedTuple):
    """The place of a parameter among the parameters of its model; lower places are sent first."""

    usage: Usage
    position: int


class Slot:
    """A parameter of a model, and what is known of its gradient.

    Args:
        name: name of the parameter and its model, for errors.
        parameter: the parameter.
        is_sparse: whether its module makes sparse gradients. A rank without a gradient needs this
            to make `.grad` as sparse as on the other ranks.
        place: its place in the order of the model.

    Attributes:
        averaged: weak reference to the tensor that the ranks have averaged. `.grad` is averaged as
            long as it is this tensor. None: `.grad` is the gradient of this rank.
        repeats: whether the gradient has accumulated twice in a pass on this rank.
        model: the buckets of the model that has the parameter; None: the reducer is closed, or has
            made new slots.
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

    Each arrow is a method of `Bucket`. `begin` leaves a bucket EMPTY if none of its parameters is
    trained:

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
    """Gradients are missing, or may accumulate again (`Bucket.repeats`)."""

    COMPLETE = enum.auto()
    """All gradients have accumulated. The bucket is sent when all earlier ones have been."""

    SENT = enum.auto()
    """A copy of the gradients is being averaged over the ranks."""

    RECEIVED = enum.auto()
    """`.grad` of the parameters have the means, and the copy is dropped."""


class Bucket:
    """Parameters whose gradients are sent together.

    The reducer calls the methods under no_grad. Otherwise, autograd would record their copies in
    the graph of a pass with create_graph=True.

    Args:
        slots: the slots of the parameters, in the order in which gradients are expected.

    Attributes:
        device_type: the type of the device that all parameters are on.
        state: what the bucket does in the running pass.
        trained: the slots of the parameters that are trained in the running pass.
        missing: the slots in `trained` whose gradients have not accumulated yet in the pass.
        repeats: whether a gradient accumulates twice in a pass, as under a reentrant checkpoint.
            The bucket is then never COMPLETE: that no more accumulates is known only at the end of
            the pass.
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
        # Whether `_gradients` are the tensors of `.grad`, so that copying the means into them is
        # enough. They are not where a gradient is sparse or missing.
        self._is_dense = True
        # A model that is tensor parallel already has DTensors. The order of a bucket's gradients is
        # the same on the ranks that hold one model, because they run one program.
        self._has_parts = any(is_dtensor(slot.parameter) for slot in slots)
        self._gradients: list[Any] = []
        # The tensors whose values are sent: the gradients, or this rank's parts of them.
        self._parts: list[Any] = []
        self._flat: torch.Tensor | None = None
        self._mean: PendingMean | None = None
        self._on_last: Callable[[Any], None] | None = None
        self._handle: Any = None
        for slot in slots:
            slot.bucket = self

    def add_hook(self, on_last: Callable[[Any], None]) -> None:
        """Call `on_last` whenever the gradient that is expected last has accumulated."""
        self._on_last = on_last
        self._handle = add_hook(self.slots[-1].parameter, on_last)

    def remove_hook(self) -> None:
        """Remove the hook, if there is one."""
        if self._handle is not None:
            self._handle.remove()

    def has_later_hook(self) -> bool:
        """Whether a hook of the user's runs after the bucket's hook, on the same parameter.

        The user's hook may change the gradient. Hooks run in the order in which they were added.
        """
        hooks = self.slots[-1].parameter._post_accumulate_grad_hooks
        return next(reversed(hooks.values())) is not self._on_last

    def begin(self) -> None:
        """Begin a pass: expect the gradients of the parameters that are trained now."""
        self.trained = [slot for slot in self.slots if slot.parameter.requires_grad]
        self.missing = set(self.trained)
        self.state = BucketState.EMPTY
        if self.trained:
            self.state = BucketState.FILLING

    def arrive(self, slots: list[Slot]) -> None:
        """Note that the gradients of these slots of the bucket have accumulated.

        Raises:
            SyncError: a gradient accumulated after it was sent.
        """
        missing_if_all_are_new = len(self.missing) - len(slots)
        self.missing.difference_update(slots)
        if len(self.missing) > missing_if_all_are_new:
            self._arrive_again(slots, len(self.missing) - missing_if_all_are_new)
        if self.state is BucketState.FILLING and not self.missing and not self.repeats:
            self.state = BucketState.COMPLETE

    def _arrive_again(self, slots: list[Slot], surplus: int) -> None:
        """Note that gradients have arrived that were not missing: they accumulate repeatedly.

        Args:
            slots: the slots that have arrived.
            surplus: how many of these slots were not missing, or are in the list twice.

        Raises:
            SyncError: the bucket has been sent.
        """
        # If the user freezes a parameter after the forward, its hook still runs in backward, but no
        # gradient accumulates.
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

        Each parameter in `trained` has a gradient and a flag. The flag is 1 if this rank has a
        gradient, else 0, and zeros stand for the gradient. Sparse gradients are sent as dense ones,
        which every process group can average.

        Args:
            start: begins to replace the values of a tensor by their means over the ranks.
            dtype: dtype in which real gradients are sent; None: their own.
        """
        parameters = [slot.parameter for slot in self.trained]
        gradients = list(map(_grad, parameters))
        has_gradient = tuple([gradient is not None for gradient in gradients])
        self.lacks_gradients = not all(has_gradient)
        self._is_dense = not self.lacks_gradients and not any(map(_is_sparse, gradients))
        if not self._is_dense:
            gradients = list(map(_dense, parameters, gradients))
        if self._has_parts:
            gradients = list(map(_placed_as, parameters, gradients))
        self._gradients = gradients
        self._parts = gradients
        if self._has_parts:
            self._parts = list(map(local_part, gradients))
        flags = _flags(has_gradient, gradients[0].dtype, gradients[0].device)
        self._flat = _gathered([*self._parts, flags], dtype)
        self._mean = start(self._flat)
        self.state = BucketState.SENT

    def add_pieces(self) -> None:
        """Begin the second collective of an `OrderedMean`; do nothing for an all_reduce.

        All ranks must call this for their buckets in the same order.
        """
        if isinstance(self._mean, OrderedMean):
            self._mean.add()

    def can_be_received(self) -> bool:
        """Whether `receive` would neither wait nor need its argument. This call does not wait."""
        assert self._mean is not None
        return not self.lacks_gradients and self._mean.is_completed()

    def flags(self) -> torch.Tensor:
        """Wait for the means, and return the means of the flags: 0 where no rank has a gradient."""
        assert self._mean is not None
        assert self._flat is not None
        self._mean.wait()
        return self._flat[-len(self.trained) :]

    def receive(self, is_used: Sequence[bool] = ()) -> None:
        """Wait for the means, copy them to `.grad`, and drop the flat tensor.

        Args:
            is_used: for each parameter in `trained`, whether any rank has a gradient. Only a rank
                that lacks gradients needs this: on other ranks, the answer is yes.
        """
        assert self._mean is not None
        assert self._flat is not None
        self._mean.wait()
        if self._flat.device.type != "cpu":
            # The flat tensor was allocated on the stream of its last gradient. Without this call,
            # the allocator could reuse its memory for later work of that stream, while the current
            # stream still reads the means.
            self._flat.record_stream(torch.accelerator.current_stream(self._flat.device))
        torch._foreach_copy_(self._parts, _unflatten(self._flat, self._parts))
        if self._is_dense:
            for slot, mean in zip(self.trained, self._gradients, strict=True):
                slot.averaged = ref(mean)
        else:
            self._set_gradients(is_used or [True] * len(self.trained))
        self.empty()
        self.state = BucketState.RECEIVED

    def _set_gradients(self, is_used: Sequence[bool]) -> None:
        """Set `.grad` to the means where the means were copied to another tensor than `.grad`.

            `.grad` of this rank   if some rank has a gradient            if no rank has one
            None                   the mean, sparse if `slot.is_sparse`   stays None
            sparse                 the mean, as a sparse tensor           does not occur
            dense                  is the mean already                    does not occur

        If no rank has used a parameter, `.grad` stays None, as in one process. With zeros, an
        optimizer would decay its weight.

        Args:
            is_used: as for `receive`.
        """
        for slot, mean, is_needed in zip(self.trained, self._gradients, is_used, strict=True):
            parameter = slot.parameter
            is_missing = parameter.grad is None
            # A rank without a gradient cannot see whether the gradients of other ranks are sparse.
            is_sparse = slot.is_sparse if is_missing else parameter.grad.is_sparse
            if is_sparse and is_needed:
                parameter.grad = mean.to_sparse(1)
            elif is_missing and is_needed:
                parameter.grad = mean
            if parameter.grad is not None:
                slot.averaged = ref(parameter.grad)

    def empty(self) -> None:
        """Drop the flat tensor and its mean, and expect no gradient until `begin`."""
        self._gradients = []
        self._parts = []
        self._flat = None
        self._mean = None
        self.state = BucketState.EMPTY


def add_hook(parameter: Any, hook: Callable[[Any], Any]) -> Any:
    """Add a hook that runs when the gradient of a parameter has accumulated; return its handle."""
    is_trained = parameter.requires_grad
    # Torch refuses a hook on a frozen parameter, and the user may unfreeze the parameter later.
    parameter.requires_grad = True
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad = is_trained
    return handle


def divide(slots: Iterable[Slot], bucket_bytes: float) -> list[Bucket]:
    """Divide the slots of a model into buckets, by their places.

    The parameters of a bucket have one dtype, device and usage. The buckets are in the order in
    which the last gradients of the buckets are expected.

    Args:
        slots: the slots; they must have the same places on all ranks.
        bucket_bytes: size at which a bucket is full.
    """
    filling: dict[Any, list[Slot]] = {}
    bytes_of_filling: dict[Any, int] = {}
    full: list[list[Slot]] = []
    # This limit is for the first full bucket only.
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
    """Return a list per bucket: for each trained parameter, whether any rank has a gradient.

    The flags of all buckets on a device are copied to the host together, so that the host waits for
    the device once.
    """
    flags_by_device: dict[torch.device, list[torch.Tensor]] = {}
    for bucket in buckets:
        flags = bucket.flags()
        # Flags have the dtype of their gradients, which may be complex. `cat` needs one dtype.
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
    """Return the gradient of a parameter as a dense tensor; zeros if the gradient is None."""
    if gradient is None:
        return torch.zeros_like(parameter)
    dense: torch.Tensor = gradient
    # A DTensor does not know `to_dense`.
    if gradient.is_sparse:
        dense = gradient.to_dense()
    return dense


def _placed_as(parameter: Any, gradient: Any) -> Any:
    """Return a gradient with the placements of its parameter, and put it in `.grad` if it had none.

    DTensor accumulates a gradient as an operation has produced it. That of a norm on a part of the
    sequence is a summand on each rank. A rank without a gradient sends zeros for whole values, with
    which summands must not be averaged. To place a gradient is a collective of the ranks that hold
    the model, which run one program.
    """
    if not is_dtensor(parameter) or gradient.placements == parameter.placements:
        return gradient
    placed = gradient.redistribute(placements=parameter.placements)
    parameter.grad = placed
    return placed


def _gathered(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> torch.Tensor:
    """Return a flat copy of tensors, one after another.

    On a GPU, one kernel copies and converts. To flatten, and to convert the flat copy, would be two
    kernels.

    Args:
        tensors: tensors of one dtype, on one device.
        dtype: dtype of the copy. None, or complex tensors: the copy has the dtype of the tensors.
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
    """Return the flags that a bucket sends.

    They are cached: to make a tensor of values of the host, the host would wait for a GPU.
    """
    return torch.tensor(has_gradient, dtype=dtype, device=device)
