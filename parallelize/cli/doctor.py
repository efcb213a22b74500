"""`parallelize doctor`: whether calls will work on this machine, and how to fix what prevents them.

diagnose
├── versions       what a bug report needs
├── gpus           GPUs, driver, peer access
├── addresses      the names and addresses by which processes connect
├── memory         space in /dev/shm and in the temporary folder
├── variables      what a launcher, Slurm and PARALLELIZE_... say
└── all_reduce     two ranks exchange a message, as a call would
      └── _exchange      a process that is killed if it hangs
            └── exchange       starts the two ranks
                  └── times_of_all_reduce      runs on each rank
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallelize.cluster import network
from parallelize.cluster.environment import detect
from parallelize.cluster.launcher_variables import without_launcher
from parallelize.cluster.slurm_allocation import (
    Allocation,
    current_allocation,
    without_hidden_gpus,
)
from parallelize.config.config import ENV_PREFIX, Config
from parallelize.decorator import distributed
from parallelize.errors import ConfigError, LaunchError
from parallelize.run.context import device
from parallelize.version import __version__

_GIB = 1 << 30
_MIB = 1 << 20

_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # only its free space is read
_LOW_SHARED_MEMORY_BYTES = 512 * _MIB
_LOW_TEMPORARY_BYTES = 1 * _GIB

# Documentation addresses (RFC 5737, RFC 3849): no host has them, so that their route is the
# default route.
_ADDRESS_OUTSIDE = {"IPv4": "192.0.2.254", "IPv6": "2001:db8::1"}

_TIMEOUT_S = 90.0
_MESSAGE_BYTES = 16 * _MIB
_REPETITIONS = 5

_Environ = Mapping[str, str]


class Extra(NamedTuple):
    """Optional packages that pip installs by `parallelize[name]`.

    Args:
        name: of the extra.
        library: the package.
        purpose: what needs it.
    """

    name: str
    library: str
    purpose: str


EXTRAS = (
    Extra("ray", "ray", "launcher='ray' runs calls on Ray"),
    Extra("safetensors", "safetensors", "save and load use it for files that end in .safetensors"),
    Extra("examples", "scikit-learn", "some of the examples take their data from it"),
)


@dataclass(frozen=True)
class Finding:
    """A fact, or a problem.

    Args:
        status: "ok": a fact; "warning": calls work, but otherwise than expected; "fault": calls
            fail.
        what: the fact, or what is wrong.
        why: why that is a problem.
        fix: what to do.
        check: name of the check.
    """

    status: str
    what: str
    why: str = ""
    fix: str = ""
    check: str = ""

    def __str__(self) -> str:
        lines = [f"{self.status:<9}{self.check:<10} {self.what}"]
        if self.why:
            lines.append(f"{'':<9}why: {self.why}")
        if self.fix:
            lines.append(f"{'':<9}fix: {self.fix}")
        return "\n".join(lines)


def diagnose(environ: _Environ, *, as_json: bool) -> int:
    """Run every check and print the findings.

    Args:
        environ: environment variables of this process.
        as_json: print one list at the end, not a line for each finding.

    Returns:
        The exit code: 1 if there is a fault, else 0.
    """
    findings: list[Finding] = []
    for check in (versions, libraries, gpus, addresses, memory, variables, all_reduce):
        for finding in _findings_of(check, environ):
            findings.append(finding)
            if not as_json:
                _write(finding)
    if as_json:
        _write(json.dumps(list(map(dataclasses.asdict, findings)), indent=2))
    has_fault = any(finding.status == "fault" for finding in findings)
    return int(has_fault)


def _findings_of(
    check: Callable[[_Environ], Iterator[Finding]], environ: _Environ
) -> Iterator[Finding]:
    """Yield the findings of a check with its name.

    An error that the check does not foresee is a finding, too: the checks after it still run.
    """
    try:
        for finding in check(environ):
            yield dataclasses.replace(finding, check=check.__name__)
    except Exception as error:  # noqa: BLE001  # see above
        yield Finding(
            "fault",
            f"this check ended with {type(error).__name__}: {error}",
            "it does not support something here",
            "report it",
            check.__name__,
        )


def _write(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def versions(_environ: _Environ) -> Iterator[Finding]:
    """Yield the versions that a bug report needs."""
    build = "the CPU"
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    if dist.is_nccl_available():
        nccl_version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch's
        build += f", NCCL {nccl_version}"
    system = f"Python {platform.python_version()}, {platform.platform()}"
    yield Finding(
        "ok", f"parallelize {__version__}, torch {torch.__version__} for {build}, {system}"
    )


def libraries(_environ: _Environ) -> Iterator[Finding]:
    """Yield the versions of optional packages, and how to install those that are missing."""
    for extra in EXTRAS:
        try:
            version = importlib.metadata.version(extra.library)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                "ok",
                f"{extra.library} is not installed",
                extra.purpose,
                f"pip install 'parallelize[{extra.name}]'",
            )
        else:
            yield Finding("ok", f"{extra.library} {version}")


def gpus(environ: _Environ) -> Iterator[Finding]:
    """Yield the GPUs, what hides them from torch, and GPUs without peer access."""
    job = _job(environ)
    properties: list[Any] = []
    error = ""
    try:
        properties = list(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))
    except RuntimeError as raised:
        # The driver does not work: torch can use none of the GPUs.
        error = str(raised).partition("\n")[0]
    expected = _gpus_of_driver()
    if job is not None and job.has_one_gpu_of_several:
        expected = min(expected, 1)
    elif job is not None and job.gpus_on_node is not None:
        expected = min(expected, job.gpus_on_node)
    if error or expected > len(properties):
        mask = environ.get("CUDA_VISIBLE_DEVICES")
        yield Finding(
            "fault" if error else "warning",
            f"{expected} GPU(s), of which torch can use {len(properties)}: {_driver()}, "
            f"CUDA_VISIBLE_DEVICES={mask}",
            error or "the variable hides some, or this torch is built for the CPU or another CUDA",
            "unset CUDA_VISIBLE_DEVICES; install a torch for this driver: "
            "https://pytorch.org/get-started/locally",
        )
    for index, gpu in enumerate(properties):
        free, total = torch.cuda.mem_get_info(index)
        space = f"{free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
        capability = f"capability {gpu.major}.{gpu.minor}"
        yield Finding("ok", f"GPU {index}: {gpu.name}, {capability}, {space}")
    if not properties:
        yield Finding("ok", "none: functions run on the CPU")
    yield from _missing_peers(len(properties))
    if job is not None and job.has_one_gpu_of_several:
        yield from _gpus_of_other_tasks(job, environ)


def _job(environ: _Environ) -> Allocation | None:
    """Return the Slurm job of this process; None without one, or with variables that are wrong."""
    try:
        return current_allocation(environ)
    except ConfigError:
        # The check of the variables reports it.
        return None


def _missing_peers(count: int) -> Iterator[Finding]:
    """Yield a warning if some of the GPUs that this process sees cannot read from each other.

    Args:
        count: number of GPUs.
    """
    pairs_without_access = []
    for first, second in itertools.combinations(range(count), 2):
        if not torch.cuda.can_device_access_peer(first, second):
            pairs_without_access.append(f"{first} and {second}")
    if pairs_without_access:
        yield Finding(
            "warning",
            f"no peer access between GPUs {', '.join(pairs_without_access)}",
            "they communicate through host memory",
            "nvidia-smi topo -m shows their connections; disable PCIe ACS, "
            "or in a virtual machine enable ATS",
        )


def _gpus_of_other_tasks(job: Allocation, environ: _Environ) -> Iterator[Finding]:
    """Yield whether Slurm keeps a task, which is bound to one GPU, from those of other tasks."""
    gpu_of_task = environ["SLURM_STEP_GPUS"]
    text = f"GPU {gpu_of_task} of the job's {job.gpus_on_node} on this node is this task's"
    if job.hides_gpus:
        yield Finding(
            "warning",
            f"{text}, as its GPU 0: Slurm hides those of the other tasks",
            "there is no peer access between the GPUs of several tasks: NCCL cannot use NVLink, "
            "and copies through host memory",
            without_hidden_gpus(job.gpus_on_node or 1),
        )
    elif gpu_of_task != "0" and environ.get("CUDA_VISIBLE_DEVICES") == gpu_of_task:
        yield Finding("ok", f"{text}; it can open those of the other tasks")
    else:
        yield Finding(
            "ok",
            text,
            "Slurm may hide those of the other tasks, which the variables of this one do not show",
            "srun parallelize doctor says it in the second task",
        )


def _gpus_of_driver() -> int:
    """Return the number of GPUs in this machine, also of those that torch does not see."""
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
    return len(list(filter(str.isdigit, numbers)))


def _driver() -> str:
    """Return the version of NVIDIA's driver, in its own words."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return "no NVIDIA driver"
    return path.read_text().partition("\n")[0]


