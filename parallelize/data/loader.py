"""ShardedLoader: what `shard_loader` returns; each `iter()` is this process's share of an epoch."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import reprlib
import sys
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch.optim.swa_utils import update_bn

from parallelize.data.prefetch import move_batches
from parallelize.data.sampling import Tail
from parallelize.data.source import EpochShard, LoaderOptions, Position, Source
from parallelize.errors import ConfigError
from parallelize.runtime.batch_weights import BatchWeight, weigh_batches
from parallelize.runtime.context import EVALUATES, PART_SIZES, is_main
from parallelize.runtime.rank_consistency import ConsistencyCheck, run_checks
from parallelize.runtime.startup_summary import ActiveLoader
from parallelize.runtime.user_line import user_stacklevel
from parallelize.torch_patches.forward import route_of, routed_models
from parallelize.torch_patches.loaders import unwatched_batches

__all__ = ["ShardedLoader"]

T = TypeVar("T")

_log = logging.getLogger("parallelize")
_compared = itertools.count()  # orders that this process has compared, which all make in one order


class ShardedLoader(Generic[T]):
    """A loader, made by `shard_loader`, that yields this process's share of each epoch.

    All other attributes, and the class that `isinstance` checks, are those of the user's loader.
    """

    def __init__(self, source: Source, options: LoaderOptions, name: str, epochs: MutableMapping[str, int]) -> None:
        self._source, self._options, self._name, self._run = source, options, name, source.run
        # Line of code -> epoch in which its next loader begins.
        self._epochs, self._line = epochs, name.partition(" ")[0]
        self._first_epoch = epochs.get(self._line, 0)
        self._next = Position()  # where the next `iter()` begins, counted from the first epoch
        self._shard: EpochShard | None = None  # the latest iterator's

    @property  # type: ignore[misc]  # isinstance uses it: a sharded DataLoader is a DataLoader
    def __class__(self) -> type[Any]:
        return type(self._source.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":  # looked up before __init__
            raise AttributeError(name)
        return getattr(self._source.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        (super() if self._is_own(name) else self._source.loader).__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        (super() if self._is_own(name) else self._source.loader).__delattr__(name)

    def _is_own(self, name: str) -> bool:
        """Whether an attribute is this object's: others are set on the user's loader, if it can have any."""
        return name[0] == "_" or hasattr(ShardedLoader, name) or not hasattr(self._source.loader, "__dict__")

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError(
            f"it is one process's shard of a {self.__class__.__name__}: pass that loader to the function, "
            "and call shard_loader inside"
        )

    def __len__(self) -> int:
        """Count all batches of the active iterator, or of the next one if none is active."""
        shard, source = self._shard, self._source
        source.follow()
        split = source.split(self._next_position(), self._tail(), source.length())
        if shard is not None and shard.is_open:
            split = shard.split
        steps = source.steps(split)
        if steps is None:
            raise TypeError(f"the number of batches of this {self.__class__.__name__} is unknown")
        return steps

    def __iter__(self) -> Iterator[T]:
        """Start the next epoch; runs no collective."""
        position = self._next_position()
        epoch = self._first_epoch + position.epoch
        self._source.follow()
        shard = self._source.shard(replace(position, epoch=epoch), self._tail())
        split, size = shard.split, self._run.world.world_size
        if size > 1:
            _warn_of_update_bn(sys._getframe(1))
        if size > 1 and split.total and not split.start and not split.steps(0):
            raise ConfigError(
                f"no process gets a batch: {split.total} samples, {split.group} in a step of all",
                why="drop_last=True or tail='drop' leaves out an incomplete step",
                fix=f"use a batch size of at most {split.total // size}, or keep the last batch",
            )
        self._next = Position(position.epoch + 1)
        self._epochs[self._line] = epoch + 1
        if self._shard is None or not self._shard.is_open:
            self._shard = shard
        return self._iterate(shard)

    def _tail(self) -> Tail:
        """Return the option; by default, without gradients each sample comes once."""
        run = self._run
        if self._options.tail is not None or torch.is_grad_enabled():
            return self._options.tail or "pad"
        if run.world.world_size == 1:
            return "exact"
        routes = filter(None, map(route_of, routed_models()))
        is_collective = not all(each.owner.engine.is_replica for each in routes)
        if EVALUATES not in run.flags and run.world.is_main:
            padded = "ranks forward together, with padding: loader.gather(x) leaves repeats out"
            once = "without gradients, each sample comes once; loader.mean(values) is the mean over all of them"
            _log.info("%s: %s", self._name, padded if is_collective else once)
        run.flags.add(EVALUATES)
        return "pad" if is_collective else "exact"

    def _next_position(self) -> Position:
        """Return where the next iterator begins; an epoch that the user has set goes first."""
        epoch = self._source.epoch_set_by_user()
        if epoch not in (None, self._first_epoch + self._next.epoch):
            self._first_epoch = 0
            self._next = self._next if epoch == self._next.epoch else Position(epoch)
        return self._next

    def _iterate(self, shard: EpochShard) -> Iterator[T]:
        weight = BatchWeight()
        has_others = self._run.world.world_size > 1
        with contextlib.ExitStack() as stack:
            if has_others:  # of other tails, too: a loss may use batches of two loaders
                stack.enter_context(weigh_batches(weight))
            stack.callback(vars(shard).update, is_open=False, kept=None)
            for batch in self._batches(shard):
                if shard.steps == 0:
                    self._check_order(shard)
                if has_others:
                    weight.start_batch(shard.weight(shard.steps))
                # A look at a first batch inside a loop over the same loader: the loop goes on.
                if shard.steps or self._shard is None or not self._shard.is_open:
                    self._shard = shard
                if self._run.config.logical is not None:
                    sizes, is_even = shard.part_sizes(shard.steps)
                    self._run.states.setdefault(PART_SIZES, {})[sum(sizes)] = sizes, is_even
                shard.steps, shard.is_open = shard.steps + 1, True
                yield batch
            shard.is_exhausted = True
            self._shard = shard
            weight.end_epoch()

    def _batches(self, shard: EpochShard) -> Iterator[Any]:
        source, device, options = self._source, self._run.device, self._options
        batches = unwatched_batches(source.batches(shard))
        if options.to_device and device != torch.device("cpu"):
            are_fresh = getattr(source.loader, "num_workers", 0) > 0
            batches = move_batches(batches, device, prefetch=options.prefetch, are_fresh=are_fresh)
        if options.progress and self._run.world.is_main:
            label = f"epoch {shard.position.epoch}" if options.progress is True else options.progress
            from tqdm.auto import tqdm  # imported late: in a notebook without ipywidgets it warns

            batches = iter(
                tqdm(batches, total=source.steps(shard.split), desc=label, unit=" batches", dynamic_ncols=True)
            )
        return batches

    def _check_order(self, shard: EpochShard) -> None:
        """Compare an order with that of an interrupted epoch, and with those of the other ranks."""
        position, steps = shard.position, self._source.steps(shard.split)
        order, saved = shard.fingerprint(), position.order
        # Hashes of streams tell where all processes take as many units in a step.
        if order and saved not in ("", order) and saved.partition("/")[2] == order.partition("/")[2]:
            warnings.warn(
                f"the resumed epoch {position.epoch} of {self._name} has another order or other samples "
                "than when its state was saved, so that samples may be repeated or skipped: use "
                "shard_loader(loader, seed=0), seed generators and random splits, sort lists of files, and "
                "give a sampler that counts its epochs a method set_epoch(epoch)",
                stacklevel=4,
            )
        if self._run.world.world_size > 1:
            length = "" if steps is None or shard.split.tail == "exact" else f", {steps} batches"
            start = f" from {position.start}" if position.start else ""
            text = f"iterates epoch {position.epoch}{start}{length}, order {order or 'unknown'}"
            check = ConsistencyCheck(
                self._name,
                text,
                fix="use the same data, seeds and set_epoch() calls on all processes, and train with a tail "
                "other than 'exact'; what draws random numbers of its own needs the same seed on all "
                "processes, and what shards itself divides='processes'",
            )
            shard.kept = check, ActiveLoader(self._source.batch_summary())
            # At the model's first step; what is drawn by the user's code already now.
            if order and not isinstance(shard.order, (range, torch.Tensor)):
                run_checks(f"data/{position.epoch}/{next(_compared)}")

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
        return self._position_to_save().epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next `iter()`, and start that epoch from its beginning."""
        self._start_at(Position(epoch), first_epoch=0)

    def _start_at(self, position: Position, first_epoch: int) -> None:
        self._first_epoch, self._next, self._shard = first_epoch, position, None
        # A sampler's length may depend on it.
        self._source.set_epoch(first_epoch + position.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as plain values.

        It is equal on all processes that have made equally many steps.
        """
        position = self._position_to_save()
        return {
            "epoch": position.epoch,
            "first_epoch": self._first_epoch,
            "start": position.start,
            "order": position.order,
            **self._identity(position.start),
        }

    def _identity(self, start: int) -> dict[str, Any]:
        """Return what a state at a position must match."""
        return {**self._source.identity, **(self._source.identity_within if start else {})}

    def _position_to_save(self) -> Position:
        """Return the position after the latest batch."""
        shard = self._shard
        if shard is None or shard.is_exhausted:
            return self._next_position()
        start = shard.split.start_after(shard.steps)
        return Position(shard.position.epoch - self._first_epoch, start, shard.fingerprint())

    def rank_state(self) -> dict[str, Any] | None:
        """Return a state of this process's dataset, from which a resumed epoch goes on, if any."""
        found: dict[str, Any] | None = self._source.recorded
        return found if self._position_to_save().start else None

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Let the epoch of the loaded position go on from a state of `rank_state`."""
        self._source.saved = state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state: the next `iter()` yields the rest of the epoch, then epochs follow.

        Args:
            state: the result of `state_dict`. Loaders over map-style datasets and iterables of
                batches resume with another batch size and another number of processes, too.

        Raises:
            ConfigError: the state was saved with another seed. Loaders over iterable datasets, and
                those that shard themselves, also require the same number of processes and, within
                an epoch, the same batches.
        """
        self.check_position(state)
        position = Position(state["epoch"], state["start"], state.get("order", ""))
        self._start_at(position, state.get("first_epoch", 0))

    def check_position(self, state: Any) -> None:
        """Raise a ConfigError if `load_state_dict` cannot resume from a state; change nothing."""
        if not isinstance(state, Mapping):
            raise _no_position(f"a {type(state).__name__}")
        for name in ("epoch", "start", "first_epoch"):
            number = state.get(name, 0 if name == "first_epoch" else None)
            if type(number) is not int or not 0 <= number < 2**62:
                raise _no_position(f"{name}={reprlib.repr(number)}")
        if type(state.get("order", "")) is not str:
            raise _no_position(f"order={reprlib.repr(state['order'])}")
        if self._source.is_beyond(state["start"]):
            raise _no_position(f"start={state['start']} of {self._source.length()} samples")
        for name, expected in self._identity(state["start"]).items():
            saved = state.get(name)
            if isinstance(saved, torch.Tensor) or saved != expected:
                raise ConfigError(
                    f"a state saved with {name}={reprlib.repr(saved)} is loaded with {name}={expected!r}",
                    why="the rest of the epoch would have other samples, or another order",
                    fix=f"restore the loader with {name}={reprlib.repr(saved)}, or start an epoch with set_epoch()",
                )

    def check_rank_state(self, state: Any) -> None:
        """Raise a ConfigError if `load_rank_state` cannot take a state; change nothing."""
        types = {"epoch": int, "batches": int, "next": str}
        is_state = isinstance(state, Mapping) and "state" in state
        if not is_state or any(type(state.get(name)) is not kind for name, kind in types.items()):
            raise _no_position(f"the state of a dataset {reprlib.repr(state)}")

    def gather(self, results: Any) -> Any:
        """Gather per-sample results of all processes in dataset order; every process has to call it.

        Args:
            results: a tensor, or containers of tensors, with one row for each sample that this
                process was given since `iter()`, in the same order; for example torch.cat of the
                outputs of all batches.

        Returns:
            The same containers on every process, with one row for each sample that any process was
            given, sorted by index, without repeats.

        Raises:
            ConfigError: rows are missing, or the loader has no indices.
            SyncError: the processes have iterated different epochs or orders.
        """
        return self._iterated("gather").gather(results)

    def mean(self, value: Any) -> float:
        """Average a value over the samples of all processes; every process has to call it.

        Args:
            value: the mean over the samples that this process was given since `iter()`, or a list
                or tensor with the mean of each of its batches.

        Raises:
            ConfigError: some samples came twice, values are missing, or the loader has no indices.
            SyncError: the processes have iterated different epochs or orders.
        """
        return self._iterated("mean").mean(value)

    def _iterated(self, what: str) -> EpochShard:
        if self._shard is None:
            raise ConfigError(
                f"{what} on a loader that was not iterated",
                why="results belong to the samples that were iterated",
                fix="iterate the loader first",
            )
        return self._shard


def _no_position(what: str) -> ConfigError:
    return ConfigError(
        f"a loader cannot go on from {what}",
        why="it is not a position in this data, as state_dict() returns it",
        fix="load another checkpoint, or leave the loader out and start an epoch with set_epoch()",
    )


def _warn_of_update_bn(frame: Any) -> None:
    """Warn if torch's update_bn iterates, also through a progress bar: it runs no collectives."""
    code = inspect.unwrap(update_bn).__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is not None and is_main():
        warnings.warn(
            "update_bn of a sharded loader gives each rank the batch norm statistics of its part of the data, and rank "
            "0's are kept. For those of all data, pass the DataLoader itself: update_bn(loader, model, device())",
            stacklevel=user_stacklevel(),
        )
