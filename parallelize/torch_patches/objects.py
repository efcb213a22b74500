"""Signs the pickles that torch's collectives of Python objects send.

    all_gather_object(...)       and the other collectives of objects, as in distributed.checkpoint
    ├── _object_to_tensor        puts 32 bytes, an HMAC with the run's key, before the pickle
    └── _tensor_to_object        unpickles only a message with the right HMAC, or raises

A pickle can run code when it is read, and torch reads every message that arrives
(distributed_c10d.py). Without signatures, a stranger who connects to the ranks as one of them could
run code on them.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from parallelize.errors import SyncError
from parallelize.torch_patches.private import replace_attribute

_MAC_BYTES = 32


@contextlib.contextmanager
def signed_objects(key: bytes) -> Iterator[None]:
    """In the context, sign each pickle that torch sends, and verify each one that it receives.

    All ranks have to be in such a context with the same key. Otherwise a collective of objects
    raises a SyncError.

    Args:
        key: the secret of the run.
    """
    torch_module: Any = dist.distributed_c10d
    to_tensor = torch_module._object_to_tensor
    to_object = torch_module._tensor_to_object

    def mac_of(content: bytes) -> bytes:
        # The prefix parts these messages from others that are signed with the same key.
        return hmac.digest(key, b"torch object" + content, "sha256")

    @functools.wraps(to_tensor)
    def signed(obj: Any, device: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tensor, size = to_tensor(obj, device, *args)
        mac = mac_of(tensor.cpu().numpy().tobytes())
        mac_tensor = torch.frombuffer(bytearray(mac), dtype=torch.uint8).to(tensor.device)
        return torch.cat([mac_tensor, tensor]), size + _MAC_BYTES

    @functools.wraps(to_object)
    def verified(tensor: torch.Tensor, size: Any, *args: Any) -> Any:
        # The tensor may be longer than the message: all_gather needs tensors of one length.
        message = tensor.cpu().numpy().tobytes()[: int(size)]
        mac = message[:_MAC_BYTES]
        content = message[_MAC_BYTES:]
        if not hmac.compare_digest(mac, mac_of(content)):
            raise SyncError(
                "an object that torch has received was not sent by this run, and is not read",
                why="its HMAC is not one under this run's key: a process that is no rank may have "
                "connected",
                fix="keep strangers off the network of the ranks; call collectives of objects in "
                "the run on all ranks",
            )
        return to_object(tensor[_MAC_BYTES:], int(size) - _MAC_BYTES, *args)

    with (
        replace_attribute(torch_module, "_object_to_tensor", signed),
        replace_attribute(torch_module, "_tensor_to_object", verified),
    ):
        yield
