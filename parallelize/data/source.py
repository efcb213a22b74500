"""Source: adapter for one kind of loader, which gives this process's share of each epoch."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from parallelize.collectives import all_gather
from parallelize.data.rng import sampler_seed
from parallelize.data.sampling import (
    EpochSplit,
    Tail,
    indices_of,
    order_fingerprint,
    rows_in_dataset_order,
    sample_fingerprint,
)
from parallelize.errors import ConfigError, Fault, SyncError, did_you_mean
from parallelize.runtime.containers import map_leaves
from parallelize.runtime.context import Runtime
from parallelize.runtime.rng import derive_seed

__all__ = [
    "Batch",
    "Divides",
    "EpochShard",
    "LoaderOptions",
    "Position",
    "Source",
    "copy_of",
    "length_of",
    "merged_ranks",
    "view_of",
]

Batch = Literal["per_process", "global"]

Divides = Literal["nothing", "workers", "processes"]
"""How data shards itself: not at all, over the "workers" that get_worker_info() returns, or over
the "processes" (and workers)."""

# Sampler or dataset -> its epoch after a loader has told it: two loaders may share it.
_told_epochs: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

merged_ranks: ContextVar[int] = ContextVar("parallelize_merged_ranks", default=1)
"""Number of ranks whose batches this one process reads in each step."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The options of `shard_loader`, as documented there.

    Raises:
        ConfigError: options are invalid; the error lists all of them.
    """

    tail: Tail | None = None
    batch: Batch = "per_process"
    seed: int | None = None
    limit: float | None = None
    progress: bool | str = False
    to_device: bool = True
    prefetch: int = 1
    divides: Divides | None = None

    def __post_init__(self) -> None:
        limit, faults = self.limit, []
        for name, known in (("tail", Tail), ("batch", Batch), ("divides", Divides)):
            value, choices = getattr(self, name), get_args(known)
            is_choice = isinstance(value, str) and value in choices
            if not is_choice and (value is not None or name == "batch"):
                fix = did_you_mean(str(value), choices)
                faults.append(Fault(f"{name}={value!r}", "the value is not known", fix))
        is_part = type(limit) is float and 0 < limit <= 1
        for name, is_valid, fix in (
            ("seed", self.seed is None or _is_count(self.seed), "an integer below 2**63"),
            ("limit", limit is None or is_part or (limit and _is_count(limit)), "100 batches, or 0.1 of them"),
            ("prefetch", _is_count(self.prefetch), "a number of batches to copy ahead"),
            ("progress", isinstance(self.progress, (bool, str)), "True, False, or the label of the bar"),
            ("to_device", isinstance(self.to_device, bool), "True or False"),
        ):
            if not is_valid:
                value = getattr(self, name)
                faults.append(Fault(f"{name}={value!r}", "the value is not known", f"pass {fix}"))
        if faults:
            raise ConfigError.of(faults)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


@dataclass(frozen=True)
class Position:
    """A position in the data, at which an epoch shard starts.

    Args:
        epoch: its number, from 0.
        start: number of its units that are already consumed; each `Source` defines its unit.
        order: hash of the order of an interrupted epoch.
    """

    epoch: int = 0
    start: int = 0
    order: str = ""


@dataclass(eq=False)
class EpochShard:
    """One process's share of the rest of one epoch, and how far it was iterated.

    Args:
        source: the loader's.
        position: where it starts.
        split: how the units are shared; the number of a stream's units may be an estimate.
        order: all units of the epoch; None if they are not known in advance.
        stream: the units of an epoch without `order`, from its beginning.
        first: hash of a stream's first units or samples, once drawn; "" if not compared.
        steps: number of batches that were yielded.
        is_exhausted: whether all batches were yielded.
        is_open: whether it has yielded a batch, and is neither exhausted nor left.
        kept: what the model's first step looks at.
    """

    source: Source
    position: Position
    split: EpochSplit
    order: Any = None
    stream: Iterable[Any] = ()
    first: str = ""
    steps: int = 0
    is_exhausted: bool = False
    is_open: bool = False
    kept: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the unit or the list of units of each step."""
        source, split = self.source, self.split
        source.is_iterated = True
        batches: Iterable[Sequence[Any]]
        if self.order is not None:
            shares = [split.batches(self.order, share) for share in source.shares]
            steps = itertools.zip_longest(*shares, fillvalue=())
            batches = shares[0] if len(shares) == 1 else map(list, map(itertools.chain.from_iterable, steps))
        else:
            stream = self.stream if source.is_own else self._hashed_stream()
            batches = split.batches_of_stream(stream, source.rank)
        return map(list, batches) if source.is_grouped else (batch[0] for batch in batches)

    def _hashed_stream(self) -> Iterator[Any]:
        stream, split = iter(self.stream), self.split
        # As many units as rank 0 draws for its first batch. Other ranks draw more.
        first = list(itertools.islice(stream, split.group - split.world_size + 1))
        self.first = f"{sample_fingerprint(first)}/{split.group}"
        yield from first
        del first
        yield from stream

    def fingerprint(self) -> str:
        """Return a hash of the order, which processes compare; "" if the order is unknown."""
        if self.order is None:
            return self.first
        return order_fingerprint(self.order) + self.source.data

    def weight(self, step: int) -> float:
        """Return the weight of this process's gradients, with which they average over samples.

        It is this process's fraction of the step's samples, times the world size.
        """
        if self.order is None or self.split.tail != "weighted":
            return 1.0
        everywhere = self._samples_at(self.split.taken(range(step, step + 1)))
        return self._own_samples(step) * self.split.world_size / everywhere

    def _own_samples(self, step: int) -> int:
        """Count this process's samples in a step, without repeats."""
        taken = self.split.taken(range(step, step + 1))
        return sum(self._samples_at(taken[share :: self.split.world_size]) for share in self.source.shares)

    def part_sizes(self, step: int) -> tuple[list[int], bool]:
        """Return the number of samples of each share of this process in a step, and whether all shares have as many."""
        split = self.split
        first, last = (len(split.positions(share, step)) for share in (0, split.world_size - 1))
        return [self._samples_at(split.positions(share, step)) for share in self.source.shares], first == last

    def _samples_at(self, positions: Sequence[int]) -> int:
        if self.source.is_grouped:
            return len(positions)
        order = self.order
        return sum(len(indices_of(order[each % len(order)])) for each in positions)

    def mean(self, value: Any) -> float:
        """Average over the samples of all processes (see `ShardedLoader.mean`)."""
        self._steps_by_rank("mean")
        if self.split.tail not in ("exact", "drop"):
            raise ConfigError(
                f"mean over a loader with tail={self.split.tail!r}",
                why="some samples may have come twice, so that this process's values hold them twice",
                fix="use shard_loader(loader, tail='exact'), or loader.gather(values of samples).mean()",
            )
        sizes = list(map(self._own_samples, range(self.steps)))
        values = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().flatten()
        weights = {len(sizes): sizes, 1: [sum(sizes)]}.get(len(values))
        if weights is None:
            raise ConfigError(
                f"mean of {len(values)} values",
                why=f"this process was given {len(sizes)} batches since iter()",
                fix="pass the mean over this process's samples, or that of each batch",
            )
        local = float(values @ values.new_tensor(weights)) if sum(sizes) else 0.0
        totals, counts = all_gather([local, sum(sizes)])
        return float(sum(totals) / sum(counts))

    def gather(self, results: Any) -> Any:
        """All-gather one row for each sample (see `ShardedLoader.gather`)."""
        split = self.split
        rank = self.source.rank // split.parts
        steps_by_rank = self._steps_by_rank("gather")
        counts, rows = rows_in_dataset_order(split, self.order, steps_by_rank)
        count, longest = counts[rank], max(counts)
        total = sum(sum(self.part_sizes(step)[0]) for step in range(self.steps))

        def padded(leaf: Any) -> Tensor:
            shape = list(getattr(leaf, "shape", [type(leaf).__name__]))
            if shape[:1] != [total]:
                raise ConfigError(
                    f"gather of a value of shape {shape}",
                    why=f"this process was given {total} samples since iter(), each needs a tensor's row",
                    fix="collect the output of every batch, and use loader.gather(torch.cat(outputs))",
                )
            local: Tensor = leaf[:count]
            return torch.cat([local, local.new_zeros((longest - count, *local.shape[1:]))])

        gathered = all_gather(map_leaves(padded, results))  # (longest, *S) -> (W, longest, *S)
        return map_leaves(lambda leaf: leaf.flatten(0, 1)[rows], gathered)

    def _steps_by_rank(self, what: str) -> Any:
        """Gather each process's number of steps, and require that all have one order."""
        if self.order is None:
            raise ConfigError(
                f"{what} on a loader without indices",
                why="samples are counted by the indices that were iterated",
                fix="use parallelize.all_gather, or all_reduce of sums and counts",
            )
        order = derive_seed(self.split, self.position.epoch, self.fingerprint())
        steps_by_rank, orders = all_gather([self.steps, order])
        if others := [rank for rank, each in enumerate(orders) if each != orders[0]]:
            raise SyncError(
                f"{what} on ranks that have iterated different epochs or orders: {others} and 0",
                why="each process computes from its own order which samples the others were given",
                fix="iterate the loader equally often on all processes, with the same data, seeds and "
                "set_epoch() calls; on one process alone, use a separate loader",
            )
        return steps_by_rank


