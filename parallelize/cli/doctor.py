"""`parallelize doctor`: whether calls will work on this machine, and how to fix what prevents them."""

from __future__ import annotations

import contextlib
import dataclasses
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
from typing import Any

import torch
import torch.distributed as dist

from parallelize.cluster import network
from parallelize.cluster.environment import detect
from parallelize.cluster.launcher_variables import without_launcher
from parallelize.cluster.slurm_allocation import current_allocation
from parallelize.config.config import ENV_PREFIX, Config
from parallelize.decorator import distributed
from parallelize.errors import ConfigError, LaunchError
from parallelize.run.context import device
from parallelize.version import __version__

__all__ = [
    "Finding",
    "addresses",
    "all_reduce",
    "all_reduce_s",
    "diagnose",
    "exchange",
    "gpus",
    "memory",
    "variables",
    "versions",
]

_GIB, _MIB = 1 << 30, 1 << 20
_LOW_SHM_BYTES, _LOW_TMP_BYTES = 512 * _MIB, 1 * _GIB
# Documentation addresses (RFC 5737, RFC 3849): no host has them, so their route is the default route.
_OUTSIDE = {"IPv4": "192.0.2.254", "IPv6": "2001:db8::1"}
_TIMEOUT_S, _MESSAGE_BYTES, _REPETITIONS = 90.0, 16 * _MIB, 5


@dataclass(frozen=True)
class Finding:
    """A fact, or a problem.

    Args:
        status: "ok": a fact; "warning": calls work, but otherwise than expected; "fault": calls fail.
        what: the fact, or what is wrong.
        why: why that is a problem.
        fix: what to do.
        check: what was looked at.
    """

    status: str
    what: str
    why: str = ""
    fix: str = ""
    check: str = ""

    def __str__(self) -> str:
        reasons = [f"{'':<9}{name}: {text}" for name, text in (("why", self.why), ("fix", self.fix)) if text]
        return "\n".join([f"{self.status:<9}{self.check:<10} {self.what}", *reasons])


