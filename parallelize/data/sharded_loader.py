"""This process's share of a loader, iterated epoch after epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from parallelize.data.dataloader_workers import explain
from parallelize.data.device_prefetch import on_device
from parallelize.data.epoch_shards import CountedReading
from parallelize.data.loader_options import LoaderOptions
from parallelize.data.progress_bar import with_bar
from parallelize.data.source import Place, Reading, Source
from parallelize.data.step_timing import with_pace
from parallelize.data.weighted_gradients import Weight, weighing
from parallelize.errors import ConfigError
from parallelize.runtime.context import Runtime
from parallelize.runtime.rank_consistency import Announcement, announce
from parallelize.runtime.startup_summary import reading

__all__ = ["ShardedLoader"]

T = TypeVar("T")


class ShardedLoader(Generic[T]):
    """A loader that yields this process's share of each epoch, on this process's device.

    What else is asked of it is answered by the user's loader; `isinstance` sees that one's class. Made by
    `shard_loader`.

    Args:
        source: the user's loader.
        options: as asked.
        run: the run it is read in.
        site: where in the program it was made, the same on every process.
    """

    def __init__(self, source: Source[T], *, options: LoaderOptions, run: Runtime, site: str) -> None:
        self._options = options
        self._source, self._run, self._site = source, run, site
        self._place = Place()
        self._course: _Course[T] | None = None
        self._reports = 0

    @property  # type: ignore[misc]  # isinstance asks for it: what was a DataLoader is one
    def __class__(self) -> type[Any]:
        return type(self._source.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":  # copy and pickle ask before there is a source
            raise AttributeError(name)
        return getattr(self._source.loader, name)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError(
            f"it is one process's share of a {type(self._source.loader).__name__}: give the function that loader, and "
            "call shard_loader inside"
        )

    def __len__(self) -> int:
        """Batches that the iterator under way yields in all, or else the next one will."""
        course = self._course
        steps = self._source.steps(self._next() if course is None or course.is_left else course.place)
        if steps is None:
            raise TypeError(f"nobody knows how many batches this {type(self._source.loader).__name__} yields")
        return steps

    def __iter__(self) -> Iterator[T]:
        """Begin the next epoch, or the same one again if only a first batch was taken. Nothing collective happens."""
        self._place = self._next()
        self._course = _Course(self._source.read(self._place), self._place)
        return self._read(self._course)

    def __enter__(self) -> ShardedLoader[T]:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End what the loader keeps running between epochs: persistent workers. It can be iterated again."""
        self._source.close()

    @property
    def epoch(self) -> int:
        """Number of the epoch that is being read, or of the next one if none is."""
        course = self._course
        return self._next().epoch if course is None or course.is_over else course.place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch at the next `iter()`, from its beginning, whatever was read before."""
        self._place, self._course = Place(epoch=epoch), None

    def state_dict(self) -> dict[str, Any]:
        """Where reading has come to, as plain values, alike on every process that has made as many steps."""
        course = self._course
        place = self._place
        if course is not None:
            over = Place(epoch=course.place.epoch + 1)
            place = over if course.is_over else Place(epoch=course.place.epoch, start=course.position())
        return {
            "epoch": place.epoch,
            "start": place.start,
            "world_size": self._run.world.world_size,
            **self._source.identity(),
            **self._source.unit(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved: the next `iter()` yields what of its epoch was not seen, in the same order.

        Args:
            state: of `state_dict`. Loaders that fetch by index, and plain iterables, may go on with another batch size
                and in a world of another size.

        Raises:
            ConfigError: the data or the seed is another one, a loader that cannot go on in a world of another size, or
                with other batches in the middle of an epoch.
        """
        here = {} if self._source.is_resumable_anywhere else {"world_size": self._run.world.world_size}
        here |= self._source.identity()
        if state["start"]:
            here |= self._source.unit()
        for name in here:
            if state.get(name) != here[name]:
                raise ConfigError(
                    f"a state saved with {name}={state.get(name)!r} is loaded with {name}={here[name]!r}",
                    why="the units of its epoch would be others, or in another order",
                    fix=f"restore the loader with {name}={state.get(name)!r}, or begin an epoch with set_epoch()",
                )
        self._place, self._course = Place(epoch=state["epoch"], start=state["start"]), None

    def gather(self, results: Any) -> Any:
        """Per-sample results of all processes in the order of the dataset; a collective: every process has to call it.

        Args:
            results: a tensor, or containers of tensors, with a row for each sample that this process was given since
                `iter()`, in that order: torch.cat of what was computed for each batch.

        Returns:
            The same containers on every process, with one row for each sample that any process was given, by ascending
            index, without repeats.

        Raises:
            ConfigError: rows missing, or a loader that has no indices.
        """
        course = self._course
        if course is None or not isinstance(course.reading, CountedReading):
            raise ConfigError(
                "gather on a loader that was not iterated" if course is None else "gather on a loader without indices",
                why="it puts results in the order of the indices that were read",
                fix="iterate the loader first" if course is None else "use parallelize.all_gather",
            )
        if not getattr(self._source.loader, "in_order", True):
            raise ConfigError(
                "gather on a DataLoader(in_order=False)",
                why="batches came as workers finished them, in an order that nobody has noted",
                fix="use DataLoader(in_order=True)",
            )
        return course.reading.gather(results, steps=course.given)

    def _next(self) -> Place:
        chosen, course = self._source.chosen_epoch(), self._course
        # A loop that tells its sampler the epoch at which it goes on does not begin it again.
        if chosen is not None and (course is not None or chosen != self._place.epoch):
            return Place(epoch=chosen)
        if course is None or not (course.is_over or course.given > 1):
            return self._place
        return Place(epoch=course.place.epoch + 1)

    def _read(self, course: _Course[T]) -> Iterator[T]:
        is_weighted = self._options.tail == "weighted"
        with weighing(course.weight) if is_weighted else contextlib.nullcontext(), course.announcing():
            for batch in self._explained(self._arriving(course)):
                if course.given == 0:
                    course.announcement = self._announced(course)
                    course.told = reading(self._source.arithmetic())
                if is_weighted:
                    course.weight.give(course.reading.weight(course.given))
                course.given += 1
                yield batch
            course.is_over = True
            course.weight.end()

    def _arriving(self, course: _Course[T]) -> Iterator[T]:
        batches = course.reading.batches()
        device, options = self._run.device, self._options
        if options.to_device and device != torch.device("cpu"):
            batches = on_device(batches, device, prefetch=options.prefetch)
        if options.progress and self._run.world.is_main:
            label = options.progress if isinstance(options.progress, str) else f"epoch {course.place.epoch}"
            batches = with_bar(batches, course.reading, steps=self._source.steps(course.place), label=label)
        if options.report:
            label = f"{self._site} epoch {course.place.epoch}"
            self._reports += 1
            batches = with_pace(batches, key=f"{label}/{self._reports}", label=label)
        return batches

    def _explained(self, batches: Iterator[T]) -> Iterator[T]:
        try:
            yield from batches
        except Exception as exc:
            explain(exc, f"rank {self._run.world.rank}")
            raise

    def _announced(self, course: _Course[T]) -> Announcement | None:
        """For the model's first step: others who read another epoch, order or number of batches are found there."""
        if self._run.world.world_size == 1:
            return None
        steps = self._source.steps(course.place)
        length = "" if steps is None else f", {steps} batches"
        where = f" from {course.place.start}" if course.place.start else ""
        return announce(
            self._site,
            f"reads epoch {course.place.epoch}{where}{length}, order {course.reading.fingerprint() or 'unknown'}",
            fix="give all processes the same data and seeds, call set_epoch() alike, and train with another tail than "
            "'exact'; a sampler with random numbers of its own needs a seed that is the same everywhere",
        )


class _Course(Generic[T]):
    """How far an iterator has come."""

    def __init__(self, reading: Reading[T], place: Place) -> None:
        self.reading, self.place = reading, place
        self.weight = Weight()
        self.announcement: Announcement | None = None
        self.told: object = None
        self.given = 0
        self.is_over = self.is_left = False  # at the end of the data; by whoever has read it, there or before

    def position(self) -> int:
        return self.reading.position(self.given)

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """Whatever was announced is void at the end: an evaluation that was left early is not what others train on."""
        try:
            yield
        finally:
            self.announcement = self.told = None
            self.is_left = True
