"""ShardedLoader: the object that `shard_loader` returns, which iterates this process's shard epoch after epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from parallelize.data.dataloader_workers import add_data_location
from parallelize.data.device_prefetch import move_batches
from parallelize.data.epoch_shards import IndexedShard
from parallelize.data.loader_options import LoaderOptions
from parallelize.data.source import EpochShard, Position, Source
from parallelize.errors import ConfigError
from parallelize.precision.autocast_filter import set_loss_over
from parallelize.runtime.context import Runtime
from parallelize.runtime.rank_consistency import ConsistencyCheck, register_check
from parallelize.runtime.startup_summary import register_loader
from parallelize.runtime.step_timing import timed_steps
from parallelize.runtime.weighted_backward import BatchWeight, weigh_batches

__all__ = ["ShardedLoader"]

T = TypeVar("T")


class ShardedLoader(Generic[T]):
    """A loader, made by `shard_loader`, that yields this process's shard of each epoch on this process's device.

    All other attributes, and the class that `isinstance` checks, are those of the user's loader.

    Args:
        source: the source for the user's loader.
        options: the options of `shard_loader`.
        run: the run in which the loader is iterated.
        name: file and line of the call that made it, the same on every process.
    """

    def __init__(self, source: Source[T], *, options: LoaderOptions, run: Runtime, name: str) -> None:
        self._options = options
        self._source, self._run, self._name = source, run, name
        self._position = Position()
        self._progress: _EpochProgress[T] | None = None
        self._report_count = 0

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
        progress = self._progress
        position = self._next_position() if progress is None or progress.is_closed else progress.position
        steps = self._source.steps(position)
        if steps is None:
            raise TypeError(f"the number of batches of this {type(self._source.loader).__name__} is unknown")
        return steps

    def __iter__(self) -> Iterator[T]:
        """Start the next epoch, or restart the current one if at most one batch was taken; runs no collective."""
        self._position = self._next_position()
        self._progress = _EpochProgress(self._source.shard(self._position), self._position)
        return self._iterate(self._progress)

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
        progress = self._progress
        return self._next_position().epoch if progress is None or progress.is_exhausted else progress.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next `iter()`, and start that epoch from its beginning."""
        self._position, self._progress = Position(epoch=epoch), None

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as plain values; equal on all processes that have made equally many steps."""
        progress, position = self._progress, self._position
        if progress is not None and progress.is_exhausted:
            position = Position(epoch=progress.position.epoch + 1)
        elif progress is not None:
            start = progress.shard.start_after(progress.steps)
            position = Position(epoch=progress.position.epoch, start=start)
        return {
            "epoch": position.epoch,
            "start": position.start,
            "world_size": self._run.world.world_size,
            **self._source.identity(),
            **self._source.batch_identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state: the next `iter()` yields the rest of the saved epoch, in the same order.

        Args:
            state: the result of `state_dict`. Loaders over map-style datasets and iterables of batches can resume with
                another batch size and another number of processes.

        Raises:
            ConfigError: the state was saved with other data or another seed. All other loaders also require the same
                number of processes and, within an epoch, the same batches.
        """
        expected = {} if self._source.can_change_world_size else {"world_size": self._run.world.world_size}
        expected |= self._source.identity()
        if state["start"]:
            expected |= self._source.batch_identity()
        for name in expected:
            if state.get(name) != expected[name]:
                raise ConfigError(
                    f"a state saved with {name}={state.get(name)!r} is loaded with {name}={expected[name]!r}",
                    why="the rest of the epoch would have other samples, or another order",
                    fix=f"restore the loader with {name}={state.get(name)!r}, or start an epoch with set_epoch()",
                )
        self._position, self._progress = Position(epoch=state["epoch"], start=state["start"]), None

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
        """
        progress = self._progress
        if progress is None or not isinstance(progress.shard, IndexedShard):
            raise ConfigError(
                f"gather on a loader {'that was not iterated' if progress is None else 'without indices'}",
                why="results are ordered by the indices that were iterated",
                fix="iterate the loader first" if progress is None else "use parallelize.all_gather",
            )
        if not getattr(self._source.loader, "in_order", True):
            raise ConfigError(
                "gather on a DataLoader(in_order=False)",
                why="batches come in the order in which workers finish them, which is not recorded",
                fix="use DataLoader(in_order=True)",
            )
        return progress.shard.gather(results, steps=progress.steps)

    def _next_position(self) -> Position:
        user_epoch, progress = self._source.epoch_set_by_user(), self._progress
        # A call of sampler.set_epoch with the resumed epoch does not restart that epoch.
        if user_epoch is not None and (progress is not None or user_epoch != self._position.epoch):
            return Position(epoch=user_epoch)
        if progress is None or not (progress.is_exhausted or progress.steps > 1):
            return self._position
        return Position(epoch=progress.position.epoch + 1)

    def _iterate(self, progress: _EpochProgress[T]) -> Iterator[T]:
        is_weighted = self._options.tail == "weighted"
        backward = weigh_batches(progress.weight) if is_weighted else contextlib.nullcontext()
        with backward, progress.closing():
            for batch in self._with_data_location(self._batches(progress)):
                if progress.steps == 0:
                    progress.check = self._register_check(progress)
                    progress.summary = register_loader(self._source.batch_summary())
                if is_weighted:
                    progress.weight.start_batch(progress.shard.weight(progress.steps))
                progress.steps += 1
                yield batch
                set_loss_over(is_over=True)
            progress.is_exhausted = True
            progress.weight.end_epoch()

    def _batches(self, progress: _EpochProgress[T]) -> Iterator[T]:
        batches = progress.shard.batches()
        device, options = self._run.device, self._options
        if options.to_device and device != torch.device("cpu"):
            are_fresh = getattr(self._source.loader, "num_workers", 0) > 0
            batches = move_batches(batches, device, prefetch=options.prefetch, are_fresh=are_fresh)
        if options.progress and self._run.world.is_main:
            label = options.progress if isinstance(options.progress, str) else f"epoch {progress.position.epoch}"
            steps = self._source.steps(progress.position)
            batches = _with_progress_bar(batches, progress.shard, steps=steps, label=label)
        if options.report:
            label = f"{self._name} epoch {progress.position.epoch}"
            self._report_count += 1
            batches = timed_steps(batches, key=f"{label}/{self._report_count}", label=label)
        return batches

    def _with_data_location(self, batches: Iterator[T]) -> Iterator[T]:
        try:
            yield from batches
        except Exception as exc:
            add_data_location(exc, f"rank {self._run.world.rank}")
            raise

    def _register_check(self, progress: _EpochProgress[T]) -> ConsistencyCheck | None:
        """Register the epoch, length and order, which ranks compare at the model's first step."""
        if self._run.world.world_size == 1:
            return None
        position = progress.position
        steps = self._source.steps(position)
        length = "" if steps is None else f", {steps} batches"
        start = f" from {position.start}" if position.start else ""
        return register_check(
            self._name,
            f"iterates epoch {position.epoch}{start}{length}, order {progress.shard.fingerprint() or 'unknown'}",
            fix="use the same data, seeds and set_epoch() calls on all processes, and train with a tail other than "
            "'exact'; a sampler with its own random numbers needs the same seed on all processes, and a list that is "
            "shuffled inside parallel_model the same order: random.Random(epoch).shuffle(batches)",
        )


class _EpochProgress(Generic[T]):
    """The progress of one iterator through its epoch."""

    def __init__(self, shard: EpochShard[T], position: Position) -> None:
        self.shard, self.position = shard, position
        self.weight = BatchWeight()
        self.check: ConsistencyCheck | None = None
        self.summary: object = None
        self.steps = 0  # batches that were yielded
        self.is_exhausted = self.is_closed = False  # closed: exhausted, or abandoned before its end

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Withdraw the check when the iterator ends: ranks do not compare an evaluation that they have left."""
        try:
            yield
        finally:
            self.check = self.summary = None
            self.is_closed = True


def _with_progress_bar(batches: Iterator[T], shard: EpochShard[T], *, steps: int | None, label: str) -> Iterator[T]:
    """Yield batches, and show a bar that counts all processes' samples or, if unknown, this process's batches."""
    from tqdm.auto import tqdm  # imported late: in a notebook without ipywidgets the import warns

    samples = shard.all_samples()
    unit, total = (" batches", steps) if samples is None else (" samples", samples)
    with tqdm(total=total, desc=label, unit=unit, dynamic_ncols=True) as bar:
        for step, batch in enumerate(batches):
            yield batch
            bar.update(1 if samples is None else shard.samples(step))