def addresses(environ: _Environ) -> Iterator[Finding]:
    """Yield this host's addresses, and names with which processes could not connect."""
    routes = []
    for family, outside in _ADDRESS_OUTSIDE.items():
        # An OSError means that there is no route.
        with contextlib.suppress(OSError):
            routes.append(f"{family} {network.source_address_for(outside)}")
    yield Finding("ok", f"{socket.gethostname()}: {', '.join(routes) or 'no route to other nodes'}")
    loopback = []
    for socket_family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        # An OSError means that nobody can listen there.
        with contextlib.suppress(OSError), socket.create_server((address, 0), family=socket_family):
            loopback.append(address)
    if "127.0.0.1" not in loopback:
        yield Finding(
            "warning" if loopback else "fault",
            f"cannot listen on 127.0.0.1, only on {loopback}",
            "the processes of one machine connect there",
            "ip link set lo up; in a host with IPv6 only, add 127.0.0.1 to lo",
        )
    master = environ.get("MASTER_ADDR")
    if not master:
        return
    try:
        network.resolvable_address(master)
    except LaunchError as error:
        yield Finding(
            "fault",
            f"MASTER_ADDR={master}",
            error.faults[0].why,
            "export MASTER_ADDR=<address of the first node>, the same on every node, or unset it",
        )


