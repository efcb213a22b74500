"""Sources of data without indices: DataLoaders over iterable datasets, and iterables of batches.

Every process, and each of its workers, iterates all of the data, from the same random numbers, and
yields its share, unless the data divides itself: over the processes, or over the workers that
torch's get_worker_info() returns.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from parallelize.data.copied_loader import CopiedLoader, view_of
from parallelize.data.draws import Drawing, seeded_drawing
from parallelize.data.options import Divides, LoaderOptions
from parallelize.data.source import Pass, Source, length_of
from parallelize.data.units import EpochSplit, Tail, sample_fingerprint
from parallelize.errors import ConfigError
from parallelize.run.context import Runtime
from parallelize.run.data_ranks import DataRanks
from parallelize.run.generators import RNGState, derive_seed
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.loaders import set_worker_info, shown_worker_info

# Numbers that a process and its workers share: the seed of a pass, its tail, and a hash of its
# first samples.
_SEED, _TAIL, _HASH = range(3)
_MOST_HASHED = 16
"""Samples of the first batch whose hash is compared between ranks."""

# Of the libraries whose datasets shard themselves: the ends of their classes' names, and what holds
# the world size that they have seen.
_LIBRARIES = {
    "datasets": ("IterableDataset", "_distributed", "world_size"),
    "litdata": ("StreamingDataset", "distributed_env", "world_size"),
    "streaming": ("StreamingDataset", "_unique_rank_world", "num_ranks"),
    "webdataset": ("DataPipeline", "", ""),
}
_SPLITTERS = {"split_by_node", "ResampledShards", "ResampledShardList"}  # of WebDataset


def own_sharding(data: Any, data_ranks: DataRanks) -> tuple[Any, Divides | None]:
    """Return the data, split by its library if that can, and how it shards itself, if known.

    Args:
        data: an iterable dataset, or an iterable of batches.
        data_ranks: the ranks over which it is divided.

    Raises:
        ConfigError: its library has split it for another number of processes.
    """
    library = _library(data)
    if library == "datasets" and data._distributed is None:
        from datasets.distributed import split_dataset_by_node

        data = split_dataset_by_node(data, rank=data_ranks.rank, world_size=data_ranks.size)
    _, holder, name = _LIBRARIES.get(library, ("", "", ""))
    size = getattr(getattr(data, holder, None), name, data_ranks.size)
    if size != data_ranks.size:
        raise ConfigError(
            f"{type(data).__name__} was sharded over {size} processes, in a world of "
            f"{data_ranks.size}",
            why="some samples would be repeated, or left out",
            fix="make the dataset inside the decorated function, in the processes that iterate it",
        )
    return data, "processes" if library else None


def _library(data: Any) -> str:
    """Return the library that shards this data over the processes; "" if none is known to.

    A class of the user that extends the library's is found by its base classes.
    """
    for data_class in type(data).__mro__:
        library = data_class.__module__.partition(".")[0]
        if library not in _LIBRARIES or not data_class.__name__.endswith(_LIBRARIES[library][0]):
            continue
        if library == "webdataset" and not _splits_by_node(data):
            return ""
        return library
    return ""


def _splits_by_node(pipeline: Any) -> bool:
    """Whether a pipeline of WebDataset has a stage that takes the shards of one process."""
    stages = getattr(pipeline, "pipeline", ())
    first: Any = next(iter(stages), None)
    if hasattr(first, "dataset"):  # a WebLoader's first stage is the loader of another pipeline
        stages = getattr(first.dataset, "pipeline", ())
    for stage in stages:
        name = getattr(stage, "__name__", type(stage).__name__)
        if name in _SPLITTERS:
            return True
    return False


class IterableStyleSource(Source):
    """Source for a DataLoader over an iterable dataset; its units are this process's batches.

    Its workers make batches of the samples that they get, so that no batch is divided, and the
    number of batches is not known before they end.

    Args:
        loader: the user's.
        dataset: its dataset, or what its library has made of it for this process.
        options: of `shard_loader`.
        run: runtime of this process.
        topic: what rank 0 calls the loader.
        divides: how the dataset divides itself.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        dataset: Any,
        options: LoaderOptions,
        run: Runtime,
        topic: str,
        *,
        divides: Divides | None,
    ) -> None:
        # Generators of a dataset that has states of its own are in these states.
        drawers = []
        if not hasattr(dataset, "load_state_dict"):
            drawers.append(dataset)
        # The view has the user's dataset, and not the replaced one: users look at it.
        super().__init__(
            view_of(loader),
            options,
            run,
            topic,
            divides_itself=True,
            drawers=drawers,
            dataset=dataset,
        )
        self.check(f"the iterable {type(dataset).__name__}", None, drop_last=loader.drop_last)
        workers = loader.num_workers
        self.identity_within = {"batch_size": loader.batch_size, "num_workers": max(workers, 1)}
        if options.seed is not None and divides != "processes":
            self.identity["seed"] = options.seed
        begin = self._begin_in_this_process if workers == 0 else None
        self._dataset = dataset
        self._sharded = _ShardedDataset(dataset, divides, self.data_ranks, loader, begin)
        # A library's loader knows its dataset, and torch's shards data pipes.
        is_known = bool(_library(dataset)) or isinstance(dataset, IterDataPipe)
        self._is_read_directly = divides == "processes" and is_known
        replaced: dict[str, Any] = {"dataset": self._sharded}
        if self._is_read_directly:
            replaced["dataset"] = dataset
        if workers:
            counted = DataRanks()
            if divides in (None, "workers"):
                counted = self.data_ranks
            replaced["worker_init_fn"] = functools.partial(
                _init_worker, loader.worker_init_fn, counted
            )
        self.copied = CopiedLoader(loader, replaced, frozenset({"num_workers", "worker_init_fn"}))
        # Only where each process reads no other samples than its own does a dataset's state say how
        # far the process is.
        is_read_alone = divides == "processes" or self.data_ranks.size == 1
        is_protocol = hasattr(dataset, "load_state_dict") and _library(dataset) in ("", "datasets")
        self._has_states = is_read_alone and not workers and is_protocol
        self._begun: Pass | None = None
        self.follow()

    def length(self) -> int | None:
        """Return the number of batches that torch's DataLoader tells; None: several processes."""
        if self.data_ranks.size > 1:
            return None
        return length_of(self.loader)

    def batches(self, this_pass: Pass) -> Iterator[Any]:
        """Yield the batches from the pass's position on; those before it are read, too.

        A generator: nothing begins before the first batch is asked for.

        If the dataset has states, it goes on from the one before the position, which was recorded
        with the hash of the batch after it. Where another batch follows, as from a shuffle buffer
        that is refilled, the pass is read again from its beginning.
        """
        assert self.copied is not None
        position = this_pass.position
        # litdata's loader counts its epochs itself.
        if hasattr(self.copied.loader, "current_epoch"):
            self.copied.set("current_epoch", position.epoch)
        global_generators = RNGState(())
        # The first batch is made at once: its samples are hashed, or tell whether a state fits.
        done, first_batch, batches = self._resumed(this_pass)
        if not done:
            batches = self._from_beginning(this_pass, 0)
            first_batch = list(itertools.islice(batches, 1))
            this_pass.stream_hash = self._sharded.fingerprint()
        batches = itertools.chain(first_batch, batches)
        if self._has_states:
            batches = self._recorded(batches, done, position.epoch)
        batches = itertools.islice(batches, this_pass.split.limit - done)
        skipped = 0
        for _ in itertools.islice(batches, position.start - done):
            skipped += 1
        if skipped:
            # Their random numbers were drawn when they were yielded, before the interruption.
            global_generators.restore()
        yield from batches

    def _resumed(self, this_pass: Pass) -> tuple[int, list[Any], Iterator[Any]]:
        """Go on from a state of the dataset, if there is one.

        Returns:
            The number of batches before the state, the first batch after it, and the others. The
            number is 0 if the pass has to be read from its beginning.
        """
        saved, self.saved_state = self.saved_state, None
        position, dataset = this_pass.position, self._dataset
        if not saved or saved["epoch"] != position.epoch or saved["batches"] > position.start:
            return 0, [], iter(())
        initial = copy.deepcopy(dataset.state_dict())
        dataset.load_state_dict(copy.deepcopy(saved["state"]))
        batches = self._from_beginning(this_pass, saved["batches"])
        first = list(itertools.islice(batches, 1))
        if sample_fingerprint(first) == saved["next"]:
            return saved["batches"], first, batches
        dataset.load_state_dict(initial)
        warnings.warn(
            f"{type(dataset).__name__} does not go on from its state_dict() with the batch that "
            f"followed: epoch {position.epoch} is read again up to its position",
            stacklevel=user_stacklevel(),
        )
        return 0, [], iter(())

    def _from_beginning(self, this_pass: Pass, first: int) -> Iterator[Any]:
        """Iterate the copy: its dataset begins a pass.

        Args:
            this_pass: the pass.
            first: number of batches before the state of the dataset.
        """
        assert self.copied is not None
        self._begun = this_pass
        if not self._is_read_directly:
            seed = 0
            if self._sharded.has_workers:
                # Workers only need to agree on a seed.
                self.begin_drawing(this_pass)
                seed = derive_seed("stream", this_pass.text_of_states())
            self._sharded.start(seed, this_pass.split.tail)
        return self.copied.iterate(self.workers_seed(this_pass, first), lambda: True)

    def _begin_in_this_process(self) -> Drawing:
        """Begin to draw the pass whose batches the copy was asked for, when it asks the dataset.

        Not earlier: torch's iterator draws the seed of its workers first.
        """
        assert self._begun is not None
        return self.begin_drawing(self._begun)

    def _recorded(self, batches: Iterator[Any], number: int, epoch: int) -> Iterator[Any]:
        """Yield batches, and record the state of the dataset before each.

        Args:
            batches: of the pass, from some batch on.
            number: of batches before that one.
            epoch: number of the pass.
        """
        state = self.recorded_state = None
        for batch in batches:
            if number and state is not None:
                facts = {"epoch": epoch, "batches": number, "state": state}
                self.recorded_state = {**facts, "next": sample_fingerprint([batch])}
            yield batch
            number, state = number + 1, copy.deepcopy(self._dataset.state_dict())


