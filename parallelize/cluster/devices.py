"""The accelerators of this machine: the only module that probes hardware."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["MASKS", "Hardware", "compose_visible_devices", "probe", "set_device_order"]

MASKS = {"cuda": "CUDA_VISIBLE_DEVICES"}
"""Type of device -> the variable that limits which of them a process sees, and thereby renumbers them."""


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

    On CUDA the count comes from NVML where that works. The driver then stays uninitialized: a later fork can still use
    the GPUs, and CUDA_VISIBLE_DEVICES can still change. `torch.accelerator.is_available` would initialize it.

    Source: https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#poison-fork-in-multiprocessing
    """
    accelerator = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    return Hardware() if accelerator is None or count == 0 else Hardware(accelerator.type, count)


def compose_visible_devices(mask: str | None, indices: Sequence[int]) -> str:
    """Return the CUDA_VISIBLE_DEVICES under which a process sees only the GPUs `indices`.

    Args:
        mask: current value of the variable: indices, GPU UUIDs or MIG UUIDs; None: every GPU is visible.
        indices: positions among the currently visible devices.
    """
    if mask is None:
        return ",".join(str(index) for index in indices)
    entries = [entry.strip() for entry in mask.split(",") if entry.strip()]
    return ",".join(entries[index] for index in indices)


def set_device_order(environ: MutableMapping[str, str]) -> None:
    """Set CUDA_DEVICE_ORDER, if the user has not, so that an index means the same GPU in this process and in workers.

    GPUs are numbered as in nvidia-smi, unless CUDA has already numbered them by their speed in this process.

    Args:
        environ: variables of this process, which workers inherit.

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    is_numbered = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types for it
    environ.setdefault("CUDA_DEVICE_ORDER", "FASTEST_FIRST" if is_numbered else "PCI_BUS_ID")
