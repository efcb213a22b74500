"""CUDA tensors over gloo: through copies in the host's memory, as in a build of gloo with CUDA."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["install"]

# The operators of c10d whose tensors are on the device; the first argument holds what the operator returns.
OPERATORS = [
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "_allgather_base_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "broadcast_",
    "gather_",
    "recv_",
    "recv_any_source_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "_reduce_scatter_base_",
    "scatter_",
    "send",
]
# Kept for as long as the process lives: they end with the object.
LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """Give each collective an implementation for CUDA tensors, and make gloo their default process group."""
    library = torch.library.Library("c10d", "IMPL")
    for name in OPERATORS:
        library.impl(name, functools.partial(_through_host, getattr(torch.ops.c10d, name).default), "CUDA")
    LIBRARIES.append(library)
    dist.Backend.default_device_backend_map["cuda"] = "gloo"


def _through_host(operator: Any, *args: Any) -> Any:
    with torch.no_grad():
        on_host = [_to_host(each) for each in args]
        found = operator(*on_host)
        is_work_only = not isinstance(found, tuple)
        work = found if is_work_only else found[-1]
        if operator is torch.ops.c10d.send.default:
            return work  # ends when the receiver has taken the copy, which gloo keeps
        dist.distributed_c10d.Work.unbox(work).wait()
        for before, after in zip(args, on_host, strict=True):
            _copy_back(before, after)
    done = _completed(args[0])
    return done if is_work_only else (args[0], done)


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return [_to_host(each) for each in value] if isinstance(value, (list, tuple)) else value


def _copy_back(to: Any, value: Any) -> None:
    if isinstance(to, torch.Tensor):
        if to.is_cuda:
            to.copy_(value)
    elif isinstance(to, (list, tuple)):
        for first, second in zip(to, value, strict=True):
            _copy_back(first, second)


def _completed(results: Any) -> Any:
    """Return a finished Work whose future has the device's tensors: DDP reads its buckets from there."""
    tensors = [results] if isinstance(results, torch.Tensor) else list(results)
    devices = {each.device for each in tensors if isinstance(each, torch.Tensor) and each.is_cuda}
    future: torch.futures.Future[Any] = torch.futures.Future(devices=sorted(devices, key=str))
    future.set_result(tensors)
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()
