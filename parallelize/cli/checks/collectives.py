"""What can carry collectives here: gloo for the CPU, NCCL for GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallelize.cli.findings import Check, Finding, fault
from parallelize.cluster.devices import probe

__all__ = ["CHECK", "Carriers", "gather", "judge"]


@dataclass(frozen=True, kw_only=True)
class Carriers:
    """What this torch was built with.

    Args:
        has_distributed: torch.distributed at all.
        has_gloo: its backend for the CPU.
        nccl: version of its backend for CUDA ("2.27.5"), or of RCCL; None: there is none.
        gpus: CUDA or ROCm devices that this process sees.
    """

    has_distributed: bool = True
    has_gloo: bool = True
    nccl: str | None = None
    gpus: int = 0


def gather(_environ: Mapping[str, str]) -> Carriers:
    """Ask torch."""
    if not dist.is_available():
        return Carriers(has_distributed=False, has_gloo=False)
    version = torch.cuda.nccl.version() if dist.is_nccl_available() else None  # type: ignore[no-untyped-call]  # torch has no types for it
    hardware = probe()
    return Carriers(
        has_gloo=dist.is_gloo_available(),
        nccl=None if version is None else ".".join(map(str, version)),
        gpus=hardware.count if hardware.device_type == "cuda" else 0,
    )


def judge(facts: Carriers) -> Iterator[Finding]:
    """What several processes need to talk, and this torch does not have."""
    build = "install a torch from pytorch.org or PyPI, which has it"
    if not facts.has_distributed:
        yield fault("no-torch-distributed", "torch without torch.distributed", why="processes cannot talk", fix=build)
    elif not facts.has_gloo:
        yield fault("no-gloo", "torch without gloo", why="it carries what is on the CPU", fix=build)
    elif facts.gpus and facts.nccl is None:
        yield fault(
            "no-nccl",
            f"{facts.gpus} GPU(s), and a torch without NCCL",
            why="it carries gradients between GPUs",
            fix=f"{build}; or, slowly, process_group_backend='gloo'",
        )


def _summary(facts: Carriers) -> str:
    names = ["gloo"] * facts.has_gloo + ([f"NCCL {facts.nccl}"] if facts.nccl else [])
    return ", ".join(names) or "none"


CHECK = Check("collectives", gather, _summary, judge)
