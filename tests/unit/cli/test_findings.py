"""Every finding of the doctor, from facts that cause it; facts without a problem cause none."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import parallelize
from parallelize.cli.checks import (
    accelerators,
    cluster,
    limits,
    memory,
    network,
    overrides,
    ports,
    smoke,
    versions,
)
from parallelize.cli.checks.accelerators import Accelerators, Gpu
from parallelize.cli.checks.cluster import Cluster
from parallelize.cli.checks.limits import Limits
from parallelize.cli.checks.memory import Memory
from parallelize.cli.checks.network import Network
from parallelize.cli.checks.overrides import Overrides
from parallelize.cli.checks.ports import Ports
from parallelize.cli.checks.smoke import Smoke
from parallelize.cli.checks.versions import Versions
from parallelize.cli.doctor import CHECKS, document, table
from parallelize.cli.findings import Check, Finding, Result, fault, warning
from parallelize.errors import Fault

GIB = 1 << 30
H100 = Gpu(name="NVIDIA H100", capability="9.0", memory_bytes=80 * GIB, free_bytes=79 * GIB)
CUDA = Accelerators(
    build="CUDA 13.0", driver="580.65.06", present=2, gpus=(H100, H100), architectures=("sm_80", "sm_90")
)
SLURM = ("sbatch", "srun", "squeue", "scontrol", "scancel")
FAULT = Fault("RANK=7", "it goes from 0 to 3 there", "check the variables")
LAN = {"lo": "127.0.0.1", "eth0": "10.0.0.2"}


def but(facts: Any, **changes: Any) -> Any:
    """Return facts with some fields changed."""
    return dataclasses.replace(facts, **changes)


# For each check facts without a problem.
FACTS_WITHOUT_FINDINGS: list[tuple[Check[Any], Any]] = [
    (versions.CHECK, Versions(python="3.11", own="1.0", installed={"torch": "2.13.0+cu130"}, least={"torch": "2.11"})),
    (versions.CHECK, Versions(python="3.11", own="1.0", installed={"wrapt": "2.10"}, least={"wrapt": "2.2"})),
    (accelerators.CHECK, Accelerators()),
    (accelerators.CHECK, Accelerators(build="CUDA 13.0")),
    (accelerators.CHECK, CUDA),
    (accelerators.CHECK, but(CUDA, mask="0,1")),
    (accelerators.CHECK, but(CUDA, mask="GPU-8f2a,MIG-77")),
    (accelerators.CHECK, but(CUDA, architectures=("sm_75", "compute_75"))),
    (accelerators.CHECK, but(CUDA, architectures=("gfx942",))),
    (accelerators.CHECK, but(CUDA, gpus=(but(H100, capability="9.1"),), architectures=("sm_90",))),
    (accelerators.CHECK, Accelerators(has_nccl=False)),
    (network.CHECK, Network(interfaces=LAN, host="a", outward="eth0", master="10.0.0.1")),
    (network.CHECK, Network(interfaces={"lo": "127.0.0.1"})),
    *(
        (network.CHECK, Network(interfaces=LAN, gloo_names=gloo, nccl_names=nccl))
        for gloo, nccl in [("eth0", "eth"), ("lo,eth0", "=eth0"), ("lo", "^docker,lo"), ("lo", "ib,eth")]
    ),
    (ports.CHECK, Ports(first=32768, last=60999, master_port="29400")),
    (memory.CHECK, Memory(shm_bytes=8 * GIB, shm_free_bytes=8 * GIB, folder="/tmp", folder_free_bytes=9 * GIB)),
    (memory.CHECK, Memory(system="darwin", folder="/tmp", folder_free_bytes=9 * GIB)),
    (limits.CHECK, Limits()),
    (limits.CHECK, Limits(files=1024, locked_bytes=65536, processes=4096, container_processes=4096)),
    (limits.CHECK, Limits(infiniband=("mlx5_0",))),
    (cluster.CHECK, Cluster()),
    (cluster.CHECK, Cluster(commands=SLURM, controller="Slurmctld(primary) at head is UP", job_id="7", num_nodes=1)),
    (
        cluster.CHECK,
        Cluster(commands=SLURM, controller="is UP", job_id="7", num_nodes=2, is_task=True, placed="rank 1 of 2"),
    ),
    (overrides.CHECK, Overrides(options={}, debugging={})),
    (
        overrides.CHECK,
        Overrides(options={}, debugging={"CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}),
    ),
    (smoke.CHECK, Smoke(carrier="gloo", started_s=0.5, exchanged_mb_per_s=1000.0)),
]

# Finding, a part of its message, and the check and facts that cause it.
FACTS_WITH_FINDING: list[tuple[str, str, Check[Any], Any]] = [
    (
        "version-too-old",
        "torch 2.9.1+cpu",
        versions.CHECK,
        Versions(python="3.11", own="1.0", installed={"torch": "2.9.1+cpu"}, least={"torch": "2.11"}),
    ),
    (
        "version-too-old",
        "wrapt is not installed",
        versions.CHECK,
        Versions(python="3.11", own="1.0", installed={"wrapt": None}, least={"wrapt": "2.2"}),
    ),
    (
        "torch-unchecked",
        "torch 9.1.0",
        versions.CHECK,
        Versions(python="3.11", own="1.0", installed={"torch": "9.1.0"}, least={}),
    ),
    (
        "system-untried",
        "darwin",
        versions.CHECK,
        Versions(python="3.11", own="1.0", installed={}, least={}, system="darwin"),
    ),
    ("torch-without-cuda", "2 NVIDIA GPU(s)", accelerators.CHECK, Accelerators(present=2)),
    (
        "gpus-unusable",
        "CUDA 13.0 cannot use the GPU(s), driver 470.1",
        accelerators.CHECK,
        Accelerators(build="CUDA 13.0", driver="470.1", present=1, init_error="The NVIDIA driver is too old"),
    ),
    ("gpus-hidden", "hides all of 2", accelerators.CHECK, but(CUDA, mask="", gpus=(), init_error="No CUDA GPUs")),
    ("gpus-hidden", "CUDA_VISIBLE_DEVICES='-1'", accelerators.CHECK, but(CUDA, mask="-1", gpus=())),
    ("mask-beyond", "a machine of 2 GPU(s)", accelerators.CHECK, but(CUDA, mask="0,5,1", gpus=(H100,))),
    ("gpu-architecture", "capability 12.0", accelerators.CHECK, but(CUDA, gpus=(but(H100, capability="12.0"),))),
    ("gpu-architecture", "capability 7.0", accelerators.CHECK, but(CUDA, gpus=(but(H100, capability="7.0"),))),
    ("gpus-differ", "1 x NVIDIA H100, 1 x T4", accelerators.CHECK, but(CUDA, gpus=(H100, but(H100, name="T4")))),
    ("gpu-in-use", "GPU 0: 40 of 80 GiB", accelerators.CHECK, but(CUDA, gpus=(but(H100, free_bytes=40 * GIB),))),
    ("no-peer-access", "GPUs 0 and 1, 2 and 3", accelerators.CHECK, but(CUDA, apart=((0, 1), (2, 3)))),
    ("no-nccl", "2 GPU(s)", accelerators.CHECK, but(CUDA, has_nccl=False)),
    ("gloo-interface-unknown", "=eth7", network.CHECK, Network(interfaces=LAN, gloo_names="eth7")),
    ("gloo-interface-unknown", "=eth0,ib0", network.CHECK, Network(interfaces=LAN, gloo_names="eth0,ib0")),
    *(
        ("nccl-interface-unknown", f"={names}", network.CHECK, Network(interfaces=LAN, nccl_names=names))
        for names in ("ib", "=eth", "^lo,eth")
    ),
    (
        "master-unreachable",
        "MASTER_ADDR=nowhere",
        network.CHECK,
        Network(interfaces=LAN, master="nowhere", master_error="its name resolves nowhere"),
    ),
    ("no-free-port", "Address already in use", ports.CHECK, Ports(error=errno.EADDRINUSE)),
    ("loopback-down", "Cannot assign", ports.CHECK, Ports(error=errno.EADDRNOTAVAIL)),
    ("few-ports", "60000 to 60100", ports.CHECK, Ports(first=60000, last=60100)),
    ("master-port-invalid", "MASTER_PORT=http", ports.CHECK, Ports(master_port="http")),
    ("master-port-invalid", "MASTER_PORT=70000", ports.CHECK, Ports(master_port="70000")),
    (
        "master-port-taken",
        "MASTER_PORT=8000 is in use",
        ports.CHECK,
        Ports(master_port="8000", master_error=errno.EADDRINUSE),
    ),
    (
        "master-port-refused",
        "MASTER_PORT=80: Permission denied",
        ports.CHECK,
        Ports(master_port="80", master_error=errno.EACCES),
    ),
    ("no-shared-memory", "/dev/shm", memory.CHECK, Memory(folder="/tmp", folder_free_bytes=9 * GIB)),
    (
        "little-shared-memory",
        "60 of 64 MiB",
        memory.CHECK,
        Memory(shm_bytes=64 << 20, shm_free_bytes=60 << 20, folder="/tmp", folder_free_bytes=9 * GIB),
    ),
    ("no-temporary-folder", "temporary files", memory.CHECK, Memory(shm_bytes=GIB, shm_free_bytes=GIB)),
    (
        "temporary-folder-long",
        "91 bytes",
        memory.CHECK,
        Memory(system="darwin", folder="/" + 90 * "x", folder_free_bytes=9 * GIB),
    ),
    ("temporary-folder-full", "5 MiB", memory.CHECK, Memory(system="darwin", folder="/tmp", folder_free_bytes=5 << 20)),
    ("few-files", "256 files", limits.CHECK, Limits(files=256, most_files=4096)),
    ("few-processes", "9 more", limits.CHECK, Limits(processes=9)),
    ("few-processes-in-container", "9 more", limits.CHECK, Limits(container_processes=9)),
    ("locked-memory", "64 KiB", limits.CHECK, Limits(locked_bytes=65536, infiniband=("mlx5_0",))),
    (
        "slurm-commands-missing",
        "without srun",
        cluster.CHECK,
        Cluster(commands=tuple(each for each in SLURM if each != "srun"), controller="is UP"),
    ),
    ("slurm-commands-missing", "without sbatch, srun", cluster.CHECK, Cluster(job_id="7")),
    (
        "slurm-controller-down",
        "is DOWN",
        cluster.CHECK,
        Cluster(commands=SLURM, controller="Slurmctld(primary) is DOWN"),
    ),
    ("slurm-controller-down", "ping failed", cluster.CHECK, Cluster(commands=SLURM)),
    (
        "slurm-one-of-several-nodes",
        "job 7 has 4 nodes",
        cluster.CHECK,
        Cluster(commands=SLURM, controller="is UP", job_id="7", num_nodes=4),
    ),
    ("launcher-variables", "RANK=7", cluster.CHECK, Cluster(contradictions=(FAULT,))),
    ("override-refused", "RANK=7", overrides.CHECK, Overrides(options={"X": "1"}, refusals=(FAULT,), debugging={})),
    (
        "override-set",
        "PARALLELIZE_GPUS=2 PARALLELIZE_SEED=1",
        overrides.CHECK,
        Overrides(options={"PARALLELIZE_GPUS": "2", "PARALLELIZE_SEED": "1"}, debugging={}),
    ),
    *(
        ("debugging-variable", f"{name}={text}", overrides.CHECK, Overrides(options={}, debugging={name: text}))
        for name, text in [
            ("CUDA_LAUNCH_BLOCKING", "1"),
            ("NCCL_P2P_DISABLE", "1"),
            ("TORCH_DISTRIBUTED_DEBUG", "detail"),
        ]
    ),
    ("smoke-failed", "RANK=7", smoke.CHECK, Smoke(carrier="gloo", error=FAULT)),
    ("smoke-wrong", "over nccl", smoke.CHECK, Smoke(carrier="nccl", is_right=False)),
]

FAULT_IDS = {
    "check-failed",
    "gloo-interface-unknown",
    "gpu-architecture",
    "gpus-unusable",
    "launcher-variables",
    "loopback-down",
    "mask-beyond",
    "master-port-invalid",
    "master-port-refused",
    "master-port-taken",
    "master-unreachable",
    "nccl-interface-unknown",
    "no-free-port",
    "no-nccl",
    "no-shared-memory",
    "no-temporary-folder",
    "override-refused",
    "smoke-failed",
    "smoke-wrong",
    "temporary-folder-long",
    "version-too-old",
}


def ids_in_source() -> set[str]:
    """Return the id of every finding in the source."""
    folder = Path(parallelize.__file__).parent / "cli"
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    return set(re.findall(r"\b(?:fault|warning)\(\s*\"([\w-]+)\"", source))


@pytest.mark.parametrize(("check", "facts"), FACTS_WITHOUT_FINDINGS)
def test_facts_without_findings(check: Check[Any], facts: Any) -> None:
    """Facts without a problem cause no finding, and their summary fits on two lines."""
    assert list(check.judge(facts)) == []
    assert 0 < len(check.summary(facts)) < 200


@pytest.mark.parametrize(("name", "message", "check", "facts"), FACTS_WITH_FINDING)
def test_finding(name: str, message: str, check: Check[Any], facts: Any) -> None:
    """The facts cause this finding only; it has what, why and fix."""
    (found,) = check.judge(facts)
    assert (found.id, found.severity) == (name, "fault" if name in FAULT_IDS else "warning")
    assert message in found.fault.what
    assert all((found.fault.what, found.fault.why, found.fault.fix))
    assert len(check.summary(facts)) > 0


def test_every_finding_has_facts() -> None:
    """Every finding in the source has facts here that cause it."""
    assert ids_in_source() == {name for name, *_ in FACTS_WITH_FINDING} | {"check-failed"}
    assert ids_in_source() >= FAULT_IDS


def test_every_check_has_facts_without_findings() -> None:
    """Every check has facts here without a problem."""
    assert {check.name for check, _ in FACTS_WITHOUT_FINDINGS} == {check.name for check in CHECKS}


def test_the_checked_torch_is_the_pinned_one() -> None:
    """The newest torch that the doctor accepts without a warning is the one that our tests run with."""
    pinned = (Path(__file__).parents[3] / ".ci" / "newest.txt").read_text()
    assert f"torch=={versions.CHECKED_WITH}." in pinned


def raises(_environ: object) -> None:
    raise OSError("strange machine")


def two_findings(_facts: object) -> Iterator[Finding]:
    yield warning("x", "a thing " * 30, why="a reason", fix="a way")
    yield fault("y", "another", why="a reason", fix="a way")


def test_a_check_that_raises_is_a_finding() -> None:
    """A check that raises is a fault, with the exception in its message."""
    result = Check("ports", raises, str, two_findings).run({})
    assert (result.status, [finding.id for finding in result.findings]) == ("fault", ["check-failed"])
    assert "OSError: strange machine" in result.findings[0].fault.what


def test_the_table_is_aligned() -> None:
    """One line per check, with what, why and fix of each finding below it, and none wider than a screen."""
    results = [
        Result("ports", "all " * 40, (), {}),
        Result("limits", "few", tuple(two_findings(None)), {}),
    ]
    lines = table(results).splitlines()
    assert lines[0].startswith("ok       ports          all all")
    assert any(line.startswith("fault    limits         few") for line in lines)
    assert [line.strip() for line in lines if line.startswith("         why: ")] == ["why: a reason"] * 2
    assert [line.strip() for line in lines if line.startswith("         fix: ")] == ["fix: a way"] * 2
    assert max(map(len, lines)) <= 118


def test_the_fields_of_the_document() -> None:
    """The fields of --json are these, and all are JSON values."""
    said = document([Result("limits", "few", tuple(two_findings(None)), {"files": 3})])
    assert set(said) == {"schema", "version", "host", "status", "checks"}
    assert (said["schema"], said["status"], said["version"]) == (1, "fault", parallelize.__version__)
    (check,) = json.loads(json.dumps(said))["checks"]
    assert set(check) == {"name", "status", "summary", "findings", "facts"}
    assert check["findings"][1] == {
        "id": "y",
        "severity": "fault",
        "what": "another",
        "why": "a reason",
        "fix": "a way",
    }
