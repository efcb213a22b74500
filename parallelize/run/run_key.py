"""The key of a run: a secret of its ranks, by which a message shows that another rank has sent it.

a launcher of this library   gives a key, in a folder that only its user can access
PARALLELIZE_KEY              is the users' own, the same on all nodes; it comes first
torchrun, srun, mpirun       rank 0 writes a key to a folder of mode 0700, which ranks on the same host read
the same on several hosts    no key: the other hosts do not have the folder
"""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["give_run_key", "known_run_key", "message_device", "run_key"]

_KEY_BYTES = 32
_FOLDER = "parallelize-key-"
_FILE = "key"
_PATH_BYTES = 1024

# The key of each default group; None: its ranks have none.
_keys: weakref.WeakKeyDictionary[Any, bytes | None] = weakref.WeakKeyDictionary()


def give_run_key(key: bytes) -> None:
    """Set the key of the default group, as a launcher of this library gives it."""
    _keys[dist.group.WORLD] = key


def known_run_key() -> bytes | None:
    """Return the key of the default group's ranks; None: there is none, or the ranks have not agreed on one."""
    default: Any = dist.group.WORLD
    text = os.environ.get("PARALLELIZE_KEY")
    if default not in _keys and text:
        _keys[default] = hmac.digest(text.encode(), b"parallelize: values of ranks", "sha256")
    return _keys.get(default)


def run_key() -> bytes | None:
    """Return the key of the default group's ranks, 32 bytes; None: they have none.

    The first call for a group whose ranks others have started is a collective.
    """
    default: Any = dist.group.WORLD
    if known_run_key() is None and default not in _keys:
        _keys[default] = _key_of_host()
    return _keys[default]


def message_device(group: Any = None) -> torch.device:
    """Return the device of tensors that a group can send; the CPU if it can.

    Args:
        group: a process group; None: the default group.
    """
    sends: Any = group or dist.group.WORLD
    devices = sends._device_types
    if torch.device("cpu") in devices or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(devices[0].type, torch.accelerator.current_device_index())


def _key_of_host() -> bytes | None:
    """Return a new key that all ranks have read from rank 0's folder; None: one of them could not. A collective."""
    device = message_device()
    folder = _folder_with_key() if dist.get_rank() == 0 else None
    try:
        path = os.fsencode(folder or "")[:_PATH_BYTES]
        padded = torch.frombuffer(bytearray(path.ljust(_PATH_BYTES, b"\0")), dtype=torch.uint8).to(device)
        dist.broadcast(padded, src=0)
        key = _read_key(os.fsdecode(padded.cpu().numpy().tobytes().rstrip(b"\0")))
        can_read = torch.tensor(int(key is not None), device=device)
        dist.all_reduce(can_read, dist.ReduceOp.MIN)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return key if can_read.item() else None


def _folder_with_key() -> str | None:
    try:
        folder = tempfile.mkdtemp(prefix=_FOLDER)  # of mode 0700
        number = os.open(Path(folder, _FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
    except OSError:
        return None
    return folder


def _read_key(folder: str) -> bytes | None:
    """Return the key in a folder that may be a stranger's: its path has come over the network.

    What this user alone can read below the prefix of such folders is a secret, whoever has named the path.
    """
    if not Path(folder).name.startswith(_FOLDER):
        return None
    try:
        parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if not _is_private(parent, stat.S_IFDIR | 0o700):
            return None
        number = os.open(_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=parent)
        with os.fdopen(number, "rb") as file:
            if not _is_private(file.fileno(), stat.S_IFREG | 0o600):
                return None
            key = file.read(_KEY_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(parent)
    return key if len(key) == _KEY_BYTES else None


def _is_private(number: int, mode: int) -> bool:
    status = os.fstat(number)
    return status.st_uid == os.getuid() and status.st_mode == mode
