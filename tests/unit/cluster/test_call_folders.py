"""Folders of calls are private, and what others have put into the temporary folder is not opened."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from parallelize.cluster.call_folders import (
    CALL_FOLDER_PREFIX,
    call_folder,
    own_call_folders,
    remove_call_folder,
)

NOBODY = 65534

opened: list[str] = []
"""Paths that were opened while a test looked."""
looking: list[bool] = []


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if looking and event in ("open", "os.listdir", "os.scandir"):
        opened.append(os.fspath(arguments[0]) if isinstance(arguments[0], (str, os.PathLike)) else "")


sys.addaudithook(note)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def abandoned(*names: str) -> list[Path]:
    """Make folders as killed programs have left them, long ago."""
    with call_folder() as folder:
        pass
    paths = [folder.with_name(folder.name[: -len(name)] + name) for name in names]
    for path in paths:
        path.mkdir()
        (path / "task").write_bytes(b"weights")
        os.utime(path, (0, 0))
    return paths


def test_what_has_such_a_name_and_is_no_own_folder_is_not_opened(temporary: Path) -> None:
    """A FIFO, links, a device and another user's folder stay, and so does what the links lead to."""
    target = temporary / "target"
    target.mkdir()
    (target / "file").touch()
    os.utime(target, (0, 0))
    planted = abandoned("fifo", "link", "file", "user", "null")
    for path in planted[:3]:
        (path / "task").unlink()
        path.rmdir()
    os.mkfifo(planted[0])
    planted[1].symlink_to(target)
    planted[2].touch()
    if os.geteuid() == 0:
        os.chown(planted[3], NOBODY, NOBODY)
    for path in planted[4 - (os.geteuid() != 0) :]:
        (path / "task").unlink()
        path.rmdir()
    if os.geteuid() == 0:
        os.mknod(planted[4], stat.S_IFCHR | 0o666, os.makedev(1, 3))
    planted = [path for path in planted if os.path.lexists(path)]
    looking.append(True)
    try:
        assert own_call_folders() == []
        with call_folder() as folder:
            assert own_call_folders() == [folder]
        for path in planted:
            remove_call_folder(path)
    finally:
        looking.clear()
    assert str(folder) in opened
    assert not {str(path) for path in planted} & set(opened)
    assert all(os.path.lexists(path) for path in planted)
    assert (target / "file").exists()


@pytest.mark.parametrize("umask", [0, 0o077, 0o277, 0o777])
def test_only_this_user_may_enter_it(umask: int) -> None:
    """The folder has mode 0700, whatever the umask is; with some, its own user could not use it."""
    before = os.umask(umask)
    try:
        with call_folder() as folder:
            mode = stat.S_IMODE(folder.stat().st_mode)
    finally:
        os.umask(before)
    assert mode == 0o700


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("gpu1", "gpu2"),
        ("gpu", "gpu-1"),
        ("gpu-1", "gpu"),
        ("a/b", "a_b"),
        ("of-a-name-that-is-very-long-1", "of-a-name-that-is-very-long-2"),
        ("", "gpu"),
    ],
)
def test_folders_of_another_host_stay(here: str, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts share a disk: a lock of another one may not be seen here."""
    monkeypatch.setattr(socket, "gethostname", lambda: there)
    (others,) = abandoned("killed")
    monkeypatch.setattr(socket, "gethostname", lambda: here)
    (own,) = abandoned("killed")
    with call_folder() as folder:
        assert (folder.parent, folder.name[: len(CALL_FOLDER_PREFIX)]) == (own.parent, CALL_FOLDER_PREFIX)
    assert (others / "task").exists()
    assert not own.exists()


def test_the_host_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks into the temporary folder sees whose it is; a long name of a host leaves room for sockets."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu1.lab")
    with call_folder() as folder:
        assert "gpu1.lab" in folder.name
    monkeypatch.setattr(socket, "gethostname", lambda: "\udcff" * 64)
    with call_folder() as folder:
        assert len(os.fsencode(folder.name)) < 50


def test_a_folder_that_is_used_or_new_stays() -> None:
    """A lock says that a call uses it; a new one may not be locked yet."""
    killed, used, new = abandoned("killed", "used", "new")
    os.utime(new)
    descriptor = os.open(used, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with call_folder():
            assert [path.exists() for path in (killed, used, new)] == [False, True, True]
            assert {used, new} < set(own_call_folders())
    finally:
        os.close(descriptor)


def test_a_temporary_folder_that_may_not_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its users may make files there; those that were left are not found."""

    def refuse(_path: object) -> list[str]:
        raise PermissionError

    monkeypatch.setattr(os, "listdir", refuse)
    with call_folder() as folder:
        assert own_call_folders() == []
        assert folder.is_dir()
