"""States of an iterable dataset, from which a resumed epoch goes on without reading again what came before it."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import itertools
import pickle
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from parallelize.data.epoch_shard import EpochShard, Position
from parallelize.data.loader_copy import LoaderCopy
from parallelize.runtime.containers import leaves
from parallelize.runtime.rng_state import RNGState

__all__ = ["DatasetStates"]

T = TypeVar("T")

_EVERY = 8  # batches: a resumed epoch reads fewer than these again, and those that were prefetched
# Recording a state takes at most a fiftieth of the time, unless it takes less than two milliseconds.
_MIN_SECONDS, _PART_OF_TIME = 0.002, 50
_MAX_COPIED_BYTES, _OBJECT_BYTES = 2**26, 2**9


class DatasetStates(Generic[T]):
    """Records states of a dataset that has `state_dict` and `load_state_dict`, and resumes an epoch from one.

    A state is recorded with the hash of the batch after it. On copies of the dataset it is tried whether the epoch goes
    on with that batch, whether loading the state from before makes it begin anew, and whether the next epoch does so.
    If not, the epoch is read from its beginning; also if the dataset is too large to be copied, or refills a shuffle
    buffer, as Hugging Face's do: what was in the buffer may be missed after the next batch only.

    Args:
        dataset: the dataset, which is iterated in this process.
        loader: makes the batches.
        read_from: lets the loader read the dataset, or a copy of it.
        generator: the loader's generator, from which it draws a seed for each iterator.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        loader: LoaderCopy,
        read_from: Callable[[Any], None],
        generator: torch.Generator | None,
    ) -> None:
        self._dataset, self._loader, self._read_from, self._generator = dataset, loader, read_from, generator
        self.saved: Mapping[str, Any] | None = None
        """The recorded state to resume from."""
        self._is_usable: bool | None = None  # None: not tried yet
        self._shared: dict[int, Any] = {}  # what copies of the dataset share with it
        self._due = 0.0  # the time from which on the next state is recorded
        self._initial: tuple[int, Any] | None = None  # the epoch for which a state was loaded, and the state before it
        self._missing = self._length = 0  # batches of the resumed epoch: those not read again, and all

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Set the recorded state to resume from, if any."""
        self.saved, self._is_usable = saved, None

    def batches(self, shard: EpochShard[T]) -> tuple[int, Iterator[T]]:
        """Return the number of batches that the dataset does not read again, and an iterator over all after them.

        The latest two states are kept in `shard.states`.
        """
        saved, position = self.saved, shard.position
        number = 0
        if saved is not None and saved["epoch"] == position.epoch and saved["batches"] <= position.start:
            if self._is_usable is None:
                self._is_usable = False
                with self._trial():
                    self._is_usable = self._can_resume(saved, position)
            if self._is_usable:
                self._dataset.load_state_dict(copy.deepcopy(saved["state"]))
                shard.states.append(dict(saved))
                number = saved["batches"]
        if number == 0 and self._initial is not None and self._initial[0] == position.epoch:
            self._dataset.load_state_dict(copy.deepcopy(self._initial[1]))
        return number, self._recorded(self._loader.iterate(position, first=number), number, shard)

    def _can_resume(self, saved: Mapping[str, Any], position: Position) -> bool:
        """Whether the dataset goes on from a state as it did, and can begin this epoch and the next one anew."""
        shared = _shared_by_copies(self._dataset)
        if shared is None:
            return False
        self._shared = shared
        state, fresh = saved["state"], () if self._initial is None else self._initial[1:]
        initial = fresh[0] if fresh else copy.deepcopy(self._dataset.state_dict())
        resumed = self._copy(state)
        if self._first_hash(resumed, position, first=saved["batches"]) != saved["next"]:
            return False

        def begins_late(at: Position) -> bool:
            # The state tells, too: where a generator or a buffer goes on, batches differ from those after the state.
            datasets = (resumed, self._copy(state), self._copy(*fresh))
            found = [[self._first_hash(each, at), *map(repr, leaves(each.state_dict()))] for each in datasets]
            if at == position and found[1][0] == found[2][0]:
                raise ValueError("equal batches do not tell")
            return any(again == late != begun for again, late, begun in zip(*found, strict=True))

        remembers, is_usable = begins_late(position), not begins_late(Position(epoch=position.epoch + 1))
        if remembers:
            datasets = (self._copy(state, initial), self._copy(*fresh))
            undone, begun = (self._first_hash(each, position) for each in datasets)
            is_usable &= undone == begun
        if remembers and is_usable:
            self._initial = position.epoch, initial
        return is_usable

    @contextlib.contextmanager
    def _trial(self) -> Iterator[None]:
        """Let the loader read copies of the dataset, without a trace; no error of the dataset is raised."""
        rng, generator = RNGState((), has_python=True), self._generator
        drawn = None if generator is None else generator.get_state()
        with contextlib.suppress(Exception):
            yield
        self._read_from(self._dataset)
        rng.restore()
        if generator is not None and drawn is not None:
            generator.set_state(drawn)

    def _copy(self, *states: Any) -> Any:
        """Return a copy of the dataset, into which states were loaded."""
        dataset = copy.deepcopy(self._dataset, dict(self._shared))
        for each in states:
            dataset.load_state_dict(copy.deepcopy(each))
        return dataset

    def _first_hash(self, dataset: Any, position: Position, *, first: int = 0) -> str:
        """Return the hash of the first batch that a dataset yields next, in a later epoch if `first` is 0."""
        if first == 0 and callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(position.epoch)
        self._read_from(dataset)
        with contextlib.closing(self._loader.iterate(position, first=first)) as batches:
            return _fingerprint(next(batches))

    def _recorded(self, batches: Iterator[T], number: int, shard: EpochShard[T]) -> Iterator[T]:
        """Yield batches, the first of them with a number, and record states; warn if a later epoch begins late."""
        epoch = shard.position.epoch
        for current in itertools.count(number):
            is_due = current > number and current % _EVERY == 0 and time.monotonic() >= self._due
            states = self._timed(self._states) if is_due else []
            try:
                batch = next(batches)
            except StopIteration:
                break
            hashed = self._timed(_fingerprint, batch) if states else ""
            if hashed:
                facts = {"epoch": epoch, "batches": current, "state": states[0], "next": hashed}
                shard.states[:] = [*shard.states[-1:], facts]
            yield batch
        if number:
            self._missing, self._length = number, current
        elif self._missing and current == self._length - self._missing:
            name = type(self._dataset).__name__
            warnings.warn(
                f"epoch {epoch} of {name} has {self._missing} batches less than the resumed epoch, as many as had been "
                f"read before its state was saved: __iter__ of {name} begins at the state that was loaded in this "
                "epoch, too. Let it forget the state, as by `begin, self.begin = self.begin, 0`.",
                stacklevel=2,
            )

    def _timed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that records, and put off the next state if that takes long."""
        start = time.thread_time()
        found = function(*args)
        taken = time.thread_time() - start
        if taken > _MIN_SECONDS:
            self._due = max(self._due, time.monotonic()) + _PART_OF_TIME * taken
        return found

    def _states(self) -> list[Any]:
        """Return the state of the dataset; nothing if it has none."""
        with contextlib.suppress(Exception):  # whatever the dataset raises
            return [copy.deepcopy(self._dataset.state_dict())]
        return []