class BatchIterableSource(Source):
    """Source for an iterable of batches: every process makes all, and takes its share of them.

    Args:
        data: the user's iterable.
        options: of `shard_loader`.
        run: runtime of this process.
        topic: what rank 0 calls the iterable.
        divides: how it divides itself: "processes", or not at all.
    """

    def __init__(
        self,
        data: Iterable[Any],
        options: LoaderOptions,
        run: Runtime,
        topic: str,
        *,
        divides: Divides | None,
    ) -> None:
        divides_itself = divides == "processes"
        super().__init__(data, options, run, topic, divides_itself=divides_itself, drawers=[data])
        name = f"a {type(data).__name__} of batches"
        self._length = length_of(data)
        self.check(
            name if self._length is not None else f"{name}, which has no length", self._length
        )
        if options.seed is not None and not divides_itself:
            self.identity["seed"] = options.seed

    def length(self) -> int | None:
        """Return the iterable's length."""
        return self._length

    def batches(self, this_pass: Pass) -> Iterator[Any]:
        """Yield the batches of a pass."""
        yield from this_pass.shares_of_stream(self._stream(this_pass))

    def _stream(self, this_pass: Pass) -> Iterable[Any]:
        """Return the batches, as they are drawn on all ranks alike."""
        batches: Iterable[Any] = self.loader
        if isinstance(batches, (list, tuple)):  # which draw nothing
            return batches
        drawing = self.begin_drawing(this_pass)
        if self.divides_itself:
            return drawing.first_of(batches)
        return drawing.stream(batches, 1)


