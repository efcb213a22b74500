"""Doctor check: the GPUs of this machine, and whether this torch can use them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from parallelize.cli.findings import Check, Finding, fault, warning

__all__ = ["CHECK", "Accelerators", "Gpu", "gather", "judge"]

_GIB = 1 << 30
_IN_USE_FRACTION = 0.1  # a GPU counts as in use if more of its memory is taken


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that is visible to this process.

    Args:
        name: model of the GPU.
        capability: compute capability, such as "9.0".
        memory_bytes: total memory.
        free_bytes: free memory.
    """

    name: str
    capability: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """The GPUs of the machine, and the build of torch.

    Args:
        build: platform that torch was built for, such as "CUDA 13.0", "ROCm 6.4" or "CPU".
        driver: version of the NVIDIA driver; None: no driver is loaded.
        present: number of NVIDIA GPUs of the machine, visible to this process or not.
        mask: value of CUDA_VISIBLE_DEVICES; None: not set.
        init_error: torch's error when it initializes CUDA; None: no error, or no GPU.
        gpus: the GPUs that are visible to this process.
        architectures: architectures that this torch has kernels for, such as "sm_90" and "compute_90".
        apart: pairs of GPUs without peer access.
        has_nccl: whether this torch was built with NCCL or RCCL.
    """

    build: str = "CPU"
    driver: str | None = None
    present: int = 0
    mask: str | None = None
    init_error: str | None = None
    gpus: tuple[Gpu, ...] = ()
    architectures: tuple[str, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    has_nccl: bool = True


def gather(environ: Mapping[str, str]) -> Accelerators:
    """Query torch and the system about GPUs; initialize CUDA in this process if a GPU exists."""
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    present = len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])
    error = _init_error() if build != "CPU" and (present or torch.cuda.device_count()) else None
    count = torch.cuda.device_count() if build != "CPU" and error is None else 0
    pairs = itertools.combinations(range(count), 2)
    return Accelerators(
        build=build,
        driver=_driver(Path("/proc/driver/nvidia/version")),
        present=present,
        mask=environ.get("CUDA_VISIBLE_DEVICES"),
        init_error=error,
        gpus=tuple(_gpu(index) for index in range(count)),
        architectures=tuple(torch.cuda.get_arch_list()) if count else (),
        apart=tuple((a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)),
        has_nccl=dist.is_nccl_available(),
    )


def _init_error() -> str | None:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no types for it
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0]
    return None


def _driver(path: Path) -> str | None:
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text()) if path.exists() else None
    return None if found is None else found[0]


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = f"{properties.major}.{properties.minor}"
    return Gpu(name=properties.name, capability=capability, memory_bytes=total, free_bytes=free)


def judge(facts: Accelerators) -> Iterator[Finding]:
    """Yield a finding for each problem that prevents or limits the use of GPUs."""
    yield from _judge_build_and_mask(facts)
    for index, gpu in enumerate(facts.gpus):
        yield from _judge_gpu(index, gpu, facts)
    models = Counter(gpu.name for gpu in facts.gpus)
    if len(models) > 1:
        yield warning(
            "gpus-differ",
            "GPUs of several models: " + ", ".join(f"{count} x {name}" for name, count in models.items()),
            why="ranks wait for each other at every step: the slowest GPU limits all",
            fix="use GPUs of one model: gpus=[...]",
        )
    if facts.gpus and not facts.has_nccl:
        yield fault(
            "no-nccl",
            f"{len(facts.gpus)} GPU(s), and torch without NCCL",
            why="NCCL runs collectives of GPU tensors",
            fix="install torch from pytorch.org or PyPI; or use process_group_backend='gloo', which is slower",
        )
    if facts.apart:
        yield warning(
            "no-peer-access",
            "no peer access between GPUs " + ", ".join(f"{a} and {b}" for a, b in facts.apart),
            why="they communicate through host memory",
            fix="nvidia-smi topo -m shows their connections; disable PCIe ACS, or in a virtual machine enable ATS",
        )


