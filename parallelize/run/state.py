"""What has happened so far in a run, as far as code of other rooms must know it later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from parallelize.agreement.rank_consistency import ConsistencyCheck
    from parallelize.backends.auto.choice import Choice


@dataclass(eq=False)
class RunState:
    """What has happened so far in the run of this process.

    Each field has one writer, which its sentence names.

    Attributes:
        is_in_block: whether a `parallel_model` block is open. The outermost block sets it. Without
            it, optimizer steps in a block of independent models would be warned about, and a
            decorated function for several processes would silently run in the one process of the
            block.
        has_logged_summary: whether the startup summary was logged. `StartupSummary` sets it, so
            that a second block of the run does not log the line again.
        engine_choices: what `backend="auto"` has chosen, by the path of the file that keeps it;
            None: no file keeps it. A choice is found by the text of what it was made for. Without
            it, each block would measure the model again.
        pending_checks: what this rank says that it does, until the next point that all ranks reach.
            Loaders add to it, and `run_checks` empties it. A check that its loader has dropped is
            gone from it.
    """

    is_in_block: bool = False
    has_logged_summary: bool = False
    engine_choices: dict[str | None, dict[str, Choice]] = field(default_factory=dict)
    pending_checks: WeakSet[ConsistencyCheck] = field(default_factory=WeakSet)
