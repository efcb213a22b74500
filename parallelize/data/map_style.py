"""Source for a DataLoader over a map-style dataset: its indices are sharded, not its samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Subset

from parallelize.cluster.world import World
from parallelize.data.rng import IsolatedRNG, sampler_seed, samplers_in, stream_rng
from parallelize.data.sampling import Tail, draw_order, is_exactly, order_fingerprint
from parallelize.data.source import EpochShard, LoaderOptions, Source, copy_of, length_of, view_of
from parallelize.errors import ConfigError
from parallelize.runtime.context import Runtime
from parallelize.runtime.rng import derive_seed, global_generators

__all__ = ["MapStyleSource"]

# Attributes of a sampler that shards by itself: torch, Lightning and timm have the first ones,
# Accelerate the second, WebDataset and torchdata the third, Megatron and DeepSpeed the last.
_MOST_PADDED = 1_000_000  # units that the last step of an epoch adds, at any batch size
_SHARDING = (
    ("num_replicas", "rank"),
    ("num_processes", "process_index"),
    ("num_shards", "cur_shard"),
    ("world_size", "rank"),
    ("data_parallel_size", "data_parallel_rank"),
)


class _Units:
    """The sampler of a copied loader: yields the units of this process's shard."""

    shard: Any = ()

    def __iter__(self) -> Iterator[Any]:
        # torch's iterator over workers calls this twice: when it is created and when it is reset.
        source, position = self.shard.source, self.shard.position
        if source.run.config.logical is None:
            return iter(self.shard)
        return (source.seeded(units, position.epoch) for units in self.shard)

    def __len__(self) -> int:
        return self.shard.source.steps(self.shard.split) or 0