class _ShardedDataset(IterableDataset[Any]):
    """Replacement for the iterable dataset of a copied loader; yields the shard of one worker.

    If the dataset does not shard itself, every worker iterates all of it and yields only its share.
    All workers draw from equal states while the dataset draws, so that they see the same order. A
    dataset that reads num_workers of get_worker_info() shards itself by that number, which counts
    the workers of all processes. For one that shards itself, the states are equal until its first
    sample, for files that it shuffles before it takes its own.

        shards        process 0              process 1              2 processes with 2 workers each
        worker 0      0       4       8        1       5            shard = worker * processes +
        worker 1          2       6                3       7        process: uneven ends are spread

    Args:
        unsharded: the user's dataset.
        divides: how it shards itself; None: what it reads of get_worker_info() tells.
        data_ranks: the ranks whose workers share the samples.
        loader: the user's.
        begin: begins to draw a pass; None: in workers, from the seed of `start`.
    """

    def __init__(
        self,
        unsharded: Any,
        divides: Divides | None,
        data_ranks: DataRanks,
        loader: DataLoader[Any],
        begin: Callable[[], Drawing] | None,
    ) -> None:
        self.unsharded, self.divides = unsharded, divides
        self._data_ranks, self._begin = data_ranks, begin
        self._batch_size = loader.batch_size or 1
        self.has_workers = loader.num_workers > 0
        # Persistent workers share these numbers with this process.
        shared: Any = torch.zeros(3, dtype=torch.int64)
        if self.has_workers:
            shared = shared.share_memory_()
        self._shared = shared

    def start(self, seed: int, tail: Tail) -> None:
        """Set the seed and tail of the next iterators, and forget the hash of the last one.

        Args:
            seed: of the random numbers in workers, the same on all ranks.
            tail: what happens to samples that do not divide evenly.
        """
        self._shared[:] = torch.tensor([seed, get_args(Tail).index(tail), 0])

    def fingerprint(self) -> str:
        """Return a hash of the first samples; "" if the dataset shards itself."""
        number = int(self._shared[_HASH])
        if not number:
            return ""
        return f"{number:08x}"

    def __iter__(self) -> Iterator[Any]:
        drawing = self._drawing()
        info = self._worker_info()
        with drawing.block(), shown_worker_info(info.shown):
            # Python would call iter() of an iterator of the user again, which may begin anew.
            stream = (sample for sample in self.unsharded)
            first = list(itertools.islice(stream, 1))
        samples = itertools.chain(first, stream)
        if self._shards_itself(info.shown):
            yield from self._with_info(samples, info)
        else:
            yield from self._share(samples, info, drawing)

    def _drawing(self) -> Drawing:
        """Return the random numbers of this iterator, in this process or in a worker."""
        if self._begin is not None:
            return self._begin()
        return seeded_drawing([self.unsharded], int(self._shared[_SEED]))

    def _with_info(self, samples: Iterator[Any], info: _Shard) -> Iterator[Any]:
        """Yield the samples of a dataset that shards itself, which are drawn as it likes.

        Args:
            samples: of the user's dataset.
            info: the share of this worker.
        """
        while True:
            # Not while batches are used: the loop may ask for the info of its own process.
            with shown_worker_info(info.shown):
                drawn = list(itertools.islice(samples, self._batch_size))
            yield from drawn
            if len(drawn) < self._batch_size:
                return

    def _share(self, samples: Iterator[Any], info: _Shard, drawing: Drawing) -> Iterator[Any]:
        """Yield every n-th sample, drawn from the states that all workers have.

        Args:
            samples: all samples of the user's dataset.
            info: the share of this worker.
            drawing: the random numbers of this iterator.

        Raises:
            ConfigError: the dataset has read the number of workers after its first sample.
        """
        size, tail = self._batch_size, get_args(Tail)[int(self._shared[_TAIL])]
        # Shard number = worker * processes + rank: these are the workers 0 of each process.
        if info.number < self._data_ranks.size:
            samples = self._hashed(samples, info, drawing)
        # Of samples, not of batches: a step is one sample for each shard.
        split = EpochSplit(shares=info.shares, group=info.shares, tail=tail)
        shares = split.units_of_stream(samples, info.number)
        while True:
            # Not while batches are used: collate_fn and the loop draw from other states.
            with drawing.block(), shown_worker_info(info.shown):
                drawn = list(itertools.islice(shares, size))
            shown = info.shown
            if shown and shown.num_shards > 1 and "num_workers" in shown.read:
                raise self._divided_error("after its first sample, or with divides='nothing'")
            yield from drawn
            if len(drawn) < size:
                return

    def _hashed(self, samples: Iterator[Any], info: _Shard, drawing: Drawing) -> Iterator[Any]:
        """Draw the first samples now, and hash them: processes compare it. Return all samples."""
        # Shard 0 has its first batch when this many samples are drawn: (size - 1) rounds and one.
        count = min(info.shares * (self._batch_size - 1) + 1, _MOST_HASHED)
        with drawing.block(), shown_worker_info(info.shown):
            first = list(itertools.islice(samples, count))
        self._shared[_HASH] = int(sample_fingerprint(first, are_samples=True) or "0", 16)
        return itertools.chain(first, samples)

    def _worker_info(self) -> _Shard:
        """Return the share of this worker, and the info that the dataset is shown.

        The dataset is shown the workers of all processes, if it may divide itself by them; one that
        does not, or that divides itself over processes, is shown those of this process, as in
        torch.
        """
        of_torch: Any = get_worker_info()
        if self.divides not in (None, "workers"):
            counted = _GlobalWorkerInfo(of_torch, self._data_ranks)
            shown = None
            if of_torch:
                shown = _GlobalWorkerInfo(of_torch, DataRanks())
            return _Shard(counted.shard_index, counted.num_shards, shown)
        # In a worker process that info has recorded what the worker_init_fn has read.
        counted = of_torch
        if not isinstance(of_torch, _GlobalWorkerInfo):
            counted = _GlobalWorkerInfo(of_torch, self._data_ranks)
        return _Shard(counted.shard_index, counted.num_shards, counted)

    def _shards_itself(self, shown: Any) -> bool:
        """Whether the dataset has sharded itself, as what it has read until now tells."""
        if self.divides is not None:
            return self.divides != "nothing"
        if "id" in shown.read and "num_workers" not in shown.read and shown.num_shards > 1:
            raise self._divided_error("only for its id")
        return "num_workers" in shown.read

    def _divided_error(self, how: str) -> ConfigError:
        return ConfigError(
            f"the iterable {type(self.unsharded).__name__} reads get_worker_info() {how}",
            why="it may shard itself over the workers: sharding it again would skip samples",
            fix="use divides='workers' if all of its samples are sharded by id and num_workers of "
            "get_worker_info(), divides='nothing' if none are",
        )


