"""LoaderCopy: a copy of the user's DataLoader that makes this process's batches, also in worker processes."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    _utils,
    default_collate,
    default_convert,
    get_worker_info,
)

from parallelize.cluster.world import World
from parallelize.data.epoch_shard import EpochShard, Position
from parallelize.data.rng import IsolatedRNG, derive_seed
from parallelize.errors import ConfigError
from parallelize.torch_patches.private import unsupported

__all__ = ["GlobalWorkerInfo", "LoaderCopy", "copy_of", "data_location", "set_worker_info"]


class _ShardedSampler:
    """Replacement for a copied loader's sampler or batch sampler; yields the units of this process's shard.

    All other attributes are those of the replaced sampler.
    """

    def __init__(self, replaced: Any) -> None:
        self._replaced = replaced
        self._shard: EpochShard[Any] | None = None  # whose units the next iterators yield
        self.is_iterated = True  # false from a new shard on, until an iterator yields its units

    def __iter__(self) -> Iterator[Any]:
        # torch's iterator over worker processes calls this twice: when it is created and when it is reset.
        self.is_iterated = True
        return iter(() if self._shard is None else self._shard)

    def __len__(self) -> int:
        steps = None if self._shard is None else self._shard.steps()
        if steps is None:
            raise TypeError(f"the length of this {type(self._replaced).__name__} is unknown")
        return steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look these up before __init__
            raise AttributeError(name)
        return getattr(self._replaced, name)


def copy_of(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a loader without its iterator, whose workers belong to the user's loader."""
    copy: DataLoader[Any] = object.__new__(type(loader))
    vars(copy).update(vars(loader), _iterator=None)  # DataLoader.__setattr__ forbids changes after construction
    return copy


class LoaderCopy:
    """A copy of the user's DataLoader, made without calling its constructor. The user's loader is not modified.

    Args:
        loader: the user's loader; the copy does not reference it, so that it can be freed.
        seed: seed of the random numbers drawn while batches are made. None: use the seed of the loader's generator, or
            else draw a seed when an iterator starts, as torch does. With None and without workers, the dataset draws
            from this process's global generators.
        rank: rank of this process.
        counted: the world whose workers get_worker_info() counts (see `GlobalWorkerInfo`); None: it is torch's.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int | None, rank: int, counted: World | None) -> None:
        if getattr(loader, "next_iter_state", None) is not None:  # of torchdata's StatefulDataLoader
            raise ConfigError(
                f"a {type(loader).__name__} whose state was loaded before shard_loader",
                why="the state counts batches of the unsharded loader; each process would skip as many batches of it",
                fix="save shard_loader(loader).state_dict(), and shard_loader(loader).load_state_dict(state)",
            )
        self._seed, self._rank = seed, rank
        self.loader = copy_of(loader)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = _ShardedSampler(getattr(loader, name))
        if not isinstance(loader.dataset, IterableDataset):
            vars(self.loader)[name] = self._sampler
        self._generator = loader.generator
        self._iterator_count = 0
        if loader.num_workers > 0:
            vars(self.loader)["worker_init_fn"] = _WorkerInit(loader.worker_init_fn, rank, counted)

    def set_attributes(self, **attributes: Any) -> None:
        """Set attributes of the copy that DataLoader does not allow changing."""
        vars(self.loader).update(attributes)

    def iterate_shard(self, shard: EpochShard[Any]) -> Iterator[Any]:
        """Yield the batches that the loader makes from the units of a shard (see `iterate`)."""
        self._sampler._shard, self._sampler.is_iterated = shard, False
        return self.iterate(shard.position, first=shard.position.start, units_per_step=shard.split.group)

    def iterate(self, position: Position, *, first: int, units_per_step: int = 1) -> Generator[Any, None, None]:
        """Yield the loader's batches, with different random numbers for every process, worker and position.

        With a seed and without workers, those of a batch follow from its position, `units_per_step` after that of the
        batch before, the first at `first`: they are the same after resuming.
        """
        # torch draws the base seed of its workers here. Draw one even if unused: the program's RNG must advance alike.
        generator = torch.default_generator if self._generator is None else self._generator
        before = generator.get_state()
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        if position.start:  # a resumed epoch has drawn its seed at its beginning
            generator.set_state(before)
        # The state of the user's generator is not saved, so only its initial seed is the same after resuming.
        loader_seed = drawn if self._generator is None else self._generator.initial_seed()
        base_seed = loader_seed if self._seed is None else self._seed
        seed = derive_seed("workers", base_seed, self._rank, position.epoch, first)
        vars(self.loader)["generator"] = torch.Generator().manual_seed(seed)
        batches: Iterator[Any] = iter(self.loader)
        if self.loader.num_workers == 0 and self._seed is not None and self._may_draw():
            starts = itertools.count(first, units_per_step)
            seeds = (derive_seed("batch", self._seed, self._rank, position.epoch, start) for start in starts)
            batches = IsolatedRNG(0).draw(batches, seeds=seeds)
        self._iterator_count += 1
        number, has_kept_workers = self._iterator_count, self.loader.persistent_workers
        try:
            for batch in batches:
                if not self._sampler.is_iterated:
                    raise ConfigError(
                        f"{type(self.loader).__name__} does not use its sampler when it is iterated",
                        why="its indices come from elsewhere, so every process would get all of them",
                        fix="pass shard_loader a DataLoader that creates its iterator in __iter__",
                    )
                yield batch
                if has_kept_workers and number != self._iterator_count:
                    raise ConfigError(
                        "two iterators at a time over a DataLoader(persistent_workers=True)",
                        why="torch's workers serve only the newer one, and batches of the older one are lost",
                        fix="use persistent_workers=False, or a separate DataLoader for each iterator",
                    )
        finally:
            if not has_kept_workers:
                self._shut_down(batches)

    def _may_draw(self) -> bool:
        """Return whether making a batch runs code of the user, which may draw random numbers."""
        is_torchs = type(self.loader) is DataLoader and self.loader.collate_fn in (default_collate, default_convert)
        dataset: Any = self.loader.dataset
        while type(dataset) is Subset:
            dataset = dataset.dataset
        are_tensors = type(dataset) is TensorDataset and {*map(type, dataset.tensors)} == {torch.Tensor}
        # The __iter__ of a subclass may draw, too, and so may a sampler whose units are not drawn yet.
        has_order = self._sampler._shard is not None and self._sampler._shard.order is not None
        return not (is_torchs and has_order and are_tensors)

    def close(self) -> None:
        """Shut down persistent workers."""
        self._shut_down(self.loader._iterator)

    def _shut_down(self, batches: Any) -> None:
        # Garbage collection may be too late: a traceback may reference the iterator, and StatefulDataLoader does.
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
        vars(self.loader)["_iterator"] = None


@dataclass(frozen=True)
class _WorkerInit:
    """The worker_init_fn of a copied loader: adds data locations to errors, and calls the user's worker_init_fn."""

    user_init: Callable[[int], None] | None
    rank: int
    counted: World | None

    def __call__(self, worker_id: int) -> None:
        # These patches are never undone: the worker process belongs to the loader and ends with it.
        fetcher: Any
        for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):
            fetcher.fetch = data_location(f"rank {self.rank}, worker {worker_id}")(fetcher.fetch)
        if self.counted is not None:
            info = GlobalWorkerInfo(get_worker_info(), self.counted)
            set_worker_info(info)
            worker_id = info.shard_index
        if self.user_init is not None:
            self.user_init(worker_id)