def memory(_environ: _Environ) -> Iterator[Finding]:
    """Yield the space in /dev/shm and in the temporary folder."""
    shared_memory = _Space.in_folder(_SHARED_MEMORY)
    fix = "delete stale files in it"
    if shared_memory.total_bytes < _LOW_SHARED_MEMORY_BYTES:
        fix = "start the container with --shm-size=8g (or --ipc=host)"
    yield shared_memory.finding(
        _LOW_SHARED_MEMORY_BYTES,
        why="DataLoader workers and NCCL send data through it, "
        "and a process is killed by SIGBUS when it is full",
        fix=fix,
    )
    yield _Space.in_folder(tempfile.gettempdir()).finding(
        _LOW_TEMPORARY_BYTES,
        why="the arguments and results of a call, models included, are written there",
        fix="free some space, or export TMPDIR=<a folder on a larger disk>",
    )


class _Space(NamedTuple):
    """The space of the file system of a folder; 0 bytes if there is no such folder."""

    folder: str
    free_bytes: int
    total_bytes: int

    @classmethod
    def in_folder(cls, folder: str) -> _Space:
        """Ask for the space of a folder."""
        if not Path(folder).is_dir():
            return cls(folder, 0, 0)
        usage = shutil.disk_usage(folder)
        return cls(folder, usage.free, usage.total)

    def finding(self, needed_bytes: int, *, why: str, fix: str) -> Finding:
        """Return a fact about the free space, or a warning if calls may need more.

        Args:
            needed_bytes: free space that most programs can do with.
            why: what needs the space.
            fix: what to do if there is less.
        """
        text = f"{self.folder}: {self.free_bytes:,} of {self.total_bytes:,} bytes free"
        if self.free_bytes >= needed_bytes:
            return Finding("ok", text)
        return Finding("warning", text, f"less than {needed_bytes:,}: {why}", fix)


def variables(environ: _Environ) -> Iterator[Finding]:
    """Yield what a launcher has set, and PARALLELIZE_ variables, as a call reads them."""
    try:
        world = detect(environ)
        Config.parse().merged(environ)
        job = current_allocation(environ)
    except ConfigError as error:
        for fault in error.faults:
            yield Finding("fault", fault.what, fault.why, fault.fix)
        return
    text = "not started by a launcher"
    if world is not None:
        text = f"rank {world.rank} of {world.world_size}"
    if job is not None:
        text += f", in Slurm job {job.job_id} of {job.num_nodes} node(s)"
    yield Finding("ok", text)
    if job is not None and job.num_nodes > 1 and "SLURM_STEP_ID" not in environ:
        yield Finding(
            "warning",
            "srun did not start this process",
            "a call in this process would be refused, or use this node only",
            "srun parallelize doctor checks every node",
        )
    options = []
    for name, value in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and value:
            options.append(f"{name}={value}")
    if options:
        yield Finding(
            "warning",
            " ".join(options),
            "it overrides options in the code",
            "unset it, unless this is intended",
        )


