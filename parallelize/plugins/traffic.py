"""What a training step sends between processes, counted before it is sent."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass(frozen=True)
class Traffic:
    """What each process hands to collectives in one step.

    Args:
        gradient_bytes: gradients that are averaged.
        how: what is done with them, as a phrase for a person.
        gathered_bytes: parameters that are put together from their parts, as often as they are.
    """

    gradient_bytes: int
    how: str = "all-reduced"
    gathered_bytes: int = 0
