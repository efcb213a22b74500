"""Trains as a rank whose default group is bound to a device, as with NCCL, and prints the backends of its groups.

The backend of the device, which no machine without one has, is gloo under another name.

    bound_group.py BACKEND SHARD_OVER FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize import FSDPBackend, checkpoints, parallel_model, rank, save

DEVICE = torch.device("cuda", 0)


def train(backend: Any, folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        parallel_model(model, backend=backend),
        checkpoints(folder, every=2, model=model, optimizer=optimizer) as saved,
    ):
        for step in range(4):
            model(torch.full((2, 4), float(step + rank()))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saved.step()
        save(f"{folder}-in-foreground", model=model)


def backends_of(group: Any) -> str:
    pairs = dist.get_backend_config(group).split(",")
    return " and ".join(sorted({pair.partition(":")[2] for pair in pairs}))


def gloo_under_another_name(*arguments: Any) -> Any:
    return dist.ProcessGroupGloo(*arguments)


def do_nothing(_group: Any, _device: torch.device) -> None:
    """Stand for what NCCL does where a new group is without this rank."""


if __name__ == "__main__":
    name, shard_over, folder = sys.argv[1:]
    dist.Backend.register_backend("pretended", gloo_under_another_name, devices=["cuda"])
    dist.ProcessGroupGloo.perform_nocolor_split = do_nothing  # type: ignore[attr-defined]  # gloo has none
    dist.init_process_group("cpu:gloo,cuda:pretended")
    dist.group.WORLD.bound_device_id = DEVICE  # type: ignore[union-attr]  # device_id= is refused without a GPU
    backends = {
        "ddp": "ddp",
        "fsdp": FSDPBackend(shard_over=int(shard_over)),
        "offloaded": FSDPBackend(shard_over=int(shard_over), cpu_offload=True),
    }
    train(backends[name], folder)
    if rank() == 0:
        print([backends_of(group) for group in dist.distributed_c10d._world.pg_map])
    dist.destroy_process_group()