def _judge_build_and_mask(facts: Accelerators) -> Iterator[Finding]:
    if facts.present and facts.build == "CPU":
        yield warning(
            "torch-without-cuda",
            f"{facts.present} NVIDIA GPU(s), and a CPU build of torch",
            why="functions run on the CPU",
            fix="install a CUDA build of torch: https://pytorch.org/get-started/locally",
        )
    elif facts.init_error is not None and not _hides_all(facts):
        yield fault(
            "gpus-unusable",
            f"torch for {facts.build} cannot use the GPU(s), driver {facts.driver or 'not loaded'}",
            why=facts.init_error,
            fix="update the driver, or install a torch for an older CUDA: nvidia-smi shows the newest one",
        )
    if facts.build != "CPU" and facts.present and _hides_all(facts):
        yield warning(
            "gpus-hidden",
            f"CUDA_VISIBLE_DEVICES={facts.mask!r} hides all of {facts.present} GPU(s)",
            why="functions run on the CPU",
            fix="unset CUDA_VISIBLE_DEVICES, or list GPUs in it",
        )
    beyond = [each for each in _mask_entries(facts.mask) if each.isdecimal() and int(each) >= facts.present > 0]
    if beyond and facts.build != "CPU":
        yield fault(
            "mask-beyond",
            f"CUDA_VISIBLE_DEVICES={facts.mask!r} on a machine of {facts.present} GPU(s)",
            why=f"no GPU {', '.join(beyond)} exists, and CUDA ignores every later entry",
            fix=f"list GPUs from 0 to {facts.present - 1}",
        )


def _mask_entries(mask: str | None) -> list[str]:
    return [each.strip() for each in (mask or "").split(",") if each.strip()]


def _hides_all(facts: Accelerators) -> bool:
    return facts.mask is not None and _mask_entries(facts.mask)[:1] in ([], ["-1"])


def _judge_gpu(index: int, gpu: Gpu, facts: Accelerators) -> Iterator[Finding]:
    if facts.architectures and not _is_covered(gpu.capability, facts.architectures):
        yield fault(
            "gpu-architecture",
            f"GPU {index}, {gpu.name}, has compute capability {gpu.capability}",
            why=f"this torch has kernels for {', '.join(facts.architectures)} only",
            fix="install a torch that was built for this capability: https://pytorch.org/get-started/locally",
        )
    used = gpu.memory_bytes - gpu.free_bytes
    if used > _IN_USE_FRACTION * gpu.memory_bytes:
        yield warning(
            "gpu-in-use",
            f"GPU {index}: {used / _GIB:.0f} of {gpu.memory_bytes / _GIB:.0f} GiB are in use",
            why="another program uses it: less memory and compute is left for yours",
            fix="run nvidia-smi to see the program, or use other GPUs: gpus=[...]",
        )


def _is_covered(capability: str, architectures: tuple[str, ...]) -> bool:
    """Return whether a GPU runs one of the architectures: sm of its major version, or compute (PTX), and not newer.

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#binary-compatibility
    """
    major, minor = map(int, capability.split("."))
    for each in architectures:
        found = re.match(r"(sm|compute)_(\d+)(\d)", each)
        if found is None:  # such as gfx942: ROCm has no such rule
            return True
        built_for = int(found[2]), int(found[3])
        if built_for <= (major, minor) and (found[1] == "compute" or built_for[0] == major):
            return True
    return False


def _summary(facts: Accelerators) -> str:
    if not facts.gpus:
        return f"torch for {facts.build}, no usable GPU: functions run on the CPU"
    models = Counter(f"{gpu.name} ({gpu.memory_bytes / _GIB:.0f} GiB)" for gpu in facts.gpus)
    listed = ", ".join(f"{count} x {name}" for name, count in models.items())
    renumbered = f", CUDA_VISIBLE_DEVICES={facts.mask}" if facts.mask is not None else ""
    return f"torch for {facts.build}, driver {facts.driver}, {listed}{renumbered}"


CHECK = Check("accelerators", gather, _summary, judge)
