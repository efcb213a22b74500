"""Calls on a Ray cluster of three nodes on this machine; prints what became of each as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster

from parallelize import RayLauncher, distributed, parallel_model, rank

FOLDER = Path(sys.argv[1])
ON_TWO_NODES = {"launcher": RayLauncher(resources={"worker": 1}), "processes": 2, "num_nodes": 2}


@distributed(**ON_TWO_NODES)
def train(model: torch.nn.Module) -> tuple[int, float, str | None]:
    print("trained by", rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with parallel_model(model):
        model(torch.full((1, 1), float(rank()))).sum().backward()
        optimizer.step()
    total = torch.ones(1)
    dist.all_reduce(total)
    return rank(), total.item(), os.environ.get("OMP_NUM_THREADS")


@distributed(**ON_TWO_NODES)
def fail() -> None:
    if rank() == 3:
        raise KeyError("of the user")  # this line is in the notes
    dist.barrier()


@distributed(**ON_TWO_NODES)
def lose_actor(name: str) -> int:
    if rank() == 3 and not (FOLDER / name).exists():
        (FOLDER / name).touch()
        parents = psutil.Process().parents()
        while "fork_server" in " ".join(parents[0].cmdline()):
            parents.pop(0)
        parents[0].kill()  # the actor
    dist.barrier()
    return rank()


@distributed(**ON_TWO_NODES)
def wait(name: str) -> None:
    (FOLDER / f"{name}.{rank()}").write_text(str(os.getpid()))
    time.sleep(600)


def pids_of(name: str, count: int) -> list[int]:
    """Wait until all ranks of `wait` have started, and return their process IDs."""
    files = [FOLDER / f"{name}.{number}" for number in range(count)]
    while not all(each.exists() and each.read_text() for each in files):
        time.sleep(0.1)
    return [int(each.read_text()) for each in files]


def is_running(pid: int) -> bool:
    """Return whether a process runs; pytest adopts orphans and does not wait for them, so they stay as zombies."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def have_ended(pids: list[int]) -> bool:
    """Return whether the processes end within 30 seconds."""
    for _ in range(300):
        if not any(map(is_running, pids)):
            return True
        time.sleep(0.1)
    return False


def value() -> dict[str, Any]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return {"values": train.all_ranks(model), "weight": model.weight.item()}


def exception() -> dict[str, Any]:
    try:
        fail()
    except KeyError as error:
        return {"args": error.args, "notes": "\n".join(error.__notes__)}
    return {}


def submitted() -> dict[str, Any]:
    job = train.options(num_nodes=1).submit(torch.nn.Linear(1, 1))
    result = job.result()
    return {"result": result, "state": job.state}


def killed_actor() -> str:
    try:
        lose_actor("fatal")
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


def restarted() -> int:
    return lose_actor.options(max_restarts=1)("harmless")


def cancelled() -> dict[str, Any]:
    job = wait.options(num_nodes=1).submit("cancelled")
    pids = pids_of("cancelled", 2)
    states = [job.state]
    job.cancel()
    try:
        job.result()
    except RuntimeError as error:
        return {"states": [*states, job.state], "error": str(error), "ended": have_ended(pids)}
    return {}


def pending() -> list[str]:
    job = train.options(launcher=RayLauncher(resources={"worker": 64})).submit(torch.nn.Linear(1, 1))
    states = [job.state]
    job.cancel()
    return [*states, job.state]


def interrupted() -> dict[str, Any]:
    found: list[int] = []

    def interrupt() -> None:
        found.extend(pids_of("interrupted", 2))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        wait.options(num_nodes=1)("interrupted")
    except KeyboardInterrupt:
        thread.join()
        return {"ended": have_ended(found)}
    return {}


def lost_node(cluster: Cluster, node: Any) -> dict[str, Any]:
    job = wait.submit("lost")
    pids = pids_of("lost", 4)
    cluster.remove_node(node, allow_graceful=False)
    try:
        job.result()
    except RuntimeError as error:
        return {"error": f"{type(error).__name__}: {error}", "ended": have_ended(pids)}
    return {}


def main() -> None:
    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
    nodes = [cluster.add_node(num_cpus=2, resources={"worker": 1}, **small) for _ in range(2)]
    ray.init(address=cluster.address, logging_level="warning")
    calls: list[Callable[[], Any]] = [
        *(value, exception, submitted, killed_actor, restarted, cancelled, pending, interrupted),
        lambda: lost_node(cluster, nodes[1]),
    ]
    names = ["value", "exception", "submitted", "killed_actor", "restarted", "cancelled", "pending", "interrupted"]
    results = {}
    for name, call in zip([*names, "lost_node"], calls, strict=True):
        if name in sys.argv[2:] or not sys.argv[2:]:
            results[name] = call()
            (FOLDER / "results").write_text(json.dumps(results))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