def all_reduce(environ: _Environ) -> Iterator[Finding]:
    """Yield the speed of an exchange over gloo, and over NCCL between GPUs, or why it failed."""
    # In a rank of a launcher, the two ranks of the exchange would join its world.
    alone = without_launcher(environ)
    clean = {name: alone[name] for name in alone if not name.startswith(ENV_PREFIX)}
    yield _exchange_finding("gloo", {**clean, "CUDA_VISIBLE_DEVICES": ""})
    if torch.cuda.device_count() > 1:
        yield _exchange_finding("nccl", clean)


def _exchange_finding(library: str, environ: _Environ) -> Finding:
    """Return the speed of an exchange, or why it failed."""
    has_worked, text = _exchange(library, environ)
    what = f"two ranks over {library}: {text}"
    if has_worked:
        return Finding("ok", what)
    if library == "nccl":
        works_without_p2p, _ = _exchange(library, {**environ, "NCCL_P2P_DISABLE": "1"})
        if works_without_p2p:
            return Finding(
                "fault",
                what,
                "it works with NCCL_P2P_DISABLE=1: "
                "the direct access of these GPUs to each other (P2P) is broken",
                "export NCCL_P2P_DISABLE=1, which is slower; "
                "or disable PCIe ACS and the IOMMU in the firmware",
            )
    return Finding(
        "fault",
        what,
        "two ranks on this machine could not communicate",
        "see the findings above; "
        "NCCL_DEBUG=INFO TORCH_CPP_LOG_LEVEL=INFO parallelize doctor says more",
    )


def _exchange(library: str, environ: _Environ) -> tuple[bool, str]:
    """Run `exchange` in a process that is killed if it hangs.

    Returns:
        (whether the exchange has worked, the speed or what failed).
    """
    code = f"from parallelize.cli.doctor import exchange; exchange({library!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        except BaseException as error:
            # Once it has ended, its number may be that of another process.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return False, f"no result within {_TIMEOUT_S:g} s"
            raise
    text = output.strip() or f"exit code {process.returncode}"
    return process.returncode == 0, text


def exchange(library: str) -> None:
    """Start two ranks as a call does, and print the speed of their all_reduce, or what failed.

    Args:
        library: "gloo" for two ranks on the CPU, "nccl" for two GPUs.

    Raises:
        SystemExit: it has failed (1).
    """
    options: dict[str, Any] = {"processes": 2}
    if library == "nccl":
        options = {"gpus": 2}
    start_s = time.perf_counter()
    try:
        times_s = distributed(timeout=_TIMEOUT_S / 2, **options)(times_of_all_reduce)()
    except Exception as error:  # noqa: BLE001  # any failure is the finding
        _write(f"{type(error).__name__}: {error}".partition("\n")[0])
        sys.exit(1)
    started_s = time.perf_counter() - start_s - sum(times_s)
    median_s = sorted(times_s)[len(times_s) // 2]
    speed = _MESSAGE_BYTES / median_s / 1e6
    _write(f"{speed:.0f} MB/s, started in {started_s:.1f} s")


def times_of_all_reduce() -> list[float]:
    """Return the seconds of several all_reduces; runs on every rank.

    Raises:
        RuntimeError: the sums are wrong.
    """
    message = torch.ones(_MESSAGE_BYTES // 4, device=device())
    times_s = []
    # The first all_reduce opens connections, and is not counted.
    for _ in range(1 + _REPETITIONS):
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(message)
        if message.device.type != "cpu":
            torch.accelerator.synchronize()
        times_s.append(time.perf_counter() - start_s)
    expected = dist.get_world_size() ** (1 + _REPETITIONS)
    if not bool((message == expected).all()):
        raise RuntimeError("the sums are wrong: data was corrupted between two processes")
    return times_s[1:]
