"""ShardedLoader: the object that `shard_loader` returns, which iterates this process's shard epoch after epoch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from parallelize.data.device_prefetch import move_batches
from parallelize.data.epoch_shard import EpochShard, Position
from parallelize.data.loader_copy import data_location
from parallelize.data.loader_iterators import EpochProgress, LineOfCode, LoaderIterators
from parallelize.data.loader_options import LoaderOptions
from parallelize.data.source import Source, length_of
from parallelize.errors import ConfigError
from parallelize.runtime.batch_weights import weigh_batches
from parallelize.runtime.context import Runtime, active
from parallelize.runtime.rank_consistency import ConsistencyCheck
from parallelize.runtime.startup_summary import ActiveLoader

__all__ = ["ShardedLoader"]

T = TypeVar("T")


class ShardedLoader(Generic[T]):
    """A loader, made by `shard_loader`, that yields this process's shard of each epoch on this process's device.

    All other attributes, and the class that `isinstance` checks, are those of the user's loader.
    """

    def __init__(self, source: Source[T], *, options: LoaderOptions, run: Runtime, name: str, line: LineOfCode) -> None:
        self._options = options
        self._source, self._run, self._name, self._line = source, run, name, line
        self._loops = 0
        # What the loaders have in common that one line makes for each epoch; None: their epochs are not counted.
        # Without a run, as in a notebook, a line that is executed again has the same order again.
        self._kind: object = None
        if active() is not None and isinstance(source.loader, DataLoader):
            dataset: Any = source.loader.dataset
            self._kind = type(dataset), length_of(dataset), dataclasses.replace(options, progress=False)
        # Of the next `iter()`, unless an iterator has advanced since it was set.
        self._position = Position(epoch=line.next_epochs.get(self._kind, 0))
        self._iterators = LoaderIterators[T]()

    @property  # type: ignore[misc]  # isinstance uses it: a sharded DataLoader is a DataLoader
    def __class__(self) -> type[Any]:
        return type(self._source.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":  # copy and pickle look these up before __init__
            raise AttributeError(name)
        return getattr(self._source.loader, name)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError(
            f"it is one process's shard of a {type(self._source.loader).__name__}: pass that loader to the function, "
            "and call shard_loader inside"
        )

    def __len__(self) -> int:
        """Count all batches of the active iterator, or of the next one if none is active."""
        progress = self._iterators.current
        if progress is None or progress.is_closed:
            steps = self._source.split(self._next_position()).known_steps(self._source.rank)
        else:
            steps = progress.shard.steps()
        if steps is None:
            raise TypeError(f"the number of batches of this {type(self._source.loader).__name__} is unknown")
        return steps

    def __iter__(self) -> Iterator[T]:
        """Start the next epoch, or restart the current one if at most one batch was taken; runs no collective."""
        position = self._next_position()
        self._iterators.release()
        shard = self._source.shard(position)
        if position == self._position and shard.order is not None:
            units, saved = len(shard.order), self._position.facts.get("units", len(shard.order))
            if units != saved:
                raise _other_state_error("units", saved, units)
        return self._iterate(EpochProgress(shard))

    def __enter__(self) -> ShardedLoader[T]:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut down persistent workers. The loader can be iterated again."""
        self._source.close()

    @property
    def epoch(self) -> int:
        """The epoch of the active iterator, or the next epoch if none is active."""
        progress = self._iterators.current
        return self._next_position().epoch if progress is None or progress.is_exhausted else progress.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next `iter()`, and start that epoch from its beginning."""
        self._start_at(Position(epoch=epoch))

    def _start_at(self, position: Position) -> None:
        self._position, self._iterators = position, LoaderIterators()
        if self._source.states is not None:
            self._source.states.resume(None)
        self._source.listeners.set_epoch(position.epoch)  # a sampler's length may depend on it

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as plain values; equal on all processes that have made equally many steps.

        Within an epoch of a dataset that shards itself, that of rank 0 also has the hash of its first samples.
        It is the position of the iterator that goes on. An iterator that was left after its first batch does not count,
        nor one that was begun and left inside the loop over another: both only read examples.

        Raises:
            ConfigError: within an epoch, the order in which workers finish their batches is not recorded.
        """
        position = self._position_to_save()
        self._iterators.warn_if_ambiguous()
        if position.start:
            self._require_recorded_order("state_dict within an epoch")
        return {
            "epoch": position.epoch,
            "start": position.start,
            "world_size": self._run.world.world_size,
            **(position.facts if position.start else {}),
            **self._source.identity(is_within_epoch=True),
        }

    def _position_to_save(self) -> Position:
        progress = self._iterators.current
        if progress is not None and progress.is_exhausted:
            return Position(epoch=progress.position.epoch + 1)
        if progress is not None:
            taken = 0 if progress.is_closed and progress.steps <= 1 else progress.steps
            start = progress.shard.start_after(taken) if taken else progress.position.start
            return Position(epoch=progress.position.epoch, start=start, facts=progress.facts)
        return self._position

    def rank_state(self) -> dict[str, Any] | None:
        """Return a state of this process's dataset, from which a resumed epoch need not read all samples again.

        None: there is no such state, because the dataset has no `state_dict`, or is divided here, or read by workers.
        """
        progress, states, position = self._iterators.current, self._source.states, self._position_to_save()
        if states is None or not position.start:
            return None
        recorded = [states.saved] if progress is None else progress.shard.states
        return next((dict(each) for each in reversed(recorded) if each and each["batches"] <= position.start), None)

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a `rank_state`, too, which was saved with the state that was loaded."""
        if self._source.states is not None:
            self._source.states.resume(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state: the next `iter()` yields the rest of the saved epoch, in the same order.

        Args:
            state: the result of `state_dict`. Loaders over map-style datasets and iterables of batches can resume with
                another batch size and another number of processes.

        Raises:
            ConfigError: the state was saved with other data or another seed. All other loaders also require the same
                number of processes and, within an epoch, the same batches.
        """
        facts = {name: state[name] for name in ("units", "first", "order") if name in state and state["start"]}
        position = Position(epoch=state["epoch"], start=state["start"], facts=facts)
        self._source.listeners.set_epoch(position.epoch)  # a sampler's length may depend on it
        for name, expected in self._source.identity(is_within_epoch=bool(position.start)).items():
            if state.get(name) != expected:
                raise _other_state_error(name, state.get(name), expected)
        self._start_at(position)

    def gather(self, results: Any) -> Any:
        """Gather per-sample results of all processes in dataset order; a collective: every process has to call it.

        Args:
            results: a tensor, or containers of tensors, with one row for each sample that this process was given since
                `iter()`, in the same order; for example torch.cat of the outputs of all batches.

        Returns:
            The same containers on every process, with one row for each sample that any process was given, sorted by
            index, without repeats.

        Raises:
            ConfigError: rows are missing, or the loader has no indices.
            SyncError: the processes have iterated different epochs or orders.
        """
        progress = self._iterators.current
        if progress is None:
            raise ConfigError(
                "gather on a loader that was not iterated",
                why="results are ordered by the indices that were iterated",
                fix="iterate the loader first",
            )
        self._require_recorded_order("gather")
        return progress.shard.gather(results, steps=progress.steps)

    def _require_recorded_order(self, what: str) -> None:
        loader = self._source.loader
        if getattr(loader, "in_order", True) or loader.num_workers < 2:
            return
        raise ConfigError(
            f"{what} on a DataLoader(in_order=False)",
            why="batches come in the order in which workers finish them, which is not recorded",
            fix="use DataLoader(in_order=True)",
        )

    def _next_position(self) -> Position:
        user_epoch, progress = self._source.listeners.epoch_set_by_user(), self._iterators.latest_loop
        # A call of sampler.set_epoch with the resumed epoch does not restart that epoch.
        if user_epoch is not None and (progress is not None or user_epoch != self._position.epoch):
            return Position(epoch=user_epoch)
        return self._position if progress is None else Position(epoch=progress.position.epoch + 1)

    def _iterate(self, progress: EpochProgress[T]) -> Iterator[T]:
        has_others = self._run.world.world_size > 1
        is_weighted = self._options.tail == "weighted" and has_others
        with contextlib.ExitStack() as stack:
            if has_others:  # of other tails, too: a loss may be computed from batches of two loaders
                stack.enter_context(weigh_batches(progress.weight))
            stack.callback(lambda: self._iterators.close(progress))  # those of now, if a state was loaded since
            for batch in self._batches(progress):
                if progress.steps == 0:
                    progress.facts = progress.shard.facts()
                    progress.warn_of_another_order(self._name)
                    progress.check = self._register_check(progress)
                    progress.summary = ActiveLoader(self._source.batch_summary())
                if has_others:
                    weight = progress.shard.weight(progress.steps) if is_weighted else 1.0
                    progress.weight.start_batch(weight, batch)
                progress.steps += 1
                self._iterators.advance(progress)
                if progress.steps == 2:
                    self._count_loop(progress)
                yield batch
            if progress.steps < 2:
                self._count_loop(progress)
            progress.is_exhausted = True
            progress.weight.end_epoch()

    def _count_loop(self, progress: EpochProgress[T]) -> None:
        # Not where the loop ends: an iterator that is left is closed after the next loader was made.
        self._loops += 1
        if self._kind is not None:
            self._line.next_epochs[self._kind] = progress.position.epoch + 1 if self._loops == 1 else 0

    def _batches(self, progress: EpochProgress[T]) -> Iterator[T]:
        batches, device, options = progress.shard.fetch(progress.shard), self._run.device, self._options
        if options.to_device and device != torch.device("cpu"):
            are_fresh = getattr(self._source.loader, "num_workers", 0) > 0
            batches = move_batches(batches, device, prefetch=options.prefetch, are_fresh=are_fresh)
        if options.progress and self._run.world.is_main:
            label = options.progress if isinstance(options.progress, str) else f"epoch {progress.position.epoch}"
            batches = _with_progress_bar(batches, progress.shard, label)
        with data_location(f"rank {self._run.world.rank}"):
            yield from batches

    def _register_check(self, progress: EpochProgress[T]) -> ConsistencyCheck | None:
        """Register the epoch, length and order, which ranks compare at the model's first step."""
        if self._run.world.world_size == 1:
            return None
        position, steps = progress.position, progress.shard.steps()
        length = "" if steps is None else f", {steps} batches"
        start = f" from {position.start}" if position.start else ""
        return ConsistencyCheck(
            self._name,
            f"iterates epoch {position.epoch}{start}{length}, order {progress.shard.fingerprint() or 'unknown'}",
            fix="use the same data, seeds and set_epoch() calls on all processes, and train with a tail other than "
            "'exact'; a sampler or stream with its own random numbers needs the same seed on all processes, a list "
            "that is shuffled inside parallel_model the same order: random.Random(epoch).shuffle(batches), and an "
            "iterable that shards itself divides='processes'",
        )


def _with_progress_bar(batches: Iterator[T], shard: EpochShard[T], label: str) -> Iterator[T]:
    """Yield batches, and show a bar that counts all processes' samples or, if unknown, this process's batches."""
    from tqdm.auto import tqdm  # imported late: in a notebook without ipywidgets the import warns

    samples = shard.samples()
    unit, total = (" batches", shard.steps()) if samples is None else (" samples", samples)
    with tqdm(total=total, desc=label, unit=unit, dynamic_ncols=True) as bar:
        for step, batch in enumerate(batches):
            yield batch
            bar.update(shard.samples(step) or 1)


def _other_state_error(name: str, saved: Any, expected: Any) -> ConfigError:
    return ConfigError(
        f"a state saved with {name}={saved!r} is loaded with {name}={expected!r}",
        why="the rest of the epoch would have other samples, or another order",
        fix=f"restore the loader with {name}={saved!r}, or start an epoch with set_epoch()",
    )
