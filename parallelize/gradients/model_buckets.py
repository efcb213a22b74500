"""The buckets of one model, and the order in which its gradients arrive.

The terms and the protocol of a pass are at the top of `reducer.py`.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain, groupby
from operator import attrgetter

import torch

from parallelize.gradients.buckets import Bucket, BucketState, Place, Slot, Usage, divide
from parallelize.gradients.mean_over_ranks import MeanOverRanks
from parallelize.plugins.base import Reduction

_bucket = attrgetter("bucket")


class ModelBuckets:
    """The buckets of one model, for the parameters that have been trained in the block.

    The order in which gradients arrive is learned in the first pass that is averaged, and again
    when a parameter is trained for the first time:

        learning ── end of the pass: the ranks agree on rank 0's order ──> has learned
           ^                                                                    │
           └── beginning of a pass: a parameter is trained for the first time ──┘

    While the model learns, all buckets are sent at the end of the pass. Until it has learned for
    the first time, the parameters that were registered last are in the first buckets.

    Args:
        slots: the slots of the model's parameters, in the order in which they are registered.
        reduction: how the model's gradients are averaged.
        on_last: called when the gradient that a bucket expects last has accumulated. Its arguments
            are this object and the parameter.

    Attributes:
        is_learning: whether the model learns from the running pass, or from the next one.
        is_no_sync: whether gradients stay local now, because `Reducer.no_sync` of the model is
            open. Under `logical=`, they never do.
        unsent: the buckets that the running pass has not sent yet, in the order of sending.
        under_way: the buckets that the running pass has sent and not received, in the same order.
    """

    def __init__(
        self,
        slots: list[Slot],
        reduction: Reduction,
        on_last: Callable[[ModelBuckets, torch.Tensor], None],
    ) -> None:
        self.slots = slots
        self.reduction = reduction
        self.is_learning = True
        self.is_no_sync = False
        self.unsent: deque[Bucket] = deque()
        self.under_way: deque[Bucket] = deque()
        self._on_last = functools.partial(on_last, self)
        self._buckets: list[Bucket] = []
        # Slots of parameters that have never been trained: they are in no bucket.
        self._untrained = slots
        # Slots in the order in which gradients arrive in a pass from which the model learns. A slot
        # is there twice if its gradient has arrived twice.
        self._arrived: list[Slot] = []
        for slot in slots:
            slot.model = self

    @property
    def device_type(self) -> str:
        """The type of the device of the table that `learn` sends."""
        name: str = self.slots[0].parameter.device.type
        return name

    def begin(self) -> None:
        """Begin a pass, with new buckets if a parameter is trained for the first time.

        What an earlier pass has left behind, because it has raised, is dropped.
        """
        newly_trained = [slot for slot in self._untrained if slot.parameter.requires_grad]
        if newly_trained:
            self.is_learning = True
            self._divide()
        self.unsent.clear()
        self.under_way.clear()
        self._arrived = []
        for bucket in self._buckets:
            bucket.begin()
            if bucket.trained:
                self.unsent.append(bucket)

    def arrive(self, slots: list[Slot]) -> None:
        """Note that gradients of the model have accumulated.

        Args:
            slots: the slots of the gradients, in the order in which they have accumulated.

        Raises:
            SyncError: a gradient accumulated after it was sent.
        """
        if self.is_learning:
            self._arrived += slots
        for bucket, slots_of_bucket in groupby(slots, _bucket):
            if bucket is not None:
                bucket.arrive(list(slots_of_bucket))

    def next_complete(self) -> Bucket | None:
        """Return the bucket to send next; None: there is none, or it must not be sent yet.

        All ranks send their buckets in the same order. So a bucket that is not complete holds back
        all later ones.
        """
        if not self.unsent or self.is_learning:
            return None
        bucket = self.unsent[0]
        if bucket.state is not BucketState.COMPLETE or bucket.has_later_hook():
            return None
        return bucket

    def send_next(self, mean: MeanOverRanks) -> None:
        """Send the next bucket.

        Before the end of the pass, it must be complete. At the end, zeros stand for the gradients
        that are missing.
        """
        bucket = self.unsent.popleft()
        bucket.send(mean.start, self.reduction.dtype)
        self.under_way.append(bucket)

    def receive_completed(self) -> None:
        """Receive the buckets whose means are there, so that their flat tensors are freed.

        This must not wait for a mean. Another rank may send its bucket only after a collective in
        the user's backward, such as that of SyncBatchNorm. This rank has to join the collective
        first, so that both ranks would wait for ever.
        """
        while self.under_way and self.under_way[0].can_be_received():
            self.under_way.popleft().receive()

    def learn(self, mean: MeanOverRanks) -> None:
        """Divide the parameters anew, in the order in which gradients have arrived on rank 0.

        All ranks must call this after the same pass, and have trained the same parameters in it.
        A parameter that was not trained keeps its place.

        The ranks add up tables with a row for each trained parameter, of three columns:

            column                 value of a rank
            position               on rank 0: index of the gradient's last arrival, or a higher
                                   number if it has not arrived. On other ranks: 0
            ranks without          1 if the gradient has not arrived
            ranks where repeated   1 if the gradient has arrived twice in this or an earlier pass
        """
        arrivals = Counter(self._arrived)
        positions = {slot: position for position, slot in enumerate(self._arrived)}
        trained = list(chain.from_iterable([bucket.trained for bucket in self._buckets]))
        rows = []
        for index, slot in enumerate(trained):
            slot.repeats = slot.repeats or arrivals[slot] > 1
            position = 0
            if mean.is_first:
                position = positions.get(slot, len(self._arrived) + index)
            rows.append([position, int(arrivals[slot] == 0), int(slot.repeats)])
        table = torch.tensor(rows, device=self.slots[0].parameter.device)
        for slot, row in zip(trained, mean.sum_of_integers(table), strict=True):
            slot.place = _place(row, mean.size)
        self._arrived = []
        self.is_learning = False
        self._divide()
        for bucket in self._buckets:
            bucket.add_hook(self._on_last)

    def _divide(self) -> None:
        """Make new buckets of the parameters that are trained now, or have been before."""
        self.remove_hooks()
        members, untrained = [], []
        for slot in self.slots:
            if slot.parameter.requires_grad or slot.bucket is not None:
                members.append(slot)
            else:
                untrained.append(slot)
        self._untrained = untrained
        self._buckets = divide(members, self.reduction.bucket_bytes)

    def fail(self) -> None:
        """End a pass that has raised: drop what was sent, and take no gradient for averaged.

        A bucket that this rank has received may not have been received on all ranks.
        """
        for bucket in self._buckets:
            bucket.empty()
        for slot in self.slots:
            slot.averaged = None

    def remove_hooks(self) -> None:
        """Remove the hooks of the buckets."""
        for bucket in self._buckets:
            bucket.remove_hook()


def _place(row: Sequence[int], ranks: int) -> Place:
    """Return the place of a parameter, by its row in the sum of the tables of `learn`.

    The position is that of rank 0, because the other ranks have added 0. The usage follows from the
    numbers of ranks in the other two columns.

    Args:
        row: its row.
        ranks: number of ranks that have added a table.
    """
    position, ranks_without, ranks_where_repeated = row
    usage = Usage.EVERYWHERE
    if ranks_without == ranks:
        usage = Usage.NOWHERE
    elif ranks_without or ranks_where_repeated:
        usage = Usage.SOMEWHERE
    return Place(usage, position)
