"""CUDA tensors over gloo, in the order of NCCL: a collective runs on a stream of its own, and the host goes on."""

from __future__ import annotations

import functools
import sys
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
    """Run a collective as NCCL's process group does: on a stream of its own, for which only `Work.wait()` waits.

    The stream waits for the current one, and keeps the memory of all tensors. The values are exchanged at once.
    """
    tensors = [each for each in _tensors(args) if each.is_cuda]
    device = tensors[0].device
    stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.no_grad(), torch.cuda.stream(stream):
        for each in tensors:
            each.record_stream(stream)
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


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for item in value for each in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_plain = value.is_cuda and not value.is_sparse
        return sys.modules["fake_cuda_library"].sent(value) if is_plain else value.cpu()
    return [_to_host(each) for each in value] if isinstance(value, (list, tuple)) else value


def _copy_back(to: Any, value: Any) -> None:
    if isinstance(to, torch.Tensor):
        if to.is_cuda and to.is_sparse:
            to.copy_(value)
        elif to.is_cuda:
            sys.modules["fake_cuda_library"].received(to, value)
    elif isinstance(to, (list, tuple)):
        for first, second in zip(to, value, strict=True):
            _copy_back(first, second)


def _completed(results: Any) -> Any:
    """Return a Work whose future has the device's tensors, and whose wait() makes the current stream wait for this one.

    DDP reads its buckets from there.
    """
    tensors = [results] if isinstance(results, torch.Tensor) else list(results)
    devices = {each.device for each in _tensors(tensors) if each.is_cuda}
    future: torch.futures.Future[Any] = torch.futures.Future(devices=sorted(devices, key=str))
    future.set_result(tensors)
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()
