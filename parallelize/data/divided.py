"""Samplers that already divide the data over the processes: known by attributes, and left alone."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from parallelize.data.draws import samplers_in
from parallelize.errors import ConfigError
from parallelize.run.data_ranks import DataRanks

# Attributes of a sampler that divides by itself: torch, Lightning and timm have the first ones,
# Accelerate the second, WebDataset and torchdata the third, Megatron and DeepSpeed the last.
_DIVIDING = (
    ("num_replicas", "rank"),
    ("num_processes", "process_index"),
    ("num_shards", "cur_shard"),
    ("world_size", "rank"),
    ("data_parallel_size", "data_parallel_rank"),
)


def dividing_sampler(loader: DataLoader[Any], data_ranks: DataRanks) -> Any | None:
    """Return the sampler that already divides a loader over the processes, as its attributes tell.

    Raises:
        ConfigError: it divides for another rank, or another number of processes.
    """
    for sampler in (*samplers_in(loader.batch_sampler), *samplers_in(loader.sampler)):
        for names in _DIVIDING:
            values = [getattr(sampler, name, None) for name in names]
            if not all(isinstance(value, int) for value in values):
                continue
            if values != [data_ranks.size, data_ranks.rank]:
                attributes = ", ".join(f"{name}={getattr(sampler, name)}" for name in names)
                raise ConfigError(
                    f"{type(sampler).__name__}({attributes}) on rank {data_ranks.rank} of "
                    f"{data_ranks.size}",
                    why="some samples would be repeated, or left out",
                    fix="remove the sampler: shard_loader shards the loader itself",
                )
            return sampler
    return None


class _CountedEpoch(int):
    """An epoch that was counted. `set_epoch` of the user replaces it by a plain int."""


class CountedSampler:
    """Counts the epochs of a DistributedSampler, unless the user calls its `set_epoch`.

    An epoch that was counted is marked by its type: `set_epoch` of the user stores a plain int, and
    so ends the counting.

    Args:
        sampler: the one that divides the data; other classes than torch's are left alone.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler: DistributedSampler[Any] | None = None
        if isinstance(sampler, DistributedSampler):
            self._sampler = sampler
            # Another epoch was set by the user, before the loader was made.
            if type(sampler.epoch) is int and sampler.epoch == 0:
                sampler.epoch = _CountedEpoch(0)

    def begin(self, epoch: int) -> None:
        """Let the sampler draw an epoch, if the user has set none."""
        if self._sampler is not None and isinstance(self._sampler.epoch, _CountedEpoch):
            self._sampler.epoch = _CountedEpoch(epoch)