def diagnose(environ: Mapping[str, str], *, as_json: bool) -> int:
    """Run every check and print the findings; return the exit code: 1 if there is a fault, else 0.

    Args:
        environ: environment variables of this process.
        as_json: print one list at the end, not a line for each finding.
    """
    found = []
    for check in (versions, gpus, addresses, memory, variables, all_reduce):
        for each in _checked(check, environ):
            found.append(each)
            if not as_json:
                _write(each)
    if as_json:
        _write(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
    return int(any(each.status == "fault" for each in found))


def _checked(check: Callable[[Mapping[str, str]], Iterator[Finding]], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of a check with its name; what it does not foresee is a finding, too."""
    try:
        for each in check(environ):
            yield dataclasses.replace(each, check=check.__name__)
    except Exception as error:  # noqa: BLE001 - see above
        text = f"this check ended with {type(error).__name__}: {error}"
        yield Finding("fault", text, "it does not support something here", "report it", check.__name__)


def _write(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def versions(_environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the versions that a bug report needs."""
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "the CPU"
    nccl = f", NCCL {torch.cuda.nccl.version()}" if dist.is_nccl_available() else ""  # type: ignore[no-untyped-call]  # torch's
    system = f"Python {platform.python_version()}, {platform.platform()}"
    yield Finding("ok", f"parallelize {__version__}, torch {torch.__version__} for {build}{nccl}, {system}")


def gpus(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the GPUs and their driver, what keeps this torch from using them, and pairs without peer access."""
    present = len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text().partition("\n")[0] if driver.exists() else "no NVIDIA driver"
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    count, error = torch.cuda.device_count(), ""
    try:
        names = [torch.cuda.get_device_properties(index) for index in range(count)]
    except RuntimeError as raised:
        names, error = [], str(raised).partition("\n")[0]
    if error or present > count:
        yield Finding(
            "fault" if error else "warning",
            f"{present} GPU(s), of which torch can use {len(names)}: {text}, CUDA_VISIBLE_DEVICES={mask}",
            error or "the variable hides some, or this torch is built for the CPU or another CUDA",
            "unset CUDA_VISIBLE_DEVICES; install a torch for this driver: https://pytorch.org/get-started/locally",
        )
    for index, each in enumerate(names):
        free, total = torch.cuda.mem_get_info(index)
        memory_text = f"{free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
        yield Finding("ok", f"GPU {index}: {each.name}, capability {each.major}.{each.minor}, {memory_text}")
    if not names:
        yield Finding("ok", "none: functions run on the CPU")
    pairs = itertools.combinations(range(len(names)), 2)
    apart = [f"{a} and {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        yield Finding(
            "warning",
            f"no peer access between GPUs {', '.join(apart)}",
            "they communicate through host memory",
            "nvidia-smi topo -m shows their connections; disable PCIe ACS, or in a virtual machine enable ATS",
        )


def addresses(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield this host's addresses, and names with which processes could not connect."""
    own, loopback = [], []
    for family, outside in _OUTSIDE.items():
        with contextlib.suppress(OSError):  # no route
            own.append(f"{family} {network.source_address_for(outside)}")
    for kind, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.create_server((address, 0), family=kind):
            loopback.append(address)
    yield Finding("ok", f"{socket.gethostname()}: {', '.join(own) or 'no route to other nodes'}")
    if "127.0.0.1" not in loopback:
        yield Finding(
            "warning" if loopback else "fault",
            f"cannot listen on 127.0.0.1, only on {loopback}",
            "the processes of one machine connect there",
            "ip link set lo up; in a host with IPv6 only, add 127.0.0.1 to lo",
        )
    if master := environ.get("MASTER_ADDR"):
        try:
            network.resolvable_address(master)
        except LaunchError as error:
            fix = "export MASTER_ADDR=<address of the first node>, the same on every node, or unset it"
            yield Finding("fault", f"MASTER_ADDR={master}", error.faults[0].why, fix)


def memory(_environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the space in /dev/shm and in the temporary folder."""
    folder = tempfile.gettempdir()
    for path, least, why, fix in (
        (
            "/dev/shm",  # noqa: S108 - only its free space is read
            _LOW_SHM_BYTES,
            "DataLoader workers and NCCL send data through it: a process is killed by SIGBUS when it is full",
            "start the container with --shm-size=8g (or --ipc=host); else delete stale files in it",
        ),
        (
            folder,
            _LOW_TMP_BYTES,
            "the arguments and results of a call, models included, are written there",
            "free some space, or export TMPDIR=<a folder on a larger disk>",
        ),
    ):
        free = shutil.disk_usage(path).free if Path(path).is_dir() else 0
        is_low = free < least
        text = f"{free // _MIB} MiB free in {path}"
        yield Finding("warning", text, why, fix) if is_low else Finding("ok", text)


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what a launcher has set, and PARALLELIZE_ variables, as a call reads them."""
    options = " ".join(
        f"{name}={text}" for name, text in sorted(environ.items()) if name.startswith(ENV_PREFIX) and text
    )
    try:
        world = detect(environ)
        Config.parse().merged(environ)
    except ConfigError as error:
        for fault in error.faults:
            yield Finding("fault", fault.what, fault.why, fault.fix)
        return
    job = current_allocation(environ)
    placed = f"rank {world.rank} of {world.world_size}" if world else "not started by a launcher"
    yield Finding("ok", placed + (f", in Slurm job {job.job_id} of {job.num_nodes} node(s)" if job else ""))
    if job and job.num_nodes > 1 and "SLURM_STEP_ID" not in environ:
        why = "a call in this process would be refused, or use this node only"
        yield Finding("warning", "srun did not start this process", why, "srun parallelize doctor checks every node")
    if options:
        yield Finding("warning", options, "it overrides options in the code", "unset it, unless this is intended")


def all_reduce(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the speed of an all_reduce of two ranks over gloo, and over NCCL between two GPUs, or why it failed."""
    # In a rank of a launcher, the two ranks of the exchange would join its world.
    plain = without_launcher(environ)
    clean = {name: text for name, text in plain.items() if not name.startswith(ENV_PREFIX)}
    backends = {"gloo": {**clean, "CUDA_VISIBLE_DEVICES": ""}}
    if torch.cuda.device_count() > 1:
        backends["nccl"] = clean
    for backend, variables_of in backends.items():
        is_right, text = _exchange(backend, variables_of)
        if is_right:
            yield Finding("ok", f"two ranks over {backend}: {text}")
            continue
        why = "two ranks on this machine could not communicate"
        fix = "see the findings above; NCCL_DEBUG=INFO TORCH_CPP_LOG_LEVEL=INFO parallelize doctor says more"
        if backend == "nccl" and _exchange(backend, {**clean, "NCCL_P2P_DISABLE": "1"})[0]:
            why = "it works with NCCL_P2P_DISABLE=1: the direct access of these GPUs to each other (P2P) is broken"
            fix = "export NCCL_P2P_DISABLE=1, which is slower; or disable PCIe ACS and the IOMMU in the firmware"
        yield Finding("fault", f"two ranks over {backend}: {text}", why, fix)


def _exchange(backend: str, environ: Mapping[str, str]) -> tuple[bool, str]:
    """Run `exchange` in a process that is killed if it hangs; return whether it succeeded, and what it wrote."""
    code = f"from parallelize.cli.doctor import exchange; exchange({backend!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, _ = process.communicate(timeout=_TIMEOUT_S)
        except BaseException as error:
            if process.returncode is None:  # else its number may be that of another process
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return False, f"no result within {_TIMEOUT_S:g} s"
    return process.returncode == 0, out.strip() or f"exit code {process.returncode}"


def exchange(backend: str) -> None:
    """Start two ranks as a call does, and write the speed of their all_reduce, or what failed (exit code 1)."""
    start = time.perf_counter()
    options: dict[str, Any] = {"gpus": 2} if backend == "nccl" else {"processes": 2}
    try:
        times = distributed(timeout=_TIMEOUT_S / 2, **options)(all_reduce_s)()
    except Exception as error:  # noqa: BLE001 - any failure is the finding
        _write(f"{type(error).__name__}: {error}".partition("\n")[0])
        sys.exit(1)
    median = sorted(times)[len(times) // 2]
    started_s = time.perf_counter() - start - sum(times)
    _write(f"{_MESSAGE_BYTES / median / 1e6:.0f} MB/s, started in {started_s:.1f} s")


def all_reduce_s() -> list[float]:
    """Return the seconds of each of several all_reduces; runs on every rank."""
    message, times = torch.ones(_MESSAGE_BYTES // 4, device=device()), []
    for _ in range(_REPETITIONS + 1):  # the first one opens connections, and is not counted
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(message)
        if message.device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    if not bool((message == dist.get_world_size() ** (_REPETITIONS + 1)).all()):
        raise RuntimeError("the sums are wrong: data was corrupted between two processes")
    return times[1:]
