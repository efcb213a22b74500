"""torch.save in a run: what it does to the store and to other files, with each store of torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallelize.torch_patches.save import atomic_saves

SAVING_ONCE = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from parallelize.torch_patches.save import atomic_saves

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
store = dist.FileStore(str(folder / "store"), 3)
if rank:
    store.wait(["entered by 0"])
with atomic_saves(store, rank):
    store.set(f"entered by {rank}", "")
    store.wait(["entered by 1"])
    if rank:
        store.wait(["left by 0"])
    torch.save(rank, folder / "a.pt")
store.set(f"left by {rank}", "")
"""

SAVING = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from parallelize.torch_patches.save import atomic_saves

folder, rank, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store = dist.FileStore(str(folder / "store"), 3)
with atomic_saves(store, rank):
    store.add("entered", 1)
    store.wait(["go"])
    for number in range(count):
        torch.save({"rank": rank, "x": torch.full((1000,), number)}, folder / "a.pt")
        assert len(torch.load(folder / "a.pt")["x"].unique()) == 1
"""


def test_ranks_that_meet_in_a_file(tmp_path: Path) -> None:
    """Ranks of different speed leave the last version of rank 0, no other file, and no key in a FileStore."""
    store, count = dist.FileStore(str(tmp_path / "store"), 3), 30
    runs = [subprocess.Popen([sys.executable, "-c", SAVING, str(tmp_path), str(rank), str(count)]) for rank in range(2)]
    while store.add("entered", 0) < 2:
        assert all(run.poll() is None for run in runs)
    before = store.num_keys()
    store.set("go", "")
    assert [run.wait() for run in runs] == [0, 0]
    assert store.num_keys() <= before + 2  # "go", and one that each closed FileStore counts up
    found = torch.load(tmp_path / "a.pt")
    assert found["rank"] == 0
    assert found["x"].unique() == count - 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.pt", "store"]


def test_a_rank_saves_after_rank_0_has_ended_its_run(tmp_path: Path) -> None:
    """The file of rank 0 stays, also if the slow rank makes its first save only then."""
    runs = [subprocess.Popen([sys.executable, "-c", SAVING_ONCE, str(tmp_path), str(rank)]) for rank in range(2)]
    assert [run.wait() for run in runs] == [0, 0]
    assert torch.load(tmp_path / "a.pt") == 0


@pytest.mark.parametrize("kind", ["HashStore", "FileStore", "TCPStore"])
def test_no_store_gets_a_key(tmp_path: Path, kind: str) -> None:
    """Saves of many paths add no key; equal states are equal bytes; a planted link is not followed."""
    stores = {
        "HashStore": dist.HashStore,
        "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "TCPStore": lambda: dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=30)),
    }
    store, folder = stores[kind](), tmp_path / "saved"
    folder.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("important")
    (folder / ".0.pt.0.tmp").symlink_to(victim)
    with atomic_saves(store, 0):
        before = store.num_keys()
        for number in range(20):
            torch.save(torch.ones(3), folder / f"{number}.pt")
        assert store.num_keys() == before
        with pytest.raises(RuntimeError, match="Parent directory"):  # torch's own error
            torch.save(1, folder / "none" / "a.pt")
    assert victim.read_text() == "important"
    assert len({path.read_bytes() for path in folder.glob("*.pt")}) == 1
    assert len(list(folder.iterdir())) == 21


def test_a_file_that_a_stranger_names_is_not_written(tmp_path: Path) -> None:
    """Whoever reaches the store may name a file that this process has open; no version is written to it."""
    important = tmp_path / "important"
    important.write_text("kept")
    with important.open("r+") as file:
        store = dist.HashStore()
        store.add(f"saves/{socket.gethostname()}", 1)
        store.set(f"saves/{socket.gethostname()}/file", f"{os.getpid()} {file.fileno()}")
        with atomic_saves(store, rank=1):
            torch.save(torch.ones(2), tmp_path / "a.pt")
    assert important.read_text() == "kept"
    assert torch.load(tmp_path / "a.pt").tolist() == [1, 1]
