"""Where a model lies until it has been measured: whole on the loop's device, or spread so that it can run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from parallelize.backends.balanced import refusals, units
from parallelize.backends.balanced.costs import Spot
from parallelize.backends.balanced.partition import Chain, Seats, smallest_cap, split_one_phase
from parallelize.backends.balanced.segment import Stage
from parallelize.backends.balanced.stage_threads import places

__all__ = ["at", "spread"]


def at(device: torch.device, spots: Sequence[Spot]) -> Spot:
    """What a device can do; it holds nothing if it is none of the pipeline's."""
    here = [spot for spot in spots if spot.device == str(device)]
    return here[0] if here else Spot(device=str(device), cap_bytes=-1.0)


def spread(
    model: nn.Module, spots: Sequence[Spot], *, home: torch.device, bytes_per_byte: float
) -> tuple[tuple[Stage, ...], dict[int, list[int]]]:
    """Stages, and the stage of each submodule that has none itself.

    Args:
        model: in the order in which its submodules were added; how they are called is not known yet.
        spots: the devices; the last submodules go to the first, where the loop has its targets.
        home: the loop's device.
        bytes_per_byte: of a parameter: itself, its gradient, what the optimizer keeps.

    Raises:
        ConfigError: the parameters alone fit nowhere.
    """
    finest = units.finest(model)
    seen: dict[int, int] = {}
    sizes: list[float] = []
    for module in finest:
        new = units.parameter_bytes(module, seen)
        seen |= new
        sizes.append(bytes_per_byte * sum(new.values()))
    own = bytes_per_byte * sum(units.parameter_bytes(model, seen).values())
    if sum(sizes) + own <= at(home, spots).cap_bytes:
        return places([home]), {id(module): [0] for module in finest}
    order = [*spots[1:], spots[0]]
    sizes = [sizes[0] + own, *sizes[1:]] if sizes else [own]
    nothing = [0.0] * len(sizes)
    bounds = split_one_phase(
        sizes,
        Chain(forward=sizes, backward=nothing, memory=sizes, cut=nothing),
        Seats(caps=[spot.cap_bytes for spot in order], speeds=[1.0] * len(order)),
    )
    if bounds is None or not finest:
        raise refusals.too_large(smallest_cap(sizes, len(order)), [spot.device for spot in spots], is_measured=False)
    table = {id(module): [stage] for stage in range(len(order)) for module in finest[bounds[stage] : bounds[stage + 1]]}
    return places([torch.device(spot.device) for spot in order]), table
