"""What cuBLAS takes of a device's memory, for tests that measure or limit the memory of a program."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["take_workspaces"]


def take_workspaces(*devices: torch.device | str) -> None:
    """Let cuBLAS allocate its workspaces on these devices, so that what follows is the program's memory only.

    Each handle of cuBLAS takes one from torch's allocator at its first product on a stream, and keeps it: 32 MiB on an
    H100. This thread has a handle for each device, and so has autograd's thread of the device.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp of torch
    """
    for device in devices:
        layer = nn.Linear(16, 16, device=device)
        layer(torch.ones(16, 16, device=device)).sum().backward()
