"""Source of a DataLoader over a map-style dataset: its indices are divided, not its samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, Subset

from parallelize.data.copied_loader import (
    CopiedLoader,
    StandIn,
    find_batch_sampler,
    is_exactly,
    view_of,
    with_stand_in,
)
from parallelize.data.divided import CountedSampler, dividing_sampler
from parallelize.data.draws import Drawing
from parallelize.data.options import LoaderOptions, Position
from parallelize.data.source import Pass, Source, length_of
from parallelize.data.units import Tail, order_fingerprint
from parallelize.errors import ConfigError
from parallelize.run.context import Runtime
from parallelize.run.data_ranks import DataRanks
from parallelize.run.generators import derive_seed, global_generators

# More units are drawn while they are iterated, but for torch's RandomSampler, which is a tensor.
_MOST_LISTED = 2**24
_MORE_THAN_LENGTH = 2**12
_MOST_PADDED = 1_000_000
"""Units that the last step of a pass adds, at any batch size."""


class IndexedSource(Source):
    """Source for a DataLoader over a map-style dataset.

        the loader's sampler              a unit              a step of all processes
        in torch's BatchSampler           an index            a batch of each process
          with batch="global"             an index            one batch
        of batches                        a list of indices   a batch of each process
          with batch="global"             a list of indices   one batch, which they share
        no batches (batch_size=None)      an index            an index of each process
        one that divides the data         what it yields      what it yields

    Raises:
        ConfigError: options do not fit the loader.
    """

    is_indexed = True

    def __init__(
        self,
        loader: DataLoader[Any],
        options: LoaderOptions,
        run: Runtime,
        topic: str,
    ) -> None:
        samplers = _Samplers.of(loader, options, run.data_ranks)
        outer, divider, grouper = samplers
        self._grouper, self._divider_name = grouper, type(divider).__name__
        self._sampler: Any = samplers.of_units()
        super().__init__(
            view_of(loader),
            options,
            run,
            topic,
            divides_itself=divider is not None,
            drawers=[self._sampler, getattr(self._sampler, "sampler", None), divider],
            dataset=loader.dataset,
        )
        self.is_grouped = grouper is not None
        self.is_compared = divider is None and options.divides != "nothing"
        self.divides_batches = (
            loader.batch_sampler is not None
            and grouper is None
            and divider is None
            and options.batch == "global"
            and run.world.world_size > 1
        )
        self._counted = CountedSampler(divider)
        self.copied = CopiedLoader(loader, self._replaced(loader, outer))
        if self.divides_itself:
            self.identity_within["batch_size"] = loader.batch_size
        elif options.seed is not None:
            self.identity["seed"] = options.seed
        self.follow()
        dataset = loader.dataset
        while isinstance(dataset, Subset):  # ranks that split a dataset differently are refused
            self.data_text += f" of the subset {order_fingerprint(dataset.indices)}"
            dataset = dataset.dataset

    def _replaced(self, loader: DataLoader[Any], outer: Any) -> dict[str, Any]:
        """Return the attributes that the copy has in place of the user's.

        Args:
            loader: the user's.
            outer: its batch sampler, or its sampler if it has none.
        """
        replaced: dict[str, Any] = {}
        if self._grouper is not None:
            stand_in = StandIn(self._grouper, self._units, self._steps_of_share)
            replaced["batch_sampler"] = with_stand_in(loader.batch_sampler, stand_in)
        else:
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            replaced[name] = StandIn(outer, self._units, self._steps_of_share)
        if self.run.config.logical is not None:
            replaced["dataset"] = _SeededSamples(loader.dataset)
        return replaced

    def follow(self) -> None:
        """Give the copy what the user has set, also on the sampler of batches."""
        super().follow()
        size = None
        if self._grouper is not None:
            size, self.drop_last = self._grouper.batch_size, self._grouper.drop_last
        self._set_group(size)

    def length(self) -> int | None:
        """Return the sampler's length."""
        return length_of(self._sampler)

    def is_beyond(self, start: int) -> bool:
        """Return whether more units were consumed than there are, and than a last step may add."""
        length = self.length()
        return length is not None and start > length + max(length, _MOST_PADDED)

    def default_tail(self) -> Tail:
        """Return "weighted" if a batch is divided: gradients then are those of one process."""
        if self.options.batch == "per_process" or self.run.world.world_size == 1:
            return "pad"
        if self.run.config.logical is not None or not self.is_listed():
            return "pad"
        return "weighted"

    def evaluation_tail(self, *, steps_together: bool) -> Tail:
        """Return "weighted" if all processes make each step: repeats have weight 0."""
        has_empty_shares = self.divides_batches or self.group < self.share_count
        if not (steps_together or has_empty_shares):
            return "exact"
        if self.is_listed() and self.run.config.logical is None:
            return "weighted"
        return "pad"

    def is_listed(self) -> bool:
        """Whether all units of a pass are known before its first step."""
        if self.divides_itself:
            return False
        length = self.length()
        if length is None:
            # Batches that the processes share need weights, and so their order.
            return self.divides_batches
        return length <= _MOST_LISTED or _is_permutation(self._sampler)

    def batches(self, this_pass: Pass) -> Iterator[Any]:
        """Return the batches that the copy makes from this process's units; its workers start."""
        assert self.copied is not None
        self._counted.begin(this_pass.position.epoch)
        seed = self.workers_seed(this_pass, this_pass.position.start)
        return self.copied.iterate(seed, lambda: this_pass.has_begun)

    def _units(self) -> Iterator[Any]:
        """Return what the copy takes for each batch: the stand-in's iterator."""
        assert self.latest_pass is not None
        return self._units_of(self.latest_pass)

    def _units_of(self, latest: Pass) -> Iterator[Any]:
        """Begin a pass, and yield its units: a list of indices for each batch, or single ones."""
        this_pass = self.begin_pass(latest)
        if self.divides_itself:
            yield from this_pass.shares_of_stream(self._sampler)
            return
        if is_exactly(self._sampler, SequentialSampler) and self.run.config.logical is None:
            shares = self._shares_of_order(this_pass, range(len(self._sampler)))
        else:
            shares = self._shares_drawn(this_pass)
        if self.run.config.logical is None:
            yield from shares
            return
        seed = derive_seed("samples", this_pass.text_of_states())
        for indices in shares:
            yield [(index, derive_seed(seed, index)) for index in indices]

    def _shares_drawn(self, this_pass: Pass) -> Iterator[Any]:
        """Draw the order of a pass as one process does, and yield this process's units of it.

        torch's RandomSampler             its permutation is drawn at once, as a tensor
        one with an end to be listed      all of its units are drawn at once
        one that yields more than that    goes on as an endless one, from what was drawn
        endless, or very long             drawn for some steps at a time, while it is read
        """
        drawing = self.begin_drawing(this_pass)
        if _is_permutation(self._sampler):
            yield from self._shares_of_permutation(this_pass, drawing)
            return
        length = self.length()
        if not self.is_listed():
            self.check(f"the endless {type(self._sampler).__name__}", None)
            stream = drawing.stream(self._sampler, self.group)
            yield from this_pass.shares_of_stream(stream)
            return
        # A length may be an estimate. A sampler that yields more than twice as much is endless.
        most = _MOST_LISTED
        if length is not None:
            most = 2 * length + _MORE_THAN_LENGTH
        stream = drawing.stream(self._sampler, self.group, first=most)
        order = list(itertools.islice(stream, most))
        has_ended = len(order) < most
        if has_ended:
            yield from self._shares_of_order(this_pass, order)
            return
        # Its options were accepted for its length, which it does not have.
        self.check(f"the endless {type(self._sampler).__name__}", None)
        this_pass.split = self.split(this_pass.position, this_pass.split.tail, None)
        yield from this_pass.shares_of_stream(itertools.chain(order, stream))

    def _shares_of_permutation(self, this_pass: Pass, drawing: Drawing) -> Iterator[Any]:
        """Draw as RandomSampler.__iter__, but in a tensor: a list takes ten times its memory."""
        sampler = self._sampler
        length = len(sampler)
        # The values are the same in both dtypes.
        dtype = torch.int32 if length < 2**31 else torch.int64
        generator = sampler.generator
        with drawing.block():
            if generator is None:
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
                generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(length, generator=generator, dtype=dtype)
        yield from self._shares_of_order(this_pass, order)
        if sampler.generator is not None:
            # At its end, torch draws `randperm(n)[: num_samples % n]`, and uses none of it.
            torch.randperm(length, generator=generator, dtype=dtype)

    def _shares_of_order(self, this_pass: Pass, order: Any) -> Iterator[Any]:
        """Return this process's units of an order."""
        this_pass.order = order
        # The order tells its number, which the length may not.
        this_pass.split = self.split(this_pass.position, this_pass.split.tail, len(order))
        return this_pass.shares()

    def _steps_of_share(self) -> int:
        """Count the units of the stand-in in the latest pass; before any, in the first one."""
        if self.latest_pass is not None:
            split = self.latest_pass.split
        else:
            tail = self.options.tail or self.default_tail()
            split = self.split(Position(), tail, self.length())
        return self.steps(split) or 0

    def batch_summary(self) -> str:
        """Return the batch size per process and the global one, or the sampler that divides."""
        if self.divides_itself:
            return f"already sharded by its {self._divider_name}: left as it is"
        if self.divides_batches:
            return f"the sampler's batches, each divided over {self.share_count} processes"
        size = f"{self.group / self.share_count:g}"
        parts = f"{self.share_count} processes"
        if len(self.shares) > 1:
            parts = f"{self.share_count} parts"
        summary = f"{size} x {parts} = {self.group} global"
        if not self.is_grouped:
            summary += " of the sampler's batches"
        length = self.length()
        if self.drop_last and length is not None:
            tail = self.options.tail or self.default_tail()
            taken = self.split(Position(), tail, length).steps(self.share) * self.group
            if taken < length:
                summary += f", drop_last leaves out {length - taken} samples"
        return summary

    def _set_group(self, size: int | None) -> None:
        """Set the number of units that all processes together take in a step.

        Args:
            size: of the user's batches; None: the sampler makes them, or there are none.

        Raises:
            ConfigError: options do not fit the loader.
        """
        options, length = self.options, self.length()
        is_global = options.batch == "global"
        if self.divides_itself:
            self._check_divided()
        if self.divides_batches:
            self._check_divided_batches()
            self.group = 1
            return
        name = type(self._sampler).__name__
        if length is None:
            name += ", which has no length"
        self.check(name, length, drop_last=self.drop_last)
        if not is_global:
            self.group = (size or 1) * self.share_count * self.merged
        elif size is not None:
            self._check_global(size)
            self.group = size
        elif self.run.world.world_size == 1:
            self.group = 1
        else:
            raise ConfigError(
                "batch='global' with a loader that has no batch size",
                why="its sampler makes single items, which are not split between processes",
                fix="use batch='per_process', or DataLoader(batch_size=...)",
            )

    def _check_divided(self) -> None:
        """Raise a ConfigError for options of data that is divided already."""
        option = ""
        if self.options.batch == "global":
            option = "batch='global'"
        elif self.options.tail not in (None, "pad"):
            option = f"tail={self.options.tail!r}"
        if option:
            raise ConfigError(
                f"{option} with a loader that {self._divider_name} already shards",
                why="its sampler decides which samples are repeated or left out",
                fix=f"remove {self._divider_name}: shard_loader shards the loader itself",
            )

    def _check_divided_batches(self) -> None:
        """Raise a ConfigError for options of batches of a sampler that the processes share."""
        tail = self.options.tail
        if tail not in (None, "weighted") or self.run.config.logical is not None:
            option = f"logical={self.run.config.logical}"
            if tail:
                option = f"tail={tail!r}"
            raise ConfigError(
                f"batch='global' of a sampler's batches with {option}",
                why="the processes share each batch, of any size: their parts may differ by one",
                fix="use tail='weighted', which weights gradients by the number of samples, or "
                "batch='per_process'",
            )

    def _check_global(self, size: int) -> None:
        """Raise a ConfigError for a batch whose parts would be averaged as if they were equal."""
        shares, tail = self.share_count, self.options.tail
        may_be_uneven = self.default_tail() == "weighted" and tail in (None, "weighted")
        may_be_uneven = may_be_uneven or (tail == "exact" and size >= shares and self.is_listed())
        if size % shares and not may_be_uneven:
            raise ConfigError(
                f"batch='global' with batch_size={size} on {shares} processes",
                why="it does not divide evenly: gradients of unequal batches would be averaged as "
                "if equal",
                fix=f"use batch_size={max(size // shares, 1) * shares}, or tail='weighted'",
            )


