"""Two ranks that start, meet and reduce: what every call does, with the time it takes."""

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
from parallelize.config.layout import lay_out
from parallelize.errors import Fault, ParallelizeError
from parallelize.launchers.elastic.plugin import ElasticLauncher
from parallelize.runtime.context import device

__all__ = ["CHECK", "Smoke", "exchange", "gather", "judge"]

_MESSAGE_BYTES = 16 << 20
_ROUNDS = 5
_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class Smoke:
    """What came of an all_reduce of two ranks.

    Args:
        carrier: "nccl" between two GPUs, else "gloo" on the CPU.
        started_s: from the call to its value, less the exchange; processes were started and met in it.
        exchanged_mb_per_s: bytes of a message over the median time of its reduction, in 10^6 per second.
        is_right: whether every sum was what it had to be.
        error: why there are no numbers; None: there are.
    """

    carrier: str
    started_s: float = 0.0
    exchanged_mb_per_s: float = 0.0
    is_right: bool = True
    error: Fault | None = None


def exchange(message_bytes: int, rounds: int) -> tuple[list[float], bool]:
    """Reduce a message a few times; on every rank of a run.

    Returns:
        Seconds of each round after the first, and whether all sums were right.
    """
    message = torch.ones(message_bytes // 4, device=device())
    times = []
    for _ in range(rounds + 1):  # the first sets up what the others use
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(message)
        if message.device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begun)
    return times[1:], bool((message == dist.get_world_size() ** (rounds + 1)).all())


def gather(environ: Mapping[str, str]) -> Smoke:
    """Start two ranks as a call does: on two GPUs where there are, else on the CPU."""
    hardware = probe()
    has_gpus = hardware.device_type == "cuda" and hardware.count > 1
    # What the environment asks of calls is another check's; this one must have two ranks.
    environ = {name: text for name, text in environ.items() if not name.startswith(ENV_PREFIX)}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="parallelize-") as folder:
        asked = {"gpus": 2} if has_gpus else {"processes": 2}
        config = Config.parse(**asked, timeout=_TIMEOUT_S, logs=folder)
        task = Task(exchange, (_MESSAGE_BYTES, _ROUNDS), {}, lay_out(config, hardware if has_gpus else Hardware()))
        carrier = "nccl" if has_gpus else "gloo"
        try:
            times, is_right = ElasticLauncher().launch(task, node=None, environ=environ)[0].value
        except Exception as error:  # noqa: BLE001 - whatever stops two ranks from talking is what is looked for
            return Smoke(carrier=carrier, error=_told(error))
    median = sorted(times)[len(times) // 2]
    return Smoke(
        carrier=carrier,
        started_s=time.perf_counter() - begun - sum(times),
        exchanged_mb_per_s=_MESSAGE_BYTES / median / 1e6,
        is_right=is_right,
    )


def _told(error: Exception) -> Fault:
    fix = "see the findings above; TORCH_CPP_LOG_LEVEL=INFO NCCL_DEBUG=INFO parallelize doctor says more"
    if isinstance(error, ParallelizeError):
        first = error.faults[0]
        return Fault(first.what, first.why, first.fix)
    lines = str(error).strip().splitlines() or [""]
    return Fault(f"{type(error).__name__}: {lines[0]}", "two ranks on this machine could not talk", fix)


def judge(facts: Smoke) -> Iterator[Finding]:
    """Whether calls of several processes work here."""
    if facts.error is not None:
        yield fault("smoke-failed", facts.error.what, why=facts.error.why, fix=facts.error.fix)
    elif not facts.is_right:
        yield fault(
            "smoke-wrong",
            f"two ranks reduced ones over {facts.carrier}, and the sums are wrong",
            why="what one process sent is not what the other got",
            fix="NCCL_P2P_DISABLE=1 parallelize doctor tells whether it is the way between GPUs; do not train here",
        )


def _summary(facts: Smoke) -> str:
    if facts.error is not None:
        return f"two ranks over {facts.carrier}: failed"
    return (
        f"two ranks over {facts.carrier}: all_reduce of {_MESSAGE_BYTES >> 20} MiB at "
        f"{facts.exchanged_mb_per_s:.0f} MB/s, started in {facts.started_s:.1f} s"
    )


CHECK = Check("all_reduce", gather, _summary, judge)
