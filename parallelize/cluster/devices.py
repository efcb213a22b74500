"""The accelerators of this machine: the only module that probes hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallelize.errors import ConfigError

MASKS = {"cuda": "CUDA_VISIBLE_DEVICES"}
"""Type of device -> the variable that limits, and so renumbers, those that a process sees."""


@dataclass(frozen=True)
class Hardware:
    """The accelerators of this machine.

    Args:
        device_type: torch's name for them ("cuda", "mps", ...), "cpu" if there are none.
        count: number of devices that this process sees.
    """

    device_type: str = "cpu"
    count: int = 0


def probe() -> Hardware:
    """Return the accelerators of this machine, without creating a context on a device.

    On CUDA the count comes from NVML where that works. The driver then stays uninitialized: a later
    fork can still use the GPUs, and CUDA_VISIBLE_DEVICES can still change.
    `torch.accelerator.is_available` would initialize it.

    Source: https://docs.pytorch.org/docs/stable/notes/multiprocessing.html, "Poison fork"
    """
    accelerator = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if accelerator is None or count == 0:
        return Hardware()
    return Hardware(accelerator.type, count)


def compose_visible_devices(mask: str | None, indices: Sequence[int]) -> str:
    """Return the CUDA_VISIBLE_DEVICES under which a process sees only the GPUs `indices`.

    Args:
        mask: current value of the variable: indices, GPU UUIDs or MIG UUIDs; None: every GPU is
            visible.
        indices: positions among the currently visible devices.

    Raises:
        ConfigError: the mask has fewer entries than torch sees devices.
    """
    if mask is None:
        return ",".join(map(str, indices))
    entries = [entry.strip() for entry in mask.split(",") if entry.strip()]
    if max(indices, default=-1) >= len(entries):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={mask!r} for GPUs {list(indices)} of this process",
            why="it names fewer devices than torch sees, so that those of the workers cannot be "
            "named",
            fix="name each device by its index or UUID, as `nvidia-smi -L` lists them",
        )
    return ",".join(entries[index] for index in indices)