def _is_permutation(sampler: Any) -> bool:
    """Whether a sampler is torch's own that yields each index once, in random order."""
    # torchdata's draws otherwise, and is iterated.
    if type(sampler) is not RandomSampler or sampler.replacement:
        return False
    return len(sampler) == len(sampler.data_source)


class _Samplers(NamedTuple):
    """The samplers of a loader.

        DataLoader(data, shuffle=True)               outer: the BatchSampler, which is the grouper
                                                     units: of grouper.sampler, a RandomSampler
        DataLoader(data, batch_sampler=own)          outer: own, whose units are batches
        DataLoader(data, batch_size=None)            outer: the SequentialSampler of single units
        DataLoader(data, sampler=distributed)        divider: the DistributedSampler

    Args:
        outer: the one that the loader iterates.
        divider: the one that divides the data over the processes; None: nothing does.
        grouper: torch's BatchSampler, if there is one and no divider.
    """

    outer: Any
    divider: Any
    grouper: Any

    @classmethod
    def of(
        cls, loader: DataLoader[Any], options: LoaderOptions, data_ranks: DataRanks
    ) -> _Samplers:
        """Return the samplers of the user's loader.

        Raises:
            ConfigError: one divides the data for another rank.
        """
        outer: Any = loader.batch_sampler
        if outer is None:
            outer = loader.sampler
        divider = None
        if options.divides == "processes":
            divider = outer
        elif options.divides is None:
            divider = dividing_sampler(loader, data_ranks)
        grouper = None
        if divider is None:
            grouper = find_batch_sampler(loader.batch_sampler)
        return cls(outer, divider, grouper)

    def of_units(self) -> Any:
        """Return the sampler that yields the units."""
        if self.grouper is None:
            return self.outer
        return self.grouper.sampler


class _SeededSamples(Dataset[Any]):
    """A dataset whose samples draw the same random numbers in whichever process they are read.

    It stands in the place of the user's dataset under `logical=`. An index comes with the seed of
    its sample, from which the global generators draw while the sample is read.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle looks these up before there is a dataset
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, seeded: Sequence[tuple[Any, int]]) -> list[Any]:
        """Return samples.

        Args:
            seeded: an index and its seed, for each sample.
        """
        samples = []
        accesses = global_generators([torch.device("cpu")]).values()
        before = [access.get() for access in accesses]
        try:
            for index, seed in seeded:
                for access in accesses:
                    access.seed(seed)
                samples.append(self._dataset[index])
        finally:
            for access, state in zip(accesses, before, strict=True):
                access.set(state)
        return samples
