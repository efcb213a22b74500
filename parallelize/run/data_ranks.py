"""The ranks over which the data of a run is divided, and gradients are averaged.

They are all ranks of the world, unless a model is tensor parallel already. Then several ranks hold
the parts of one model, and read the same batches:

    ranks that hold one model       0 1          2 3
    data ranks                      0   2        of the ranks that hold the first part
                                      1   3      of the ranks that hold the second part
    number of a rank's data         0 0          1 1

The ranks 0 and 2 hold equal parameters, so that their gradients are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelize.cluster.world import World


@dataclass(frozen=True)
class DataRanks:
    """The ranks that hold the same parameters as this rank, and read other batches.

    Args:
        groups: the ranks of the world, divided into groups that hold the same parameters. All
            groups have equally many ranks, in the order of the data that they read.
        ranks: the group of this rank.
        rank: the position of this rank in its group: the number of its data.
    """

    groups: tuple[tuple[int, ...], ...] = ((0,),)
    ranks: tuple[int, ...] = (0,)
    rank: int = 0

    @property
    def size(self) -> int:
        """The number of parts into which each batch is divided."""
        return len(self.ranks)

    @property
    def first_rank(self) -> int:
        """The rank of the world whose parameters this rank gets at the entry of a block."""
        return self.ranks[0]

    @property
    def are_all_ranks(self) -> bool:
        """Whether all ranks of the world hold the same parameters."""
        return len(self.groups) == 1

    def first_rank_of(self, rank: int) -> int:
        """Return the first of the ranks that hold the same parameters as a rank of the world."""
        return next(ranks[0] for ranks in self.groups if rank in ranks)

    def data_of(self, rank: int) -> int:
        """Return the number of the data that a rank of the world reads."""
        return next(ranks.index(rank) for ranks in self.groups if rank in ranks)


def all_ranks(world: World) -> DataRanks:
    """Return the data ranks of a world in which each rank holds whole models."""
    ranks = tuple(range(world.world_size))
    return DataRanks((ranks,), ranks, world.rank)


def divided_world(world: World, groups: tuple[tuple[int, ...], ...]) -> DataRanks:
    """Return the data ranks of a world whose ranks hold parts of models.

    Args:
        world: the ranks.
        groups: as for `DataRanks`.
    """
    ranks = next(ranks for ranks in groups if world.rank in ranks)
    return DataRanks(groups, ranks, ranks.index(world.rank))
