"""The mixed-precision levels O0 to O3, as a table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from typing_extensions import override

from parallelize.cluster.world import World
from parallelize.plugins.base import Amp, Level, Precision

__all__ = ["TABLE", "LevelRow", "LeveledPrecision"]


@dataclass(frozen=True)
class LevelRow:
    """Row of the table: one level; "half" means bf16 or fp16.

    Args:
        level: name of the level.
        autocast: whether matrix products and convolutions run in half, and the operations on autocast's fp32 list in
            fp32.
        half_weights: whether modules compute with half-precision weights.
        half_batch_norm: whether batch norm, too, computes with half-precision weights.
        master_weights: whether the optimizer updates fp32 weights.
        scales_loss: whether fp16 uses dynamic loss scaling against underflow; bf16 never needs it.
    """

    level: Level
    autocast: bool = False
    half_weights: bool = False
    half_batch_norm: bool = False
    master_weights: bool = True
    scales_loss: bool = False

    def cells(self, dtype: str = "half") -> dict[str, str]:
        """Return the texts of the row: name of the column -> text."""
        return {
            "weights in forward": dtype if self.half_weights else "fp32",
            "operations": f"{dtype}, numerically sensitive ones fp32" if self.autocast else "fp32",
            "batch norm's weights": dtype if self.half_batch_norm else "fp32",
            "weights updated": "fp32" if self.master_weights else dtype,
            "loss scaling": {"fp16": "dynamic", "bf16": "none"}.get(dtype, "fp16 only") if self.scales_loss else "none",
        }


# Rows and their meaning follow Apex's opt_levels (https://nvidia.github.io/apex/amp.html#opt-levels, and the classes
# O0-O3 of apex/amp/frontend.py), with one difference, which the guide states too: in O2 and O3 Apex casts the inputs of
# the model to half. Inputs are not cast here, so that integers stored as floats keep their values; autocast casts them
# in the operations that run in half, and runs softmax, losses and layer norm in fp32.
TABLE: dict[Level, LevelRow] = {
    each.level: each
    for each in (
        LevelRow("O0"),
        LevelRow("O1", autocast=True, scales_loss=True),
        LevelRow("O2", autocast=True, scales_loss=True, half_weights=True),
        LevelRow("O3", autocast=True, half_weights=True, half_batch_norm=True, master_weights=False),
    )
}

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class LeveledPrecision(Precision):
    """An engine with the levels of the table."""

    @override
    def describe(self, amp: Amp, *, device_type: str) -> str:
        """Describe the row that a request selects on a type of device, in one line."""
        row = self.row_of(amp)
        dtypes = self.dtypes.get(device_type, frozenset())
        dtype = _NAMES.get(amp.dtype or _preferred_dtype(dtypes, device_type), "half")
        cells = "; ".join(f"{column}: {text}" for column, text in row.cells(dtype).items())
        name = f"{row.level} in {dtype}" if row.autocast else row.level
        return f"{name} ({self.name}): {cells}"

    def row_of(self, amp: Amp) -> LevelRow:
        """Return the row of the requested level, or of the engine's default level."""
        return TABLE[amp.level or self.default_level]

    def resolve(self, amp: Amp, *, device: torch.device, world: World) -> Amp:
        """Return the request with level and dtype filled in, the same on every rank.

        The dtype is bf16 if every rank's device supports it natively, else fp16. Several ranks with GPUs decide this
        by a collective, unless the request has a dtype.
        """
        dtypes, dtype = self.dtypes[device.type], amp.dtype
        if dtype is None:
            dtype = _preferred_dtype(dtypes, device.type)
            # Every rank must call this all-reduce, even one whose device does not support bf16.
            if torch.bfloat16 in dtypes and world.world_size > 1 and device.type != "cpu":
                dtype = torch.bfloat16 if _all_ranks_support_bf16(device) else torch.float16
        return dataclasses.replace(amp, level=self.row_of(amp).level, dtype=dtype)


def _preferred_dtype(dtypes: frozenset[torch.dtype], device_type: str) -> torch.dtype:
    """Return bf16, which has the range of fp32, if the engine and the device support it, else fp16."""
    has_bf16 = torch.bfloat16 in dtypes and (device_type != "cuda" or _supports_bf16())
    return torch.bfloat16 if has_bf16 else torch.float16


def _all_ranks_support_bf16(device: torch.device) -> bool:
    supported = torch.tensor(float(_supports_bf16()), device=device)
    dist.all_reduce(supported, dist.ReduceOp.MIN)
    return bool(supported)


def _supports_bf16() -> bool:
    # Without a GPU, this is called only to describe a request for GPUs.
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