def copy_of(loader: DataLoader[Any], **changes: Any) -> Any:
    """Return a copy of a loader, made without its constructor, without its iterator and workers."""
    copy = object.__new__(type(loader))
    # DataLoader.__setattr__ forbids changes after construction. States, weights and gather() need
    # batches in order, whatever in_order= the loader has.
    vars(copy).update(vars(loader), _iterator=None, in_order=True, **changes)
    return copy


def view_of(loader: DataLoader[Any]) -> Any:
    """Return an object with a loader's class and its very attributes, which does not keep the loader alive."""
    view = object.__new__(type(loader))
    object.__setattr__(view, "__dict__", vars(loader))
    return view


class Source:
    """Adapter for one kind of loader; it replaces only the source of its indices or samples.

    Args:
        loader: object on which attributes are looked up and set: the user's iterable, or the view of a loader.
        is_own: whether each process has units of its own.
        tells: samplers and datasets, which are told the epoch if they have a method `set_epoch`, or
            Mosaic's property `next_epoch`.
    """

    is_indexed = False
    """Whether its units are indices, or batches of them."""
    copy: Any = None
    """A copy of the user's DataLoader, which makes the batches."""
    not_followed: tuple[str, ...] = "in_order", "pin_memory", "_iterator", "_IterableDataset_len_called"
    """Attributes that the copy has of its own, whatever the user sets."""
    is_iterated = True
    """Whether the copy's iterator has asked the replaced sampler for indices."""
    is_grouped = False
    """Whether a step takes a list of units; if false, it takes a single unit."""
    drop_last = False
    """Whether an incomplete last step is left out."""
    data = ""
    """Text that identifies the data, which processes compare."""
    saved: Any = None
    """A state of the dataset from which to resume."""
    recorded: Any = None
    """The latest state of the dataset."""

    def __init__(
        self,
        loader: Any,
        options: LoaderOptions,
        run: Runtime,
        *,
        is_own: bool = False,
        tells: Sequence[Any] = (),
    ) -> None:
        self.loader, self.options, self.run, self.is_own = loader, options, run, is_own
        self._followed = dict(getattr(loader, "__dict__", ()))
        world = run.world
        parts = (run.config.logical or world.world_size) // world.world_size  # that one process reads
        self.rank, self.shards = (0, 1) if is_own else (world.rank * parts, world.world_size * parts)
        self.shares = range(self.rank, self.rank + (1 if is_own else parts))
        self.group = self.shards  # number of units that all shards together take in a step
        self.merged = merged_ranks.get()
        # What a saved state must match, always and within an epoch.
        self.identity: dict[str, Any] = {"world_size": world.world_size} if is_own else {}
        self.identity_within: dict[str, Any] = {}
        self._told = {id(each): each for each in tells if hasattr(each, _setter(each))}.values()

    def check(self, name: str, length: int | None, *, drop_last: bool = False) -> None:
        """Raise a ConfigError for options that this kind of data does not support."""
        tail, limit = self.options.tail, self.options.limit
        is_weighted = tail == "weighted" and (length is None or not self.is_indexed)
        option = "tail='weighted'" if is_weighted else f"limit={limit!r}"
        for is_wrong, what, why, fix in (
            (
                tail == "exact" and drop_last,
                "tail='exact' with drop_last=True in",
                "the one yields each sample once, the other leaves out the last ones",
                "drop_last=False, or tail='drop'",
            ),
            (
                tail == "weighted" and bool(self.run.config.logical),
                f"tail='weighted' under logical={self.run.config.logical} with",
                "its weights depend on the number of processes",
                "tail='pad' or 'drop'",
            ),
            (
                is_weighted or (isinstance(limit, float) and length is None),
                f"{option} with",
                "the number of samples or batches is unknown",
                "tail='pad' or 'drop', and a number of batches, as in limit=100",
            ),
            (
                self.options.batch == "global"
                and (not self.is_indexed or (length is None and self.group % self.shards)),
                "batch='global' with",
                "batches are not split between processes: each one, or its worker, makes its own",
                "the batch size of one process",
            ),
        ):
            if is_wrong:
                raise ConfigError(f"{what} {name}", why=why, fix=f"use {fix}")

    def follow(self) -> None:
        """Give the copy what the user has set on the loader since the last call."""
        if self.copy is None:
            return
        if getattr(self.loader, "next_iter_state", None) is not None:  # torchdata's StatefulDataLoader
            raise ConfigError(
                f"a {type(self.loader).__name__} whose own state was loaded",
                why="the state counts batches of the unsharded loader: each process would skip as many",
                fix="save shard_loader(loader).state_dict(), and shard_loader(loader).load_state_dict(state)",
            )
        before, self._followed = self._followed, dict(vars(self.loader))
        for name in before.keys() - self._followed.keys():
            vars(self.copy).pop(name, None)
        for name, value in self._followed.items():
            if value is not before.get(name) and name not in self.not_followed:
                vars(self.copy)[name] = value

    def shard(self, position: Position, tail: Tail) -> EpochShard:
        """Return this process's share of an epoch, from a position on; runs no collective."""
        self.set_epoch(position.epoch)
        order, stream = self.units(position.epoch, tail)
        length = self.length() if order is None else len(order)  # the order tells its number
        return EpochShard(self, position, self.split(position, tail, length), order, stream)

    def units(self, epoch: int, tail: Tail) -> tuple[Any, Any]:
        """Return all units of an epoch, or None and a stream of them."""
        raise NotImplementedError

    def batches(self, shard: EpochShard) -> Iterator[Any]:
        """Yield the batches of a shard; called only once."""
        raise NotImplementedError

    def length(self) -> int | None:
        """Return the number of units of an epoch, as the data tells; None: unknown."""
        raise NotImplementedError

    def is_beyond(self, start: int) -> bool:  # noqa: ARG002 - the end of a stream is not known
        """Return whether a position is certainly behind the last unit of an epoch."""
        return False

    def base_seed(self) -> int:
        """Return the seed of what the dataset draws: that of the options, else of the loader, else of torch."""
        seed = self.options.seed
        return sampler_seed(self.loader, torch.initial_seed()) if seed is None else seed

    def iterate(self, position: Position, first: int) -> Iterator[Any]:
        """Yield the copy's batches; workers draw other numbers on every process and epoch."""
        copy = self.copy
        seed = derive_seed("workers", self.base_seed(), self.run.world.rank, position.epoch, first)
        vars(copy)["generator"] = torch.Generator().manual_seed(seed)
        batches: Any = iter(copy)
        try:
            for batch in batches:
                if not self.is_iterated:
                    raise ConfigError(
                        f"{type(copy).__name__} does not use its sampler when it is iterated",
                        why="its indices come from elsewhere, so every process would get all of them",
                        fix="pass shard_loader a DataLoader that creates its iterator in __iter__",
                    )
                yield batch
        finally:
            if not copy.persistent_workers:
                self._shut_down(batches)

    def close(self) -> None:
        """Shut down persistent workers."""
        if self.copy is not None:
            self._shut_down(self.copy._iterator)

    def _shut_down(self, batches: Any) -> None:
        # Garbage collection may be late: a traceback may hold the iterator, as StatefulDataLoader.
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
        vars(self.copy)["_iterator"] = None

    def split(self, position: Position, tail: Tail, length: int | None) -> EpochSplit:
        """Return how the units of an epoch, from a position on, are shared."""
        logical = self.run.config.logical
        if (self.merged > 1 and not self.is_grouped) or (logical and (not self.is_grouped or length is None)):
            raise ConfigError(
                f"{f'{logical=}' if logical else 'compare'} with a {type(self.loader).__name__} that has no indices, "
                "or shards itself",
                why="one process cannot read the batches of several ranks from it",
                fix="use shard_loader(DataLoader(dataset, batch_size=...)) of a dataset with __getitem__",
            )
        return EpochSplit(
            total=sys.maxsize if length is None else length,
            start=position.start,
            world_size=self.shards,
            group=self.group,
            tail=tail,
            drop_last=self.drop_last,
            parts=len(self.shares),
        ).limited(self.options.limit)

    def steps(self, split: EpochSplit) -> int | None:
        """Count this process's batches; None if unknown."""
        return None if split.total == sys.maxsize else split.steps(self.rank)

    def batch_summary(self) -> str:
        """Return the batch size per process and the global one, for logs; may be empty."""
        return ""

    def set_epoch(self, epoch: int) -> None:
        """Tell every sampler and dataset the epoch."""
        for each in self._told:
            if _setter(each) == "set_epoch":
                each.set_epoch(epoch)
            else:
                each.next_epoch = epoch
            with contextlib.suppress(TypeError):  # it cannot be hashed, or referenced weakly
                _told_epochs[each] = getattr(each, "epoch", None)

    def epoch_set_by_user(self) -> int | None:
        """Return the epoch that the user has set on a sampler or dataset since `set_epoch`."""
        for each in self._told:
            with contextlib.suppress(TypeError):
                epoch, told = getattr(each, "epoch", None), _told_epochs.get(each, 0)
                if isinstance(epoch, int) and epoch != told:
                    return epoch
        return None


def length_of(sized: Any) -> int | None:
    """Return the length of a dataset or sampler; None if it has or knows none."""
    try:
        return len(sized)
    except Exception:  # noqa: BLE001 - TypeError, ValueError (PyG's samplers), NotImplementedError
        return None


def _setter(listener: Any) -> str:
    is_property = isinstance(getattr(type(listener), "next_epoch", None), property)
    return "next_epoch" if is_property else "set_epoch"
