"""What has happened so far in a run, as far as code of other rooms must know it later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from parallelize.agreement.rank_consistency import ConsistencyCheck
    from parallelize.run.data_ranks import DataRanks


@dataclass(eq=False)
class RunState:
    """What has happened so far in the run of this process.

    Each field has one writer, which its text names.

    Attributes:
        is_in_block: whether a `parallel_model` block is open. The outermost block sets it. Without
            it, optimizer steps in a block of independent models would be warned about, and a
            decorated function for several processes would silently run in the one process of the
            block.
        has_logged_summary: whether the startup summary was logged. `StartupSummary` sets it, so
            that a second block of the run does not log the line again.
        pending_checks: what this rank says that it does, such as that it iterates epoch 2. Loaders
            add checks. At the next point that all ranks reach, `run_checks` compares them with the
            other ranks', and empties the set. A check that its loader has dropped is gone from it.
        data_ranks: the ranks over which data is divided; None: all ranks of the world. The
            outermost block sets it, by its models. It stays after the block, so that the ranks of a
            tensor parallel model evaluate the same batches.
    """

    is_in_block: bool = False
    has_logged_summary: bool = False
    pending_checks: WeakSet[ConsistencyCheck] = field(default_factory=WeakSet)
    data_ranks: DataRanks | None = None
