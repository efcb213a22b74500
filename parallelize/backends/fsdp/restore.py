"""The end of a block: sharded tensors become plain ones, with full values."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import nn

from parallelize.agreement.fingerprint import differences, digest
from parallelize.backends.fsdp.shards import full_tensor
from parallelize.run.sharded_tensors import ShardedTensors

__all__ = ["make_plain", "restore"]


def make_plain(tensor: Any, home: torch.device) -> None:
    """Turn a sharded tensor into a plain one on a device."""
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    shard = tensor.__dict__.pop("shard")
    del tensor.__dict__["registry"]
    tensor.data = full_tensor(shard).to(home)
    tensor.requires_grad_(shard.requires_grad and shard.is_leaf)
    if shard.is_leaf and shard.grad is not None:
        tensor.grad = full_tensor(shard.grad).to(home)


def restore(registry: ShardedTensors, home: torch.device) -> None:
    """Turn the sharded tensors that are alive into plain ones, if the ranks have the same ones and no block is open."""
    if registry.open_engines:
        return
    for _ in range(3):  # hang detection's thread may hold frames for the time of a look
        gc.collect()  # cycles, which each rank frees at another time
        found = [each for each in registry.alive() if "shard" in each.__dict__]
        if not any(
            differences([digest(repr([(tuple(each.shard.shape), each.dtype) for each in found]))])
        ):
            for each in found:
                make_plain(each, home)
            return
        time.sleep(0.1)
