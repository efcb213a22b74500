"""Time from a fault in one of two processes to its report in the caller: this library and torchrun, in turns.

The rank writes a time stamp just before the fault. The clock stops when `@distributed` raises, or when the torchrun
command exits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from parallelize import distributed

TIMEOUT_S = 30.0  # of every collective, for both contenders
BUSY_S = 90.0  # how long the other rank sleeps unless it is ended


def stamp(folder: str) -> None:
    Path(folder, f"stamp.{dist.get_rank()}").write_text(repr(time.time()))


# Faults of the rank `victim` while the other rank is busy; the last two involve both ranks.


def by_itself(folder: str, victim: int, end: Callable[[], object]) -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() != victim:
        time.sleep(BUSY_S)
    stamp(folder)
    end()


def fail() -> None:
    raise ArithmeticError("enough")


def exception(folder: str, victim: int) -> None:
    by_itself(folder, victim, fail)


def exit_3(folder: str, victim: int) -> None:
    by_itself(folder, victim, lambda: sys.exit(3))


def os_exit_3(folder: str, victim: int) -> None:
    by_itself(folder, victim, lambda: os._exit(3))


def sigkill(folder: str, victim: int) -> None:
    by_itself(folder, victim, lambda: os.kill(os.getpid(), signal.SIGKILL))


def another_collective(folder: str, victim: int) -> None:
    dist.all_reduce(torch.ones(1))
    stamp(folder)
    if dist.get_rank() == victim:
        dist.barrier()
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))
        dist.barrier()


def returned(folder: str, victim: int) -> None:
    dist.all_reduce(torch.ones(1))
    stamp(folder)
    if dist.get_rank() != victim:
        dist.all_reduce(torch.ones(4))


FAULTS: dict[str, tuple[Callable[[str, int], None], str]] = {
    "raises": (exception, "an exception"),
    "exits": (exit_3, "`sys.exit(3)`"),
    "_exits": (os_exit_3, "`os._exit(3)`"),
    "killed": (sigkill, "SIGKILL"),
    "disagrees": (another_collective, "another collective than the other"),
    "returns": (returned, "returns while the other is in a collective"),
}


def ours(fault: str, folder: str, victim: int) -> str:
    function = distributed(processes=2, timeout=TIMEOUT_S)(FAULTS[fault][0])
    with contextlib.redirect_stderr(None):
        try:
            function(folder, victim)
        except BaseException as exc:  # noqa: BLE001 - also the SystemExit of a worker
            return "\n".join([str(exc), *getattr(exc, "__notes__", [])])
    raise AssertionError("no fault was reported")


def torchrun(fault: str, folder: str, victim: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run(
        [*command, "--worker", fault, folder, str(victim)], capture_output=True, check=False, text=True
    )
    assert done.returncode != 0
    return done.stderr


def worker(fault: str, folder: str, victim: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    FAULTS[fault][0](folder, int(victim))
    dist.destroy_process_group()


CONTENDERS = {"parallelize": ours, "torchrun": torchrun}


def measure(call: Callable[[str, str, int], str], fault: str, victim: int) -> tuple[float, bool]:
    """Return the seconds from the fault to its report, and whether the report names the rank."""
    with tempfile.TemporaryDirectory() as folder:
        report = call(fault, folder, victim)
        reported_at = time.time()
        failed_at = max(float(each.read_text()) for each in Path(folder).glob("stamp.*"))
    return reported_at - failed_at, re.search(rf"rank *:? *{victim}\b", report) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    distributed(processes=2)(dist.barrier)()  # warm-up: the first call starts the fork server
    taken: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    for number in range(arguments.rounds):
        for fault in arguments.faults:
            for name, call in CONTENDERS.items():
                taken.setdefault((fault, name), []).append(measure(call, fault, number % 2))
    print(f"{arguments.rounds} rounds, {platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"Python {platform.python_version()}, torch {torch.__version__}\n")
    print("| a rank | parallelize | says which | torchrun | says which | ratio |\n|---|---|---|---|---|---|")
    for fault in arguments.faults:
        cells, medians = [], []
        for name in CONTENDERS:
            each = [seconds for seconds, _ in taken[fault, name]]
            medians.append(statistics.median(each))
            named = all(is_named for _, is_named in taken[fault, name])
            cells.append(f"{medians[-1]:.2f} / {min(each):.2f} s | {'yes' if named else 'no'}")
        print(f"| {FAULTS[fault][1]} | {' | '.join(cells)} | {medians[1] / medians[0]:.1f}x |", flush=True)


if __name__ == "__main__":
    main()