class _SeededSamples(Dataset[Any]):
    """A dataset whose samples draw the same random numbers in whichever process they are read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up before it has a dataset, by pickle
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitems__(self, seeded: list[tuple[Any, int]]) -> list[Any]:
        samples, generators = [], global_generators(()).values()
        with IsolatedRNG(0):
            for index, seed in seeded:
                for each in generators:
                    each.seed(seed)
                samples.append(self._dataset[index])
        return samples


class MapStyleSource(Source):
    """Source for a DataLoader over a map-style dataset; its units are indices, or batches of them.

    If the loader's sampler already shards it, the units are this process's batches, which are kept.
    """

    is_indexed = True

    def __init__(self, loader: DataLoader[Any], options: LoaderOptions, run: Runtime) -> None:
        batches: Any = loader.batch_sampler
        outer: Any = loader.sampler if batches is None else batches
        sharder = outer if options.divides == "processes" else None
        if options.divides is None:
            sharder = _distributed_sampler(loader, run.world)
        # Indices if torch's BatchSampler groups them; else each unit is a batch, or a single item.
        self.is_grouped = sharder is None and is_exactly(batches, BatchSampler)
        sampler = batches.sampler if self.is_grouped else outer
        tells = [sampler, getattr(sampler, "sampler", None), sharder, loader.dataset]
        self._units = _Units()
        name = "sampler" if batches is None else "batch_sampler"
        self.copy = copy_of(loader, **{name: self._units})
        if run.config.logical is not None:
            vars(self.copy)["dataset"] = _SeededSamples(loader.dataset)
        super().__init__(view_of(loader), options, run, is_own=sharder is not None, tells=tells)
        self._sampler, self._sharder, self._batches = sampler, type(sharder).__name__, batches
        # torchdata gives its RandomSampler a generator with another seed on each process.
        is_unseeded = loader.generator is None and is_exactly(sampler, RandomSampler)
        seed = options.seed or 0
        self._seed = seed if is_unseeded else sampler_seed(sampler, seed)
        if self.is_own:
            self.identity_within["batch_size"] = loader.batch_size
        else:
            self.identity["seed"] = self._seed
        self.follow()
        dataset = loader.dataset
        while isinstance(dataset, Subset):  # ranks that split a dataset differently are refused
            self.data += f" of the subset {order_fingerprint(dataset.indices)}"
            dataset = dataset.dataset

    def follow(self) -> None:
        """Give the copy what the user has set, also on the sampler of batches."""
        super().follow()
        batches = self._batches
        self.drop_last = self.is_grouped and batches.drop_last
        self._set_group(batches.batch_size if self.is_grouped else None)

    def length(self) -> int | None:
        """Return the sampler's length."""
        return length_of(self._sampler)

    def is_beyond(self, start: int) -> bool:
        """Return whether more units were consumed than there are, and than a last step may add."""
        length = self.length()
        return length is not None and start > length + max(length, _MOST_PADDED)

    def units(self, epoch: int, tail: Tail) -> tuple[Any, Any]:  # noqa: ARG002 - the same for all
        """Return the order of the units, or a stream of them."""
        sampler, seed, order = self._sampler, self._seed + epoch, None
        if self.is_own:  # each process has other batches
            return None, sampler
        if self.length() is not None:
            order = draw_order(sampler, seed)
        if order is None:
            self.check(f"the endless {type(sampler).__name__}", None)
        return order, stream_rng(sampler, seed).draw(sampler, size=self.group)

    def batches(self, shard: EpochShard) -> Iterator[Any]:
        """Yield the batches that the loader makes from the shard's units."""
        self._units.shard, self.is_iterated = shard, False
        return self.iterate(shard.position, shard.position.start)

    def seeded(self, units: Sequence[Any], epoch: int) -> list[Any]:
        """Return indices with the seed of each, which does not depend on the number of processes."""
        base = self.base_seed()
        return [(unit, derive_seed("sample", base, epoch, unit)) for unit in units]

    def batch_summary(self) -> str:
        """Return the batch size per process and the global one, or the sampler that shards."""
        if self.is_own:
            return f"already sharded by its {self._sharder}: left as it is"
        unit = "" if self.is_grouped else " of the sampler's batches"
        kind = "processes" if len(self.shares) == 1 else "parts"
        text = f"{self.group / self.shards:g} x {self.shards} {kind} = {self.group} global{unit}"
        left_out = (self.length() or 0) % self.group if self.drop_last else 0
        return f"{text}, drop_last leaves out {left_out} samples" if left_out else text

    def _set_group(self, size: int | None) -> None:
        """Set the number of units that all processes together take in a step."""
        options, shards, length = self.options, self.shards, self.length()
        is_global = options.batch == "global"
        if self.is_own and (is_global or options.tail not in (None, "pad")):
            option = "batch='global'" if is_global else f"tail={options.tail!r}"
            raise ConfigError(
                f"{option} with a loader that {self._sharder} already shards",
                why="its sampler decides which samples are repeated or left out",
                fix=f"remove {self._sharder}: shard_loader shards the loader itself",
            )
        text = "" if length is not None else ", which has no length"
        self.check(f"{type(self._sampler).__name__}{text}", length, drop_last=self.drop_last)
        if is_global and size is None:
            raise ConfigError(
                "batch='global' with a loader that has no batch size",
                why="its sampler makes the batches, which are not split between processes",
                fix="use batch='per_process', or DataLoader(batch_size=...)",
            )
        if not is_global:
            self.group = (size or 1) * shards * self.merged
            return
        assert size is not None
        may_be_uneven = options.tail in ("exact", "weighted") and length is not None
        if size < shards or (size % shards and not may_be_uneven):
            raise ConfigError(
                f"batch='global' with batch_size={size} on {shards} processes",
                why="it does not divide evenly: gradients of unequal batches would be averaged as if equal",
                fix=f"use batch_size={max(size // shards, 1) * shards}, or tail='weighted'",
            )
        self.group = size


def _distributed_sampler(loader: DataLoader[Any], world: World) -> Any | None:
    """Return the sampler that already shards a loader over the processes, as its attributes tell."""
    for sampler in (*samplers_in(loader.batch_sampler), *samplers_in(loader.sampler)):
        for names in _SHARDING:
            found = [getattr(sampler, name, None) for name in names]
            if not all(isinstance(each, int) for each in found):
                continue
            if found != [world.world_size, world.rank]:
                text = ", ".join(f"{name}={value}" for name, value in zip(names, found, strict=True))
                raise ConfigError(
                    f"{type(sampler).__name__}({text}) on rank {world.rank} of {world.world_size}",
                    why="some samples would be repeated, or left out",
                    fix="remove the sampler: shard_loader shards the loader itself",
                )
            return sampler
    return None
