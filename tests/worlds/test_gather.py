"""Objects that ranks send each other: a stranger who speaks for a rank is not heard, and none of his code runs."""

from __future__ import annotations

import hmac
import os
import pickle
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TORCHRUN, Checks

from parallelize import rank
from parallelize.agreement.gather import broadcast_object, gather_objects
from parallelize.errors import SyncError
from parallelize.run import run_key as run_key_module
from parallelize.run.run_key import run_key

pytestmark = pytest.mark.slow

check = Checks(processes=2)


class Thing:
    """A class of a user, which only a pickle can carry."""

    def __init__(self, number: int) -> None:
        self.number = number


loaded: list[str] = []


def note(text: str) -> None:
    loaded.append(text)


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return note, ("code of the stranger",)


EVIL = b"p" + pickle.dumps(Evil())


def all_gathered(content: bytes, size: int) -> list[bytes]:
    sent = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
    received = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(received, sent)
    return [tensor.numpy().tobytes() for tensor in received]


def mac_of(headers: list[bytes], sender: int, content: bytes) -> bytes:
    key = run_key()
    assert key is not None
    return hmac.digest(key, b"parallelize exchange" + b"".join(headers) + struct.pack("<q", sender) + content, "sha256")


def answer(message_of: Callable[[list[bytes]], bytes], size: int) -> None:
    """Take part in a gather as rank 1, without the code of this library."""
    headers = all_gathered(struct.pack("<q16s", size, os.urandom(16)), 24)
    most = max(struct.unpack("<q16s", header)[0] for header in headers)
    all_gathered(message_of(headers), most)


def refused(message_of: Callable[[list[bytes]], bytes], size: int = 32 + len(EVIL)) -> None:
    """Rank 1 answers with a message; rank 0 refuses it, and loads nothing."""
    loaded.clear()
    if rank() == 1:
        answer(message_of, size)
        return
    with pytest.raises(SyncError, match="the message of rank 1 was not sent by this run, and is not read"):
        gather_objects(Thing(0))
    assert loaded == []


@check
def objects_and_plain_values() -> None:
    found = gather_objects(Thing(rank()))
    assert [thing.number for thing in found] == [0, 1]
    assert gather_objects([rank(), "text", None]) == [[0, "text", None], [1, "text", None]]
    assert broadcast_object(Thing(5) if rank() == 0 else None).number == 5
    assert broadcast_object({"rank": rank()}) == {"rank": 0}


@check
def a_message_with_the_key_is_loaded() -> None:
    """The messages below are refused for what they lack, and not for their form."""
    if rank() == 1:
        content = b"p" + pickle.dumps(Thing(1))
        answer(lambda headers: mac_of(headers, 1, content) + content, 32 + len(content))
    else:
        assert gather_objects(Thing(0))[1].number == 1


@check
def a_forged_message() -> None:
    refused(lambda _: bytes(32) + EVIL)
    refused(lambda headers: hmac.digest(b"another key", b"".join(headers) + EVIL, "sha256") + EVIL)


@check
def a_replayed_message() -> None:
    kept: list[bytes] = []

    def authentic(headers: list[bytes]) -> bytes:
        kept.append(mac_of(headers, 1, b"vx") + b"vx")
        return kept[0]

    refused(authentic, 34)  # it is authentic, and no plain value
    refused(lambda _: kept[0], 34)
    text = b'v\x0b\0\0\0\0\0\0\0["old", []]'
    if rank() == 1:
        answer(lambda headers: kept.insert(0, mac_of(headers, 1, text) + text) or kept[0], 32 + len(text))
    else:
        assert gather_objects("new") == ["new", "old"]
    refused(lambda _: kept[0], 32 + len(text))


@check
def a_message_of_another_rank() -> None:
    refused(lambda headers: mac_of(headers, 0, EVIL) + EVIL)


@check
def a_truncated_message() -> None:
    refused(lambda headers: (mac_of(headers, 1, EVIL) + EVIL)[:-1])


def refused_size(size: int) -> None:
    if rank() == 1:
        all_gathered(struct.pack("<q16s", size, os.urandom(16)), 24)
    else:
        with pytest.raises(SyncError, match=f"rank 1 was not sent by this run(.|\n)*it would have {size} bytes"):
            gather_objects("text")


