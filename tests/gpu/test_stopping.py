"""Ctrl-C while ranks wait for their devices, which is where they are most of the time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu2

WAITING = """
import ctypes, os, pathlib, signal, sys, threading, time
import torch
import torch.distributed as dist
from parallelize import device, distributed, rank

FOLDER, PEER = pathlib.Path(sys.argv[1]), sys.argv[2]

def wait_for_the_device():
    # In compiled code, which no signal ends. Another thread ends it, long after one has come.
    mutex, pthread = ctypes.create_string_buffer(256), ctypes.CDLL(None)
    pthread.pthread_mutex_lock(mutex)

    def end():
        while not FOLDER.joinpath("interrupted").exists():
            time.sleep(0.05)
        time.sleep(1.5)
        pthread.pthread_mutex_unlock(mutex)

    threading.Thread(target=end).start()
    FOLDER.joinpath(f"ready.{rank()}").touch()
    pthread.pthread_mutex_lock(mutex)

def wait_for_the_peer():
    FOLDER.joinpath(f"ready.{rank()}").touch()
    total = torch.ones(1, device=device())
    dist.all_reduce(total)
    total.item()

@distributed(gpus=2)
def train():
    dist.all_reduce(torch.ones(1, device=device()))
    try:
        if PEER == "waits":
            wait_for_the_device()
        elif rank() == 1:
            wait_for_the_peer()
        else:
            FOLDER.joinpath(f"ready.{rank()}").touch()
            time.sleep(300)
    except KeyboardInterrupt:
        total = torch.ones(1, device=device())
        if PEER == "waits":
            dist.all_reduce(total)  # as to save the shards of all ranks
        FOLDER.joinpath(f"saved.{rank()}").write_text(str(total.item()))

def interrupt():
    while len(list(FOLDER.glob("ready.*"))) < 2:
        time.sleep(0.05)
    os.killpg(0, signal.SIGINT)
    FOLDER.joinpath("interrupted").touch()

threading.Thread(target=interrupt).start()
try:
    train()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("peer", "saved"), [("waits", "2.0"), ("has left", "1.0")])
def test_ctrl_c_leaves_collectives_to_finally_blocks(peer: str, saved: str, tmp_path: Path) -> None:
    """Ranks that wait for their device can still use them; one that waits for a peer which has left is interrupted."""
    done = subprocess.run(
        [sys.executable, "-c", WAITING, str(tmp_path), peer],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        start_new_session=True,
        timeout=120,
    )
    assert done.stdout == "interrupted\n", done.stderr
    assert {each.name: each.read_text() for each in tmp_path.glob("saved.*")} == {"saved.0": saved, "saved.1": saved}
