"""The key of a run: a secret of its ranks, with which they sign the objects that they send.

A stranger who connects to the ranks cannot sign. Where the ranks get the key depends on what has
started them:

    anything, with the variable PARALLELIZE_KEY    a digest of the variable, which the user has set
                                                   to the same text on all nodes
    a launcher of this library                     it gives a key, in a folder of this user alone
    torchrun, srun or mpirun, on one host          rank 0 writes a key to a folder of mode 0700, and
                                                   the other ranks read it
    torchrun, srun or mpirun, on several hosts     no key: the other hosts do not have the folder
"""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelize.run.default_group import KeyState, default_group_record

_KEY_BYTES = 32
_FOLDER_PREFIX = "parallelize-key-"
_FILE = "key"
_PATH_BYTES = 1024
"""Size of the message with the path of rank 0's folder, which all ranks must expect."""


def give_run_key(key: bytes) -> None:
    """Set the key of the default group, as a launcher of this library gives it."""
    _decide(key)


def known_run_key() -> bytes | None:
    """Return the key of the default group's ranks; None: they have none, or it is not decided.

    PARALLELIZE_KEY decides it, if it is set. This sends nothing, so that a rank may call it alone.
    """
    record = default_group_record()
    secret_text = os.environ.get("PARALLELIZE_KEY")
    if record.key_state is KeyState.OPEN and secret_text:
        # A digest has the length of a key. The label keeps it apart from other digests of the text,
        # which the user may use for more than this.
        _decide(hmac.digest(secret_text.encode(), b"parallelize: values of ranks", "sha256"))
    return record.key


def run_key() -> bytes | None:
    """Return the key of the default group's ranks, 32 bytes; None: the ranks cannot have one.

    If neither PARALLELIZE_KEY nor a launcher of this library has given a key, the first call for a
    default group is a collective, which all ranks must make.
    """
    known_run_key()
    if default_group_record().key_state is KeyState.OPEN:
        _decide(_key_of_host())
    return default_group_record().key


def _decide(key: bytes | None) -> None:
    """Set the key for as long as the default group exists; None: its ranks cannot have one."""
    record = default_group_record()
    record.key = key
    record.key_state = KeyState.DECIDED


def message_device(group: Any = None) -> torch.device:
    """Return a device whose tensors a group can send: the CPU if possible, else the current one.

    Args:
        group: a process group; None: the default group.
    """
    sending_group: Any = group or dist.group.WORLD
    devices = sending_group._device_types
    if torch.device("cpu") in devices or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(devices[0].type, torch.accelerator.current_device_index())


def _key_of_host() -> bytes | None:
    """Return a new key that all ranks have read from rank 0's folder; a collective.

    None: at least one rank could not read the key, as on another host. Then no rank uses it.
    """
    folder = None
    if dist.get_rank() == 0:
        folder = _folder_with_key()
    try:
        key = _read_key(_path_of_rank_0(folder))
        device = message_device()
        can_read = torch.tensor(int(key is not None), device=device)
        dist.all_reduce(can_read, dist.ReduceOp.MIN)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if can_read.item():
        return key
    return None


def _path_of_rank_0(folder: str | None) -> str:
    """Return the path of rank 0's folder, "" if it has none; a collective.

    Args:
        folder: the path on rank 0; other ranks may pass None.
    """
    # A longer path is cut: no rank finds a folder there, rank 0 included, and there is no key.
    path = os.fsencode(folder or "")[:_PATH_BYTES]
    padded = bytearray(path.ljust(_PATH_BYTES, b"\0"))
    message = torch.frombuffer(padded, dtype=torch.uint8).to(message_device())
    dist.broadcast(message, src=0)
    received = message.cpu().numpy().tobytes()
    return os.fsdecode(received.rstrip(b"\0"))


def _folder_with_key() -> str | None:
    """Return a new folder with a new key; None: the disk is full, or cannot be written to."""
    try:
        # mkdtemp gives the folder the mode 0700.
        folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
        descriptor = os.open(Path(folder, _FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
    except OSError:
        return None
    return folder


def _read_key(folder: str) -> bytes | None:
    """Return the key in a folder; None: there is no key that is this user's secret.

    The path has come over the network, perhaps from a stranger, who may name any folder. What is
    read there is a secret nevertheless: the folder has the prefix, and it and the file are of this
    user alone.
    """
    if not Path(folder).name.startswith(_FOLDER_PREFIX):
        return None
    try:
        folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return _read_private_file(folder_descriptor)
    except OSError:
        return None
    finally:
        os.close(folder_descriptor)


def _read_private_file(folder_descriptor: int) -> bytes | None:
    """Return the key in an open folder; None: another user may have read or written the file."""
    if not _is_private(folder_descriptor, stat.S_IFDIR | 0o700):
        return None
    file_descriptor = os.open(_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder_descriptor)
    with os.fdopen(file_descriptor, "rb") as file:
        if not _is_private(file.fileno(), stat.S_IFREG | 0o600):
            return None
        # One byte more than a key has shows that a file is too long.
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        return None
    return key


def _is_private(descriptor: int, mode: int) -> bool:
    """Return whether an open file is of this user and has exactly this type and these rights."""
    status = os.fstat(descriptor)
    return status.st_uid == os.getuid() and status.st_mode == mode