@check
def a_huge_message() -> None:
    for size in (2**60, -1, 0, 32):
        refused_size(size)


@check
def a_value_that_cannot_be_pickled() -> None:
    """Its rank raises what the pickler raises, and the others say which rank it is."""
    value = Thing(0) if rank() == 0 else (lambda: 0)
    with pytest.raises(Exception, match="rank 1 cannot send its value" if rank() == 0 else "lambda"):
        gather_objects(value)
    assert gather_objects(rank()) == [0, 1]


@check
def torchs_own_collectives_of_objects() -> None:
    """Those of the user, and of torch.distributed.checkpoint, refuse a pickle without the key."""
    found: list[Any] = [None, None]
    dist.all_gather_object(found, Thing(rank()))
    assert [thing.number for thing in found] == [0, 1]
    things = [Thing(7) if rank() == 0 else None]
    dist.broadcast_object_list(things, src=0)
    assert things[0] is not None
    assert things[0].number == 7
    loaded.clear()
    if rank() == 0:
        with pytest.raises(SyncError, match="an object that torch has received was not sent by this run"):
            dist.all_gather_object(found, "text")
        assert loaded == []
        return
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
    content = pickle.dumps(Evil())
    dist.all_gather(sizes, torch.tensor([len(content)]))
    all_gathered(content, int(max(sizes)))


@pytest.mark.parametrize("name", check)
def test_ranks_hear_each_other_and_nobody_else(name: str) -> None:
    """Each check of the functions above."""
    check.assert_holds(name)


WORLD = """
import os, sys, tempfile
from parallelize import distributed, rank
from parallelize.agreement.gather import gather_objects

class Thing:
    pass

@distributed()
def train():
    assert gather_objects({"rank": rank()}) == [{"rank": 0}, {"rank": 1}]
    return Thing()

if sys.argv[1] == "no folder" and os.environ["RANK"] == "0":
    tempfile.tempdir = "/missing"  # what rank 0 writes, another host cannot read either
try:
    line = type(train()).__name__
except ValueError as error:
    line = f"refused: {str(error).splitlines()[0]} {'PARALLELIZE_KEY' in str(error)}"
sys.stdout.write(line + "\\n")  # at once: both ranks write to one pipe
"""


def printed(tmp_path: Path, case: str, **variables: str) -> list[str]:
    (tmp_path / "train.py").write_text(WORLD)
    command = [sys.executable, *TORCHRUN, "train.py", case]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), **variables}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_ranks_of_torchrun_on_one_host_agree_on_a_key(tmp_path: Path) -> None:
    """By a private folder, which is gone afterwards."""
    assert printed(tmp_path, "one host") == ["Thing", "Thing"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("parallelize-key")] == []


def test_without_a_common_secret_only_plain_values_travel(tmp_path: Path) -> None:
    """As between hosts; the error says how to have one."""
    refusal = "refused: rank 0 would send a pickle: Thing: Thing True"
    assert printed(tmp_path, "no folder") == [refusal, refusal]
    assert printed(tmp_path, "no folder", PARALLELIZE_KEY="secret") == ["Thing", "Thing"]


def test_a_key_that_others_could_have_read_or_written_is_not_taken(tmp_path: Path) -> None:
    """The path of the folder comes over the network, so it may lead anywhere."""
    folder = Path(tempfile.mkdtemp(prefix="parallelize-key-", dir=tmp_path))
    key = folder / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    read = run_key_module._read_key
    assert read(str(folder)) == bytes(range(32))
    (tmp_path / "parallelize-key-link").symlink_to(folder)
    assert read(str(tmp_path / "parallelize-key-link")) is None
    for path in (folder, key):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(before | stat.S_IROTH)
        assert read(str(folder)) is None
        path.chmod(before)
    key.write_bytes(bytes(31))
    assert read(str(folder)) is None
    other = folder.rename(tmp_path / "other")
    assert read(str(other)) is None
    assert read("") is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_taken(tmp_path: Path) -> None:
    """Its owner knows the key."""
    folder = Path(tempfile.mkdtemp(prefix="parallelize-key-", dir=tmp_path))
    key = folder / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    for path in (folder, key):
        os.chown(path, 65534, 65534)
        assert run_key_module._read_key(str(folder)) is None
        os.chown(path, 0, 0)
    assert run_key_module._read_key(str(folder)) == bytes(32)
