"""The key of a run: a secret of its ranks, by which a message shows that another rank has sent it.

Where the ranks get the key depends on what has started them:

    a launcher of this library   gives a key, in a folder that only its user can access
    PARALLELIZE_KEY              is the users' own, the same on all nodes; it comes first
    torchrun, srun, mpirun       rank 0 writes a key to a folder of mode 0700, and the ranks of its
                                 host read it
    the same on several hosts    no key: the other hosts do not have the folder
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
_FOLDER = "parallelize-key-"
_FILE = "key"
_PATH_BYTES = 1024
"""Size of the message with the path of rank 0's folder, which all ranks must expect."""


def give_run_key(key: bytes) -> None:
    """Set the key of the default group, as a launcher of this library gives it."""
    _decide(key)


def known_run_key() -> bytes | None:
    """Return the key of the default group's ranks; None: they have none, or have not agreed on one.

    It sends nothing, so that a rank may call it alone.
    """
    record = default_group_record()
    secret_text = os.environ.get("PARALLELIZE_KEY")
    if record.key_state is KeyState.OPEN and secret_text:
        # A digest has the length of a key, and another one than what else the users sign with their
        # text.
        _decide(hmac.digest(secret_text.encode(), b"parallelize: values of ranks", "sha256"))
    return record.key


def run_key() -> bytes | None:
    """Return the key of the default group's ranks, 32 bytes; None: they have none.

    The first call for a group whose ranks others have started is a collective.
    """
    known_run_key()
    if default_group_record().key_state is KeyState.OPEN:
        _decide(_key_of_host())
    return default_group_record().key


def _decide(key: bytes | None) -> None:
    record = default_group_record()
    record.key = key
    record.key_state = KeyState.DECIDED


def message_device(group: Any = None) -> torch.device:
    """Return the device of tensors that a group can send; the CPU if it can.

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

    None: one of the ranks could not read it, as on another host.
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
        folder: the path; of another rank, it is not looked at.
    """
    path = os.fsencode(folder or "")[:_PATH_BYTES]
    padded = bytearray(path.ljust(_PATH_BYTES, b"\0"))
    message = torch.frombuffer(padded, dtype=torch.uint8).to(message_device())
    dist.broadcast(message, src=0)
    received = message.cpu().numpy().tobytes()
    return os.fsdecode(received.rstrip(b"\0"))


def _folder_with_key() -> str | None:
    """Return a new folder with a new key; None: there is no place for one."""
    try:
        folder = tempfile.mkdtemp(prefix=_FOLDER)  # It has the mode 0700.
        number = os.open(Path(folder, _FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
    except OSError:
        return None
    return folder


def _read_key(folder: str) -> bytes | None:
    """Return the key in a folder that may be a stranger's; None: it has none.

    The path has come over the network. What this user alone can read below the prefix of such
    folders is a secret, whoever has named the path.
    """
    if not Path(folder).name.startswith(_FOLDER):
        return None
    try:
        folder_number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return _read_private_file(folder_number)
    except OSError:
        return None
    finally:
        os.close(folder_number)


def _read_private_file(folder_number: int) -> bytes | None:
    """Return the key in an open folder; None: others than this user may have read or written it."""
    if not _is_private(folder_number, stat.S_IFDIR | 0o700):
        return None
    file_number = os.open(_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder_number)
    with os.fdopen(file_number, "rb") as file:
        if not _is_private(file.fileno(), stat.S_IFREG | 0o600):
            return None
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        return None
    return key


def _is_private(number: int, mode: int) -> bool:
    status = os.fstat(number)
    return status.st_uid == os.getuid() and status.st_mode == mode
