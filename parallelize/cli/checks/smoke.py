"""Doctor check: starts two ranks as a call does, runs an all_reduce on them, and measures the time of both."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallelize.call.task import Task
from parallelize.cli.findings import Check, Finding, fault
from parallelize.cluster.devices import Hardware, probe
from parallelize.config.config import ENV_PREFIX, Config
from parallelize.config.layout import compute_layout
from parallelize.config.options import backend_by_device_type
from parallelize.errors import Fault, ParallelizeError
from parallelize.launchers.elastic.plugin import ElasticLauncher
from parallelize.runtime.context import device

__all__ = ["CHECK", "Smoke", "gather", "judge", "measure_all_reduce"]

_MESSAGE_BYTES = 16 << 20
_REPETITIONS = 5
_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class Smoke:
    """The result of an all_reduce of two ranks.

    Args:
        carrier: the process-group backend of the tensor's device: mostly "nccl" between two GPUs, "gloo" on the CPU.
        started_s: seconds that the call took without the all_reduces: to start processes and initialize the group.
        exchanged_mb_per_s: size of the tensor divided by the median time of an all_reduce, in 10^6 bytes per second.
        is_right: whether every sum was correct.
        error: why the call failed; None: it succeeded.
    """

    carrier: str
    started_s: float = 0.0
    exchanged_mb_per_s: float = 0.0
    is_right: bool = True
    error: Fault | None = None


def measure_all_reduce(message_bytes: int, repetitions: int) -> tuple[list[float], bool]:
    """All-reduce a tensor of ones several times; runs on every rank.

    Returns:
        Seconds of each repetition after the first, and whether all sums were correct.
    """
    message = torch.ones(message_bytes // 4, device=device())
    times = []
    for _ in range(repetitions + 1):  # the first one opens connections, and is not counted
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(message)
        if message.device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return times[1:], bool((message == dist.get_world_size() ** (repetitions + 1)).all())


def gather(environ: Mapping[str, str]) -> Smoke:
    """Run an all_reduce on two ranks, started as by a call: on two GPUs if this machine has them, else on the CPU."""
    hardware = probe()
    has_gpus = hardware.device_type == "cuda" and hardware.count > 1
    # PARALLELIZE_ variables could change the number of ranks; the check "variables" covers them.
    environ = {name: text for name, text in environ.items() if not name.startswith(ENV_PREFIX)}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="parallelize-") as folder:
        options = {"gpus": 2} if has_gpus else {"processes": 2}
        config = Config.parse(**options, timeout=_TIMEOUT_S, logs=folder)
        layout = compute_layout(config, hardware if has_gpus else Hardware())
        task = Task(measure_all_reduce, (_MESSAGE_BYTES, _REPETITIONS), {}, layout)
        carrier = backend_by_device_type(layout.process_group_backend)[layout.device_type]
        try:
            times, is_right = ElasticLauncher().launch(task, node=None, environ=environ)[0].value
        except Exception as error:  # noqa: BLE001 - any failure is the finding
            return Smoke(carrier=carrier, error=_fault_of(error))
    median = sorted(times)[len(times) // 2]
    return Smoke(
        carrier=carrier,
        started_s=time.perf_counter() - start - sum(times),
        exchanged_mb_per_s=_MESSAGE_BYTES / median / 1e6,
        is_right=is_right,
    )


def _fault_of(error: Exception) -> Fault:
    fix = "see the findings above; run TORCH_CPP_LOG_LEVEL=INFO NCCL_DEBUG=INFO parallelize doctor for details"
    if isinstance(error, ParallelizeError):
        return error.faults[0]
    lines = str(error).strip().splitlines() or [""]
    return Fault(f"{type(error).__name__}: {lines[0]}", "two ranks on this machine could not communicate", fix)


def judge(facts: Smoke) -> Iterator[Finding]:
    """Yield a fault if the two ranks failed or returned wrong sums."""
    if facts.error is not None:
        yield fault("smoke-failed", facts.error.what, why=facts.error.why, fix=facts.error.fix)
    elif not facts.is_right:
        yield fault(
            "smoke-wrong",
            f"an all_reduce of two ranks over {facts.carrier} returned wrong sums",
            why="data was corrupted between the two processes",
            fix="do not train here; run NCCL_P2P_DISABLE=1 parallelize doctor: if it works, GPU peer access is broken",
        )


def _summary(facts: Smoke) -> str:
    if facts.error is not None:
        return f"two ranks over {facts.carrier}: failed"
    return (
        f"two ranks over {facts.carrier}: all_reduce of {_MESSAGE_BYTES >> 20} MiB at "
        f"{facts.exchanged_mb_per_s:.0f} MB/s, started in {facts.started_s:.1f} s"
    )


CHECK = Check("all_reduce", gather, _summary, judge)
