"""What each level of mixed precision means, as data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallelize.cluster.world import World
from parallelize.plugins.base import LEVELS, Amp, Level, Precision

__all__ = ["TABLE", "LevelRow", "describe", "markdown", "resolve", "row_of"]


@dataclass(frozen=True, kw_only=True)
class LevelRow:
    """One level; "half" is bf16 or fp16.

    Args:
        level: its name.
        autocast: whether matrix products and convolutions run in half, and what torch lists as delicate in fp32.
        half_weights: whether a module computes with its weights in half.
        half_batch_norm: whether that goes for batch norm too.
        master_weights: whether the optimizer updates fp32 weights.
        scales_loss: whether fp16 gradients are kept from underflow by a dynamic loss scale; bf16 needs none.
    """

    level: Level
    autocast: bool
    half_weights: bool
    half_batch_norm: bool
    master_weights: bool
    scales_loss: bool

    def cells(self, dtype: str = "half") -> dict[str, str]:
        """The row as text, by column."""
        ops = f"{dtype}, delicate ones fp32" if self.autocast else "fp32"
        batch_norm = dtype if self.half_batch_norm else "fp32"
        return {
            "level": self.level,
            "weights in forward": dtype if self.half_weights else "fp32",
            "operations": ops,
            "batch norm's weights": batch_norm,
            "weights updated": "fp32" if self.master_weights else dtype,
            "loss scaling": _scaling(self, dtype),
        }


def _scaling(row: LevelRow, dtype: str) -> str:
    if not row.scales_loss or dtype == "bf16":
        return "none"
    return "dynamic" if dtype == "fp16" else "fp16 only"


# Rows and their meaning follow Apex's opt_levels (https://nvidia.github.io/apex/amp.html#opt-levels, and the classes
# O0-O3 of apex/amp/frontend.py), with one difference, which README states too: in O2 and O3 Apex casts the inputs of
# the model to half. Nothing is cast at the model's door here, so that integers stored as floats survive; autocast
# casts at the operations that need it, and keeps its delicate ones (softmax, losses, layer norm) in fp32.
TABLE: dict[Level, LevelRow] = {
    "O0": LevelRow(
        level="O0",
        autocast=False,
        half_weights=False,
        half_batch_norm=False,
        master_weights=True,
        scales_loss=False,
    ),
    "O1": LevelRow(
        level="O1",
        autocast=True,
        half_weights=False,
        half_batch_norm=False,
        master_weights=True,
        scales_loss=True,
    ),
    "O2": LevelRow(
        level="O2",
        autocast=True,
        half_weights=True,
        half_batch_norm=False,
        master_weights=True,
        scales_loss=True,
    ),
    "O3": LevelRow(
        level="O3",
        autocast=True,
        half_weights=True,
        half_batch_norm=True,
        master_weights=False,
        scales_loss=False,
    ),
}

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def row_of(amp: Amp, precision: Precision | type[Precision]) -> LevelRow:
    """The row a request chooses under an engine."""
    return TABLE[amp.level or precision.default_level]


def markdown() -> str:
    """The table as README prints it."""
    rows = [TABLE[level].cells() for level in LEVELS]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def describe(amp: Amp, precision: Precision | type[Precision], *, device_type: str) -> str:
    """The row of the table that a request chooses on a kind of device, as one line.

    Args:
        amp: the request.
        precision: the engine.
        device_type: torch's name for the kind of device.
    """
    row = row_of(amp, precision)
    dtype = _NAMES.get(amp.dtype or _widest(precision.dtypes.get(device_type, frozenset()), device_type), "half")
    cells = row.cells(dtype)
    said = "; ".join(f"{column}: {text}" for column, text in cells.items() if column != "level")
    name = row.level if not row.autocast else f"{row.level} in {dtype}"
    return f"{name} ({precision.name}): {said}"


def resolve(amp: Amp, precision: Precision, *, device: torch.device, world: World) -> Amp:
    """The request with nothing left open, the same on every rank.

    The type is bf16 where every rank's device does it well, else fp16; ranks ask each other only if the user named
    none and there are several.

    Args:
        amp: the request.
        precision: the engine that runs it.
        device: the first device of this process.
        world: this process among the others.
    """
    row = row_of(amp, precision)
    known = precision.dtypes[device.type]
    dtype = amp.dtype
    if dtype is None:
        dtype = _widest(known, device.type)
        # Every rank must come here, also one that has no bf16: it is its answer that the others wait for.
        if torch.bfloat16 in known and world.world_size > 1 and device.type != "cpu":
            dtype = torch.bfloat16 if _all_ranks_have_it(device) else torch.float16
    return dataclasses.replace(amp, level=row.level, dtype=dtype)


def _widest(known: frozenset[torch.dtype], device_type: str) -> torch.dtype:
    """bf16, which has fp32's range, where an engine runs it and the device does it without emulation."""
    if torch.bfloat16 not in known:
        return torch.float16
    return torch.float16 if device_type == "cuda" and not _has_bf16() else torch.bfloat16


def _has_bf16() -> bool:
    # A machine without a GPU asks this only to explain what a request would mean on one.
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def _all_ranks_have_it(device: torch.device) -> bool:
    having = torch.ones((), device=device)
    if not _has_bf16():
        having.zero_()
    dist.all_reduce(having, dist.ReduceOp.MIN)
    return bool(having.item())
