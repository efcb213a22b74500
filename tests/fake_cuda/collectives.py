"""Process groups of device tensors, which are made where torch makes those of NCCL and gloo."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.constants
import torch.distributed.distributed_c10d as c10d

__all__ = ["install"]

# The name of a gloo group that carries the values of NCCL's: gloo's recorder is not asked about it.
CARRIER = "fake-nccl/"


def install(library: Any) -> None:
    """Give torch a class for NCCL's groups, and the groups of gloo a part for device tensors."""
    c10d.ProcessGroupNCCL = torch._C._distributed_c10d.ProcessGroupNCCL = library.ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    timeout = timedelta(minutes=10)
    c10d.default_pg_nccl_timeout = dist.constants.default_pg_nccl_timeout = timeout
    _carry_device_tensors_of_gloo(library)
    _record(library)


def _carry_device_tensors_of_gloo(library: Any) -> None:
    """Let a group of gloo have a part for tensors of the device, which waits for the host as gloo does."""
    register = dist.ProcessGroup._register_backend

    def register_backend(self: Any, device: torch.device, kind: Any, backend: Any) -> None:
        if device.type == "cuda" and isinstance(backend, dist.ProcessGroupGloo):
            backend, kind = library.DeviceGroup(backend, False, backend.options), dist.ProcessGroup.BackendType.CUSTOM
        register(self, device, kind, backend)

    dist.ProcessGroup._register_backend = register_backend  # type: ignore[method-assign]  # in place of torch's


def _record(library: Any) -> None:
    """Answer for NCCL's recorder, and leave the carriers out of gloo's."""
    of_gloo = torch._C._distributed_c10d._dump_fr_trace

    def dump_nccl_trace(includeCollectives: bool = True, **_: Any) -> bytes:  # noqa: N803 - torch's names
        entries = library.recorded()
        status: dict[str, dict[str, int]] = {}
        for entry in entries:
            if not entry["is_p2p"]:
                last = status.setdefault(entry["process_group"][0], dict.fromkeys(STATUS, 0))
                last["last_enqueued_collective"] = last["last_started_collective"] = entry["collective_seq_id"]
                if entry["state"] == "completed":
                    last["last_completed_collective"] = entry["collective_seq_id"]
        return pickle.dumps({"entries": entries if includeCollectives else [], "pg_status": status})

    def dump_fr_trace(*args: Any, **kwargs: Any) -> bytes:
        trace = pickle.loads(of_gloo(*args, **kwargs))
        entries = []
        for entry in trace.get("entries", ()):
            name, _ = entry["process_group"]
            # The recorder of torch 2.13 has no name for a carrier, and has one for any other group.
            if name and not name.startswith(CARRIER):
                entries.append(entry)
        trace["entries"] = entries
        return pickle.dumps(trace)

    torch._C._distributed_c10d._dump_nccl_trace = dump_nccl_trace
    torch._C._distributed_c10d._dump_fr_trace = dump_fr_trace


STATUS = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
