"""Time to call a trivial function in two processes: this library and others, in turns.

Each measurement is a new Python process that imports the contender's library and makes two calls, one call with a
200 MB model, one with a tensor of that size, and one call in which rank 1 raises; or one call of a function that makes
an optimizer. Contenders take turns, so that other load affects all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import spawn

BUSY_S = 20.0  # how long rank 0 sleeps after rank 1 has raised, unless it is ended
LIMIT_S = 120.0

# Functions that run in each process, the same for every contender, with a gloo group of two initialized.


def trivial() -> float:
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3.0
    return total.item()


def training() -> None:
    trivial()
    layer = nn.Linear(4, 1)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()  # the first optimizer of a process imports torch._dynamo


def with_model(model: nn.Module) -> float:
    return trivial() + model.weight[0, 0].item() * 0.0


def with_tensor(tensor: torch.Tensor) -> float:
    return trivial() + tensor[0].item() * 0.0


def failing(stamp: str) -> None:
    trivial()
    if dist.get_rank() == 1:
        Path(stamp).write_text(repr(time.time()))
        raise ArithmeticError("rank 1 has had enough")
    time.sleep(BUSY_S)


# Contenders that call a function in two processes from Python.


def parallelize(function: Callable[..., Any], *args: Any) -> None:
    from parallelize import distributed

    distributed(processes=2)(function)(*args)


def torch_spawn(function: Callable[..., Any], *args: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(_in_group, (port, function, args), nprocs=2)


def _in_group(rank: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    function(*args)
    dist.destroy_process_group()


def fabric_spawn(function: Callable[..., Any], *args: Any) -> None:
    from lightning_fabric import Fabric

    Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn").launch(_without_first, function, args)


def ignite(function: Callable[..., Any], *args: Any) -> None:
    from ignite import distributed as idist

    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(_without_first, function, args)


def _without_first(_first: object, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def torchrunx(function: Callable[..., Any], *args: Any) -> None:
    from torchrunx import Launcher

    Launcher(hostnames=["localhost"], workers_per_host=2, backend="gloo").run(function, *args)


def ray_train(function: Callable[..., Any], *args: Any) -> None:
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    if not ray.is_initialized():  # the cluster on this machine stays for the second call
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    TorchTrainer(
        lambda config: function(*config["args"]),
        train_loop_config={"args": args},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()


def monarch(function: Callable[..., Any], *args: Any) -> None:
    from monarch.actor import Actor, endpoint, this_host
    from monarch.spmd import setup_torch_elastic_env

    class Runner(Actor):
        @endpoint
        def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            function(*args)

    if not _kept:  # its processes are kept for the second call
        meshes = this_host().spawn_procs(per_host={"gpus": 2})
        setup_torch_elastic_env(meshes)
        _kept.append(meshes.spawn("runner", Runner))
    _kept[0].run.call(function, args).get()


_kept: list[Any] = []


def accelerate_fork(function: Callable[..., Any], *args: Any) -> None:
    from accelerate import debug_launcher

    debug_launcher(_with_accelerator, (function, args), num_processes=2)


def _with_accelerator(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from accelerate import PartialState

    PartialState(cpu=True)
    function(*args)


# A launch command cannot be passed a function or a model: the function is passed by name.


def torchrun(function: Callable[..., Any], *args: Any) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run([*command, "--worker", function.__name__, *args], capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.decode()[-2000:])


# name -> (how it calls, required package, whether the caller may have initialized CUDA, whether it takes objects)
CONTENDERS: dict[str, tuple[Callable[..., None], str, bool, bool]] = {
    "parallelize": (parallelize, "parallelize", True, True),
    "torch.multiprocessing.spawn": (torch_spawn, "torch", True, True),
    "torchrun": (torchrun, "torch", True, False),
    "Fabric, ddp_spawn": (fabric_spawn, "lightning_fabric", True, True),
    "ignite, Parallel": (ignite, "ignite", True, True),
    "torchrunx": (torchrunx, "torchrunx", True, True),
    "Ray Train": (ray_train, "ray", True, True),
    "Monarch, kept processes": (monarch, "monarch", True, True),
    "Accelerate, debug_launcher": (accelerate_fork, "accelerate", False, True),
}
MEASURES = ("first", "second", "model", "tensor", "failure", "training")


def measure(name: str, measures: tuple[str, ...]) -> None:
    """Make the calls in this process; print each result at once, so that a crash loses only later results."""
    call, package, _, takes_objects = CONTENDERS[name]
    importlib.import_module(package)
    model = nn.Linear(5000, 10_000, bias=False)  # 200 MB
    tensor = torch.ones(5000 * 10_000)  # 200 MB
    for what in measures:
        start = time.perf_counter()
        if what in ("first", "second"):
            call(trivial)
        elif what == "training":
            call(training)
        elif what == "model" and takes_objects:
            call(with_model, model)
        elif what == "tensor" and takes_objects:
            call(with_tensor, tensor)
        elif what == "failure":
            with tempfile.TemporaryDirectory() as folder:
                stamp = Path(folder, "stamp")
                with contextlib.suppress(Exception, SystemExit):
                    call(failing, str(stamp))
                print(json.dumps({what: time.time() - float(stamp.read_text())}), flush=True)
            continue
        else:
            continue
        print(json.dumps({what: time.perf_counter() - start}), flush=True)


def run(name: str, measures: tuple[str, ...]) -> dict[str, float]:
    """Return the seconds by measure from a new process, without those that it could not make."""
    command = [sys.executable, __file__, "--contender", name, "--measures", *measures]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command,
            cwd=folder,  # torchrunx writes its logs to the working directory
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # leftover processes would disturb the next measurement
    seconds: dict[str, float] = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            seconds.update(json.loads(line))
    if process.returncode != 0:
        print(f"{name}: exit code {process.returncode} after {sorted(seconds)}\n{err[-1500:]}", file=sys.stderr)
    return seconds


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Return the table: median and minimum seconds, ratio to parallelize, and the number of rounds if some failed."""
    titles = (
        "first call",
        "second call",
        "with a 200 MB model",
        "with a 200 MB tensor",
        "from failure to exception",
        "first that trains",
    )
    lines = [f"| | after CUDA | {' | '.join(titles)} |", "|---" * (len(titles) + 2) + "|"]
    for name, rounds in results.items():
        cells = []
        for what in MEASURES:
            seconds, ours = ([each[what] for each in some if what in each] for some in (rounds, results["parallelize"]))
            if not seconds or not ours:
                cells.append("-")
                continue
            ratio = statistics.median(seconds) / statistics.median(ours)
            times = "" if len(seconds) == len(rounds) else f", {len(seconds)} of {len(rounds)} rounds"
            digits = 2 if min(seconds) >= 0.01 else 4
            middle, least = statistics.median(seconds), min(seconds)
            cells.append(f"{middle:.{digits}f} / {least:.{digits}f} s ({ratio:.{digits - 1}f}x{times})")
        lines.append(f"| {name} | {'yes' if CONTENDERS[name][2] else 'no'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(rounds: int, measures: tuple[str, ...], contenders: list[str]) -> None:
    """Measure every installed contender in turns and print the table."""
    names = [name for name in contenders if importlib.util.find_spec(CONTENDERS[name][1])]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            found = run(name, tuple(each for each in measures if each != "training"))
            if "training" in measures:  # a first call, too
                found |= run(name, ("training",))
            results[name].append(found)
            print(number, name, results[name][-1], file=sys.stderr)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, {rounds} rounds"
    print(f"Two processes, gloo, CPU; median / least (ratio of medians to parallelize). {versions}.\n")
    print(table(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measures", nargs="*", default=MEASURES, choices=MEASURES)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        dist.init_process_group("gloo")
        globals()[options.worker[0]](*options.worker[1:])
        dist.destroy_process_group()
    elif options.contender:
        measure(options.contender, tuple(options.measures))
    else:
        main(options.rounds, tuple(options.measures), options.contenders)
