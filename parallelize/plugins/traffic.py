"""Communication volume of a training step, computed from tensor sizes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass(frozen=True)
class Traffic:
    """Bytes that each process passes to collectives in one step.

    Args:
        gradient_bytes: size of the gradients that are averaged.
        operation: past participle for the startup summary: "all-reduced" in "1 MB of gradients all-reduced".
        gathered_bytes: size of the all-gathered parameters, counted once per all-gather.
    """

    gradient_bytes: int
    operation: str = "all-reduced"
    gathered_bytes: int = 0