def _shared_by_copies(dataset: Any) -> dict[int, Any] | None:
    """Return what copies of a dataset share, by id: arrays that cannot be written, as of files.

    None: it should not be copied, because it is large, or a copy may delete or close something at its end; or it has a
    shuffle buffer that its state does not contain.
    """
    numpy: Any = sys.modules.get("numpy")
    array = () if numpy is None else numpy.ndarray
    pending, seen, shared, size = [dataset], set(), {}, 0
    while pending:
        each = pending.pop()
        # Types, functions and modules are not copied.
        if id(each) in seen or isinstance(each, (type, types.FunctionType, types.ModuleType)):
            continue
        seen.add(id(each))
        if isinstance(each, array) and not each.flags.writeable:
            shared[id(each)] = each
            continue
        size += each.nbytes if isinstance(each, (torch.Tensor, array)) else _OBJECT_BYTES
        kind = type(each)
        end = getattr(kind, "__del__", None)
        has_end = isinstance(end, types.FunctionType) and end.__module__.partition(".")[0] not in ("datasets", "torch")
        if size > _MAX_COPIED_BYTES or has_end or kind.__name__ == "BufferShuffledExamplesIterable":
            return None
        pending += gc.get_referents(each)
    return shared


def _fingerprint(batch: Any) -> str:
    """Return a hash of all that a batch contains, of which a repr shows only a part; "" if it cannot be hashed."""
    found = hashlib.blake2b(digest_size=8)
    with contextlib.suppress(Exception):  # an object that cannot be pickled
        for value in map(_plain, leaves(batch)):
            found.update(pickle.dumps(value, protocol=5, buffer_callback=lambda each: found.update(each.raw())))
        return found.hexdigest()
    return ""


def _plain(leaf: Any) -> Any:
    with contextlib.suppress(Exception):  # no tensor, or a sparse or nested one
        return leaf.shape, str(leaf.dtype), leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return leaf
