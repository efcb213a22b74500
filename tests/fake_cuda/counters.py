"""What a process has done with its devices: numbers that tests compare before and after some steps."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from fake_cuda import cuda_api

__all__ = ["communicators", "gloo_meshes", "host_waits", "launches", "pinned_bytes"]


def _library() -> Any:
    return sys.modules["fake_cuda_library"]


def host_waits() -> int:
    """Return how often the host has waited for a device: by `item`, `synchronize`, copies to pageable memory."""
    return _library().host_wait_count()


def launches(name: str) -> int:
    """Return how many kernels of an operator, such as "aten::mm", this process has launched."""
    return _library().launch_count(name)


def pinned_bytes() -> int:
    """Return the bytes of page-locked memory that torch has allocated, and of that which is registered."""
    return _library().pinned_bytes() + cuda_api.registered_bytes()


def communicators() -> int:
    """Return how many groups of NCCL this process has."""
    return len({id(backend) for backend in _backends() if isinstance(backend, _library().ProcessGroupNCCL)})


def gloo_meshes() -> int:
    """Return how many groups of gloo this process has, each with a connection to every rank."""
    return len({id(backend) for backend in _backends() if isinstance(backend, dist.ProcessGroupGloo)})


def _backends() -> list[Any]:
    backends = []
    groups: Any = list(dist.distributed_c10d._world.pg_names)
    for group in groups:
        backends += [group._get_backend(torch.device(kind)) for kind in group._device_types]
    return backends