class GlobalWorkerInfo:
    """Replacement for torch's worker info that counts the workers of all processes as if one process had them all.

    A dataset that shards itself by get_worker_info() then shards over all processes, and one without workers counts as
    one. What it reads is recorded, because that tells how it shards itself.
    """

    def __init__(self, info: Any, world: World) -> None:
        self._info: Any = info._info if isinstance(info, GlobalWorkerInfo) else info
        local_id, local_workers = (0, 1) if self._info is None else (self._info.id, self._info.num_workers)
        self.shard_index = local_id * world.world_size + world.rank
        self.num_shards = local_workers * world.world_size
        self.read: set[str] = set()

    @property
    def id(self) -> int:
        """Index of the worker among those of all processes."""
        self.read.add("id")
        return self.shard_index

    @property
    def num_workers(self) -> int:
        """Number of workers of all processes."""
        self.read.add("num_workers")
        return self.num_shards

    @property
    def dataset(self) -> Any:
        """The user's dataset, without the wrapper that shards it."""
        dataset = getattr(self._info, "dataset", None)
        return getattr(dataset, "unsharded", dataset)

    @property
    def seed(self) -> int:
        """Seed of the worker."""
        return torch.initial_seed() if self._info is None else int(self._info.seed)


def set_worker_info(info: Any) -> Any:
    """Make get_worker_info() return `info`, and return what it returned before."""
    torch_worker: Any = _utils.worker
    previous, torch_worker._worker_info = torch_worker._worker_info, info
    if get_worker_info() is not info:
        torch_worker._worker_info = previous
        raise unsupported("shard_loader of an iterable dataset", instead="use a dataset with __getitem__")
    return previous


@contextlib.contextmanager
def data_location(where: str) -> Iterator[None]:
    """Add the rank, worker and index to an error of the user's dataset or collate_fn in the block, as a note."""
    try:
        yield
    except StopIteration:
        raise
    except Exception as exc:
        note = f"in the data of {where}{_index_text(exc.__traceback__)}"
        if hasattr(exc, "add_note"):
            exc.add_note(note)
        elif exc.args and isinstance(exc.args[0], str):  # Python 3.10
            exc.args = (f"{exc.args[0]}\n{note}", *exc.args[1:])
        raise


def _index_text(traceback: types.TracebackType | None) -> str:
    """Return text with the index that torch's fetcher was fetching, from the locals of its frames; may be empty."""
    text, requested = "", None
    while traceback is not None:
        code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_locals
        if code.co_filename == _utils.fetch.__file__:
            if "idx" in names:
                return f", index {names['idx']!r}"
            if isinstance(names.get("self"), _utils.fetch._MapDatasetFetcher):
                requested = names["possibly_batched_index"]
                text = f", indices {requested!r}" if isinstance(requested, list) else f", index {requested!r}"
        elif code.co_name == "__getitem__" and isinstance(requested, list):
            # Since Python 3.12 the fetcher's comprehension has no frame: use the argument of dataset.__getitem__.
            index = [names[name] for name in code.co_varnames[1:2] if name in names]
            return f", index {index[0]!r}" if index and any(index[0] is each for each in requested) else text
        traceback = traceback.tb_next
    return text
