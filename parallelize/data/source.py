"""Source: what one kind of loader reads. Pass: one process's part of a pass, and how far it is.

The life of a Pass:

    start_pass     `iter()` has made it, with a split by the length that the data tells
    begin_pass     the copied loader asks for units: the order is drawn, the split has its length
    steps += 1     a batch is handed to the loop: is_open
    is_exhausted   the loop has taken all batches; one that was left is neither open nor exhausted

A loader that keeps one iterator over all epochs begins the next Pass while this one is read: it
waits in `Source._ahead` for the `iter()` that it belongs to.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallelize.agreement.rank_consistency import ConsistencyCheck
from parallelize.data.copied_loader import CopiedLoader
from parallelize.data.draws import Drawing, Draws, States, states_from_text, text_of_states
from parallelize.data.options import LoaderOptions, Position
from parallelize.data.units import (
    UNKNOWN,
    EpochSplit,
    Tail,
    indices_of,
    order_fingerprint,
    sample_fingerprint,
    share_of_batch,
)
from parallelize.errors import ConfigError
from parallelize.run.context import Runtime, active_or
from parallelize.run.data_ranks import DataRanks
from parallelize.run.generators import derive_seed
from parallelize.run.loaders_of_run import ActiveLoader, Parts


@dataclass(eq=False)
class Pass:
    """One process's part of a pass, or of the rest of it, and how far it was read.

    Args:
        source: the loader's.
        position: where it starts.
        split: how the units are shared; until the order is drawn, by the length that the data has.
        has_gradients: whether gradients were enabled at `iter()`.
        order: all units of the pass; None: not drawn yet, or not known in advance.
        stream_hash: hash of a stream's first units or samples, once drawn; "" if not compared.
        states: of the random generators at the beginning of the pass, once drawn.
        steps: number of batches that were yielded.
        has_begun: whether its units were asked for.
        is_exhausted: whether all batches were yielded.
        is_open: whether it has yielded a batch, and is neither exhausted nor left.
        checks: what the model's first step looks at.
    """

    source: Source
    position: Position
    split: EpochSplit
    has_gradients: bool = True
    order: Any = None
    stream_hash: str = ""
    states: States | None = None
    steps: int = 0
    has_begun: bool = False
    is_exhausted: bool = False
    is_open: bool = False
    checks: tuple[ConsistencyCheck | ActiveLoader, ...] = ()

    def leave(self) -> None:
        """Note that the loop has ended, or was left."""
        self.is_open, self.checks = False, ()

    def fingerprint(self) -> str:
        """Return a hash of the order, which processes compare; "" if the order is unknown.

        That of a stream is of its first units, and ends with "/" and their number in a step.
        """
        if self.order is None:
            return self.stream_hash
        return order_fingerprint(self.order) + self.source.data_text

    def text_of_states(self) -> str:
        """Return the states at the beginning of the pass, as text."""
        if self.states is None:
            return ""
        return text_of_states(self.states)

    def shares(self) -> Iterator[Any]:
        """Yield what the copy takes in each step: a list of indices, or a single unit."""
        source, split = self.source, self.split
        if source.divides_batches:
            for step in range(split.steps(0)):
                yield self._part_of_batch(step)
            return
        if len(source.shares) == 1:
            batches = split.batches(self.order, source.share)
        else:
            batches = self._joined_batches()
        for batch in batches:
            yield self._unit_of_copy(batch)

    def shares_of_stream(self, units: Iterable[Any]) -> Iterator[Any]:
        """Yield the units of this process in each step, from units whose number is unknown."""
        source = self.source
        if not source.divides_itself:
            units = self._hashed(iter(units))
        for batch in self.split.batches_of_stream(units, source.share):
            yield self._unit_of_copy(batch)

    def _unit_of_copy(self, batch: Sequence[Any]) -> Any:
        """Return what the copy's sampler yields: a list of indices, or the only unit of a step."""
        if self.source.is_grouped:
            return list(batch)
        return batch[0]

    def _part_of_batch(self, step: int) -> list[Any]:
        """Return the indices of this process in a batch that all processes share."""
        batch = indices_of(self.order[self.split.start + step])
        return list(share_of_batch(batch, self.source.share, self.source.share_count))

    def _joined_batches(self) -> Iterator[Sequence[Any]]:
        """Yield the batch of each step, which is that of all shares of this process."""
        shares = [self.split.batches(self.order, share) for share in self.source.shares]
        for batches in itertools.zip_longest(*shares, fillvalue=()):
            yield list(itertools.chain.from_iterable(batches))

    def _hashed(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Yield units, of which the first are hashed, to be compared with the other ranks'."""
        # Rank 0 has its first batch when it has drawn this many: (its size - 1) rounds and a unit.
        # Other ranks draw more.
        first = list(itertools.islice(stream, self.split.group - self.split.shares + 1))
        self.stream_hash = f"{sample_fingerprint(first)}/{self.split.group}"
        yield from first
        del first
        yield from stream

    def indices_of_share(self, share: int, step: int) -> list[Any]:
        """Return the indices that a share has read in a step, without repeats at the end.

        Args:
            share: number of the share, which may be another process's.
            step: number of the step in this pass.
        """
        if self.source.divides_batches:
            batch = indices_of(self.order[self.split.start + step])
            return list(batch[share :: self.source.share_count])
        indices: list[Any] = []
        for position in self.split.positions_counted(share, step):
            indices += indices_of(self.order[position])
        return indices

    def count_once_of_share(self, share: int, step: int) -> int:
        """Count the samples of a share in a step, without repeats at the end."""
        if self.source.is_grouped and not self.source.divides_batches:
            return len(self.split.positions_counted(share, step))
        return len(self.indices_of_share(share, step))

    def count_once(self, step: int) -> int:
        """Count the samples of this process in a step, without repeats at the end."""
        return sum(self.count_once_of_share(share, step) for share in self.source.shares)

    def weight(self, step: int) -> float:
        """Return the weight of this process's gradients, with which they average over samples.

        It is this process's fraction of the step's samples, times the number of processes, which is
        that of shares: `logical=` has no weights. Passes with other tails, and streams, have
        weight 1.
        """
        if self.order is None or self.split.tail != "weighted":
            return 1.0
        source = self.source
        if source.is_grouped and not source.divides_batches:
            everywhere = len(self.split.taken(step, step + 1))
        else:
            everywhere = 0
            for share in range(source.share_count):
                everywhere += self.count_once_of_share(share, step)
        if not everywhere:  # an empty batch of the user's sampler
            return 1.0
        return self.count_once(step) * source.share_count / everywhere

    def parts(self, step: int) -> Parts:
        """Return the sizes of this process's parts of a step's batch, for `logical=`.

        The positions of the first and the last share differ by most.
        """
        split = self.split
        first = len(split.positions(0, step))
        last = len(split.positions(split.shares - 1, step))
        sizes = [self.count_of_share(share, step) for share in self.source.shares]
        return Parts(sizes, self.count_of_share(0, step), are_equal=first == last)

    def count(self, step: int) -> int:
        """Count the samples of this process in a step, with repeats."""
        return sum(self.count_of_share(share, step) for share in self.source.shares)

    def count_of_share(self, share: int, step: int) -> int:
        """Count the samples of a share in a step, with repeats."""
        if self.source.divides_batches:
            batch = indices_of(self.order[self.split.start + step])
            return len(share_of_batch(batch, share, self.source.share_count))
        positions = self.split.positions(share, step)
        if self.source.is_grouped:
            return len(positions)
        count, total = 0, len(self.order)
        for position in positions:
            count += len(indices_of(self.order[position % total]))
        return count


class Source:
    """Adapter for one kind of loader.

        IndexedSource          a DataLoader over a dataset with __getitem__: indices are divided
        IterableStyleSource    a DataLoader over an iterable dataset: samples are divided
        BatchIterableSource    an iterable of batches: batches are divided

    A subclass says how many units there are (`length`), how they are drawn and made into batches
    (`batches`), and which options it does not support.

    Args:
        loader: the user's iterable, or the view of a loader: it has the user's attributes.
        topic: what rank 0 calls the loader when it tells its random numbers.
        divides_itself: whether each process has units of its own.
        drawers: what draws the order: samplers, or an iterable. They may hold generators.
        dataset: the dataset, which may count epochs, as the drawers may.
    """

    is_indexed = False
    """Whether its units are indices, or batches of them."""
    is_compared = False
    """Whether all ranks have to hold the same data, which can be compared."""
    is_grouped = False
    """Whether a step takes a list of units; if false, it takes a single unit."""
    divides_batches = False
    """Whether the processes share each batch of a batch sampler, which is a unit."""
    drop_last = False
    """Whether an incomplete last step is left out."""
    data_text = ""
    """Text that identifies the data, which processes compare."""
    saved_state: Any = None
    """A state of the dataset from which to resume."""
    recorded_state: Any = None
    """The latest state of the dataset."""
    copied: CopiedLoader | None = None
    """The copy of the user's DataLoader, which makes the batches."""

    def __init__(
        self,
        loader: Any,
        options: LoaderOptions,
        run: Runtime,
        topic: str,
        *,
        divides_itself: bool = False,
        drawers: Sequence[Any] = (),
        dataset: Any = None,
    ) -> None:
        self.loader, self.options, self.run = loader, options, run
        self.divides_itself, self.holders = divides_itself, [*drawers, dataset]
        self._divide_among(run.data_ranks)
        self.merged = run.loaders.merged_ranks
        self.draws = Draws(run, topic, [loader, *drawers], options.seed)
        # What a saved state must match, always and within a pass.
        self.identity: dict[str, Any] = {}
        if divides_itself:
            self.identity["world_size"] = self.data_ranks.size
        self.identity_within: dict[str, Any] = {}
        self._ahead: deque[Pass] = deque()  # that the copy has begun before `iter()`
        self.latest_pass: Pass | None = None

    def _divide_among(self, data_ranks: DataRanks) -> None:
        """Divide the units over these ranks.

        Attributes that this sets:
            data_ranks: the ranks.
            share, shares: number of this process's first share, and the numbers of all its shares.
            share_count: number of shares of all ranks.
            group: number of units that all shares together take in a step.
        """
        self.data_ranks = data_ranks
        parts = (self.run.config.logical or data_ranks.size) // data_ranks.size
        self.share, self.share_count = data_ranks.rank * parts, data_ranks.size * parts
        if self.divides_itself:
            self.share, self.share_count, parts = 0, 1, 1
        self.shares = range(self.share, self.share + parts)
        self.group = self.share_count

    def _follow_data_ranks(self) -> None:
        """Divide the data anew if a block with a tensor parallel model has begun since.

        Raises:
            ConfigError: the data was divided by its own code, or by a library.
        """
        data_ranks = active_or(self.run).data_ranks
        if data_ranks == self.data_ranks:
            return
        if self.divides_itself:
            raise ConfigError(
                f"a {type(self.loader).__name__} that shards itself over {self.data_ranks.size} "
                f"processes, in a block whose batches are divided over {data_ranks.size}",
                why="the ranks that hold one tensor parallel model read the same batches, and the "
                "data was divided before the block",
                fix="make the loader, and call shard_loader, inside the block",
            )
        self._divide_among(data_ranks)

    def start_pass(self, position: Position, tail: Tail) -> Pass:
        """Return this process's part of a pass, from a position on; draws nothing."""
        if self._ahead:
            return self._pass_ahead(position)
        split = self.split(position, tail, self.length())
        self.latest_pass = Pass(self, position, split, torch.is_grad_enabled())
        return self.latest_pass

    def _pass_ahead(self, position: Position) -> Pass:
        """Return the pass that the copy has begun before the `iter()` that it belongs to."""
        this_pass = self._ahead[0]
        if this_pass.position == position:
            return self._ahead.popleft()
        raise ConfigError(
            f"another epoch of a {type(self.loader).__name__} that keeps one iterator over all "
            "epochs",
            why=f"it has read the first batches of epoch {this_pass.position.epoch} already",
            fix="load a state, or set the epoch, before it is iterated for the first time",
        )

    def begin_pass(self, latest: Pass) -> Pass:
        """Begin the pass whose units the copy asks for, and return it.

        Args:
            latest: the pass that was the latest when the copy called iter() of its sampler.
        """
        if not latest.has_begun:
            latest.has_begun = True
            return latest
        # The copy has begun this pass before, and asks once more: a loader that keeps one iterator
        # over all epochs reads ahead. It goes on with the next pass before the user calls iter().
        position = Position(latest.position.epoch + 1)
        split = self.split(position, latest.split.tail, self.length())
        self.latest_pass = Pass(self, position, split, latest.has_gradients, has_begun=True)
        self._ahead.append(self.latest_pass)
        return self.latest_pass

    def begin_drawing(self, this_pass: Pass) -> Drawing:
        """Agree with the other ranks on the random numbers of a pass; may wait for rank 0."""
        saved = None
        if this_pass.position.states:
            saved = states_from_text(this_pass.position.states)
        drawing = self.draws.begin(this_pass.position.epoch, saved)
        this_pass.states = drawing.states
        return drawing

    def follow(self) -> None:
        """Give the copy what the user has set on the loader since the last call."""
        self._follow_data_ranks()
        if self.copied is None:
            return
        # Of torchdata's StatefulDataLoader.
        if getattr(self.loader, "next_iter_state", None) is not None:
            raise ConfigError(
                f"a {type(self.loader).__name__} whose own state was loaded",
                why="the state counts batches of the unsharded loader: each process would skip "
                "that many",
                fix="save shard_loader(loader).state_dict(), and "
                "shard_loader(loader).load_state_dict(state)",
            )
        self.copied.follow(self.loader)

    def batches(self, this_pass: Pass) -> Iterator[Any]:
        """Return the batches of a pass; called once for each pass, by `iter()`."""
        raise NotImplementedError

    def length(self) -> int | None:
        """Return the number of units of a pass, as the data tells; None: unknown."""
        raise NotImplementedError

    def is_beyond(self, start: int) -> bool:  # noqa: ARG002 - the end of a stream is not known
        """Return whether a position is certainly behind the last unit of a pass."""
        return False

    def workers_seed(self, this_pass: Pass, start: int) -> int | None:
        """Return the seed of a pass's workers; None: the copy draws it, as in one process.

        Args:
            this_pass: the pass.
            start: number of units before the first one that is read.
        """
        seed, rank = self.options.seed, self.data_ranks.rank
        if seed is not None:
            return derive_seed("workers", seed, rank, this_pass.position.epoch, start)
        if this_pass.position.states:  # what is resumed leaves the program's generators alone
            return derive_seed("workers", this_pass.position.states, rank, start)
        if self.run.config.logical is not None:  # all ranks draw alike; each sample has a seed
            return None
        if rank == 0 and start == 0:
            return None
        # Other ranks' workers draw other numbers, and the ranks' own generators stay as they are.
        epoch = this_pass.position.epoch
        return derive_seed("workers", torch.initial_seed(), rank, epoch, start)

    def close(self) -> None:
        """Shut down persistent workers."""
        if self.copied is not None:
            self.copied.close()

    def split(self, position: Position, tail: Tail, length: int | None) -> EpochSplit:
        """Return how the units of a pass, from a position on, are shared.

        Args:
            position: where the pass starts.
            tail: what happens to units that do not divide evenly.
            length: number of units of the whole pass; None: unknown.

        Raises:
            ConfigError: one process has to read several shares, and the data has no indices.
        """
        logical = self.run.config.logical
        is_several = self.merged > 1 and not (self.is_grouped or self.divides_batches)
        if is_several or (logical and (not self.is_grouped or length is None)):
            option = "compare"
            if logical:
                option = f"{logical=}"
            raise ConfigError(
                f"{option} with a {type(self.loader).__name__} that has no indices, or shards "
                "itself",
                why="one process cannot read the batches of several ranks from it",
                fix="use shard_loader(DataLoader(dataset, batch_size=...)) of a dataset with "
                "__getitem__",
            )
        return EpochSplit(
            total=UNKNOWN if length is None else length,
            start=position.start,
            shares=1 if self.divides_batches else self.share_count,
            group=self.group,
            tail=tail,
            drop_last=self.drop_last,
            merged_shares=self.merged,
        ).limited(self.options.limit)

    def default_tail(self) -> Tail:
        """Return the tail of a pass with gradients, without the option."""
        return "pad"

    def evaluation_tail(self, *, steps_together: bool) -> Tail:
        """Return the tail of a pass without gradients, on several processes, without the option.

        Args:
            steps_together: whether all processes have to run each forward, as under fsdp.
        """
        return "pad" if steps_together else "exact"

    def steps(self, split: EpochSplit) -> int | None:
        """Count this process's batches; None if unknown."""
        if split.total == UNKNOWN:
            return None
        if self.divides_batches:
            return split.steps(0)
        return split.steps(self.share)

    def batch_summary(self) -> str:
        """Return the batch size per process and the global one, for logs; may be empty."""
        return ""

    def epoch_of_data(self) -> int | None:
        """Return the epoch that the user has set on a sampler or dataset; None: there is none.

        It is saved with a position, because the order may depend on it.
        """
        for holder in self.holders:
            epoch = getattr(holder, "epoch", None)
            # One that the library has counted is of another type.
            if type(epoch) is int and hasattr(holder, "set_epoch"):
                return epoch
        return None

    def set_counted_epoch(self, epoch: int) -> None:
        """Set the epoch of datasets that count theirs, as Mosaic's by the property `next_epoch`."""
        for holder in self.holders:
            if isinstance(getattr(type(holder), "next_epoch", None), property):
                holder.next_epoch = epoch

    def set_epoch_of_data(self, epoch: int) -> None:
        """Set the epoch of the samplers and datasets that have a `set_epoch`."""
        for holder in self.holders:
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def check(self, name: str, length: int | None, *, drop_last: bool = False) -> None:
        """Raise a ConfigError for options that this kind of data does not support.

        Args:
            name: of the data, for the message.
            length: number of its units; None: unknown.
            drop_last: whether an incomplete last batch is left out.
        """
        options, logical = self.options, self.run.config.logical
        if options.tail == "exact" and drop_last:
            raise ConfigError(
                f"tail='exact' with drop_last=True over {name}",
                why="the one yields each sample once, the other leaves out the last ones",
                fix="use drop_last=False, or tail='drop'",
            )
        if options.tail == "weighted" and logical:
            raise ConfigError(
                f"tail='weighted' under logical={logical} with {name}",
                why="its weights depend on the number of processes",
                fix="use tail='pad' or 'drop'",
            )
        needs_length = ""
        if options.tail == "weighted" and (length is None or not self.is_indexed):
            needs_length = "tail='weighted'"
        elif isinstance(options.limit, float) and length is None:
            needs_length = f"limit={options.limit!r}"
        if needs_length:
            raise ConfigError(
                f"{needs_length} with {name}",
                why="the number of samples or batches is unknown",
                fix="use tail='pad' or 'drop', and a number of batches, as in limit=100",
            )
        # Of units that are drawn one by one, each share takes equally many in a step.
        is_uneven = length is None and self.group % self.share_count != 0
        if options.batch == "global" and (not self.is_indexed or is_uneven):
            raise ConfigError(
                f"batch='global' with {name}",
                why="batches are not split between processes: each one, or its worker, makes its "
                "own",
                fix="use the batch size of one process",
            )


def length_of(sized: Any) -> int | None:
    """Return the length of a dataset or sampler; None if it has or knows none.

    A length may be an estimate, or wrong: it is not relied on where an order can be listed.
    """
    try:
        return len(sized)
    except Exception:  # noqa: BLE001 - TypeError, ValueError (PyG's samplers), NotImplementedError
        return None
