"""The mixed-precision levels O0 to O3, as a table.

Glossary of this room:

    half            bf16 or fp16
    level           which of operations, weights and optimizer are in half: a row of the table
    autocast        torch runs each operation in half or in fp32, by lists of its own
    cast            a copy of a parameter in half, by which a forward computes
    master          the fp32 parameter that the optimizer updates, while forward uses a cast
    loss scale      a factor of the loss, so that small gradients do not become 0 in fp16
    flag            whether gradients of a model have inf or nan: a tensor with 1 or 0
    engine          how a level is implemented: native (torch.amp), apex (NVIDIA's Apex)
    session         the mixed precision of one block
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from typing_extensions import override

from parallelize.cluster.world import World
from parallelize.plugins.base import Amp, Level, Precision


@dataclass(frozen=True)
class LevelRow:
    """Row of the table: one level.

    Args:
        level: name of the level.
        autocast: whether matrix products and convolutions run in half, and the operations on
            autocast's fp32 list in fp32.
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
        """Return the texts of the row: name of the column -> text.

        Args:
            dtype: name of the half-precision dtype; "half": either of them.
        """
        cells = {
            "weights in forward": "fp32",
            "operations": "fp32",
            "batch norm's weights": "fp32",
            "weights updated": "fp32",
            "loss scaling": "none",
        }
        if self.half_weights:
            cells["weights in forward"] = dtype
        if self.autocast:
            cells["operations"] = f"{dtype}, numerically sensitive ones fp32"
        if self.half_batch_norm:
            cells["batch norm's weights"] = dtype
        if not self.master_weights:
            cells["weights updated"] = dtype
        if self.scales_loss:
            scaling_of_dtype = {"fp16": "dynamic", "bf16": "none"}
            cells["loss scaling"] = scaling_of_dtype.get(dtype, "fp16 only")
        return cells


# Rows and their meaning follow Apex's opt_levels
# (https://nvidia.github.io/apex/amp.html#opt-levels, and the classes O0-O3 of
# apex/amp/frontend.py), with one difference, which the guide states too: in O2 and O3 Apex casts
# the inputs of the model to half. Inputs are not cast here, so that integers stored as floats keep
# their values; autocast casts them in the operations that run in half, and runs softmax, losses and
# layer norm in fp32.
TABLE: dict[Level, LevelRow] = {
    "O0": LevelRow("O0"),
    "O1": LevelRow("O1", autocast=True, scales_loss=True),
    "O2": LevelRow("O2", autocast=True, scales_loss=True, half_weights=True),
    "O3": LevelRow(
        "O3", autocast=True, half_weights=True, half_batch_norm=True, master_weights=False
    ),
}

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class LeveledPrecision(Precision):
    """An engine with the levels of the table."""

    @override
    def describe(self, amp: Amp, *, device_type: str) -> str:
        """Describe the row that a request selects on a type of device, in one line."""
        row = self.row_of(amp)
        supported = self.dtypes.get(device_type, frozenset())
        dtype = amp.dtype or _preferred_dtype(supported, device_type)
        dtype_name = _NAMES.get(dtype, "half")
        columns = []
        for column, text in row.cells(dtype_name).items():
            columns.append(f"{column}: {text}")
        name: str = row.level
        if row.autocast:
            name += f" in {dtype_name}"
        return f"{name} ({self.name}): {'; '.join(columns)}"

    def row_of(self, amp: Amp) -> LevelRow:
        """Return the row of the requested level, or of the engine's default level."""
        return TABLE[amp.level or self.default_level]

    def resolve(self, amp: Amp, *, device: torch.device, world: World) -> Amp:
        """Return the request with level and dtype filled in, the same on every rank.

        The dtype is bf16 if every rank's device supports it natively, else fp16. Several ranks with
        GPUs decide this by a collective, unless the request has a dtype.
        """
        dtype = amp.dtype
        if dtype is None:
            supported = self.dtypes[device.type]
            dtype = _preferred_dtype(supported, device.type)
            # Every rank must call this all-reduce, even one whose device does not support bf16.
            if torch.bfloat16 in supported and world.world_size > 1 and device.type != "cpu":
                dtype = torch.float16
                if _all_ranks_support_bf16(device):
                    dtype = torch.bfloat16
        return dataclasses.replace(amp, level=self.row_of(amp).level, dtype=dtype)


def _preferred_dtype(dtypes: frozenset[torch.dtype], device_type: str) -> torch.dtype:
    """Return bf16, which has the range of fp32, if engine and device support it, else fp16.

    Args:
        dtypes: the dtypes that the engine supports on such a device.
        device_type: "cpu" or "cuda".
    """
    has_bf16 = torch.bfloat16 in dtypes
    if device_type == "cuda":
        has_bf16 = has_bf16 and _supports_bf16()
    return torch.bfloat16 if has_bf16 else torch.float16


def _all_ranks_support_bf16(device: torch.device) -> bool:
    supported = torch.tensor(float(_supports_bf16()), device=device)
    dist.all_reduce(supported, dist.ReduceOp.MIN)
    return bool(supported)


def _supports_bf16() -> bool:
    # Without a GPU, this is called only to describe a request for GPUs.
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