def _init_worker(
    user_init: Callable[[int], None] | None, counted: DataRanks, _worker_id: int
) -> None:
    """Call the user's worker_init_fn where get_worker_info() counts the workers of some ranks.

    Args:
        user_init: the user's; None: there is none.
        counted: the ranks whose workers are counted; one rank, as in torch.
    """
    info = _GlobalWorkerInfo(get_worker_info(), counted)
    set_worker_info(info)
    if user_init is not None:
        user_init(info.shard_index)


class _GlobalWorkerInfo:
    """Replaces torch's worker info, and counts the workers of all processes as if of one.

    A dataset that shards itself by get_worker_info() then shards over all processes, where a
    process without workers counts as one. What it reads is recorded: that tells how it shards.

    Args:
        info: torch's, or one of these; None: the process is no worker.
        data_ranks: the ranks whose workers are counted.

    Attributes:
        shard_index: number of this worker among those of all processes.
        num_shards: number of them.
        read: names of the attributes that were read.
    """

    def __init__(self, info: Any, data_ranks: DataRanks) -> None:
        self._info: Any = getattr(info, "_info", info)
        local_id, workers = getattr(self._info, "id", 0), getattr(self._info, "num_workers", 1)
        self.shard_index = local_id * data_ranks.size + data_ranks.rank
        self.num_shards = workers * data_ranks.size
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.read.add(name)
        counted = {
            "id": self.shard_index,
            "num_workers": self.num_shards,
            "seed": torch.initial_seed(),
        }
        value = counted[name] if name in counted else getattr(self._info, name, None)
        return getattr(value, "unsharded", value)  # the user's dataset


class _Shard(NamedTuple):
    """The share of one worker, of those of all processes.

    Args:
        number: from 0.
        shares: number of shares.
        shown: what get_worker_info() returns while the dataset runs.
    """

    number: int
    shares: int
    shown: Any
