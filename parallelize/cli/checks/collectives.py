"""Doctor check: the process-group backends of torch, gloo for the CPU and NCCL for GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallelize.cli.findings import Check, Finding, fault
from parallelize.cluster.devices import probe

__all__ = ["CHECK", "Collectives", "gather", "judge"]


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The backends that this torch was built with.

    Args:
        has_distributed: whether torch.distributed is available.
        has_gloo: whether gloo is available.
        nccl: version of NCCL ("2.27.5") or RCCL; None: not available.
        gpus: number of CUDA or ROCm devices that this process sees.
    """

    has_distributed: bool = True
    has_gloo: bool = True
    nccl: str | None = None
    gpus: int = 0


def gather(_environ: Mapping[str, str]) -> Collectives:
    """Query which backends torch was built with."""
    if not dist.is_available():
        return Collectives(has_distributed=False, has_gloo=False)
    version = torch.cuda.nccl.version() if dist.is_nccl_available() else None  # type: ignore[no-untyped-call]  # torch has no types for it
    hardware = probe()
    return Collectives(
        has_gloo=dist.is_gloo_available(),
        nccl=None if version is None else ".".join(map(str, version)),
        gpus=hardware.count if hardware.device_type == "cuda" else 0,
    )


def judge(facts: Collectives) -> Iterator[Finding]:
    """Yield a fault if torch lacks a backend that several processes need."""
    fix_build = "install torch from pytorch.org or PyPI, whose builds include it"
    if not facts.has_distributed:
        why = "processes communicate with torch.distributed"
        yield fault("no-torch-distributed", "torch without torch.distributed", why=why, fix=fix_build)
    elif not facts.has_gloo:
        yield fault("no-gloo", "torch without gloo", why="gloo runs collectives of CPU tensors", fix=fix_build)
    elif facts.gpus and facts.nccl is None:
        yield fault(
            "no-nccl",
            f"{facts.gpus} GPU(s), and torch without NCCL",
            why="NCCL runs collectives of GPU tensors",
            fix=f"{fix_build}; or process_group_backend='gloo', which is slower",
        )


def _summary(facts: Collectives) -> str:
    names = ["gloo"] * facts.has_gloo + ([f"NCCL {facts.nccl}"] if facts.nccl else [])
    return ", ".join(names) or "none"


CHECK = Check("collectives", gather, _summary, judge)
