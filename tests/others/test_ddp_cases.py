"""The cases that torch tests DistributedDataParallel with end as ddp_cases.py says, with parallel_model in its place.

The cases of a test module run together, in a program of their own (ddp_runner.py): its processes are forked from one
that has imported torch's suite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from others.ddp_cases import ENDS, PASSING, SAMPLE, TORCH, Reason

RUNNER = Path(__file__).parent / "ddp_runner.py"

has_two_devices = torch.cuda.device_count() >= 2
is_pretended = "FAKE_CUDA" in os.environ

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(f"{TORCH}."), reason=f"the cases are those of torch {TORCH}"
)
needs_two_devices = pytest.mark.skipif(not has_two_devices, reason="needs two CUDA devices")


@dataclass(frozen=True)
class Outcome:
    """How a case has ended.

    Args:
        kind: "passed", "skipped" or "failed".
        message: the reason or the traceback.
    """

    kind: str
    message: str


def run_cases(names: Iterable[str], results: Path, *, backend: str) -> Mapping[str, Outcome]:
    """Run cases in a program of their own; return the outcome of each."""
    environment = {**os.environ, "BACKEND": backend}
    if is_pretended:
        environment["FAKE_CUDA_REPORT"] = f"{results}.report"
    command = [sys.executable, str(RUNNER), str(results), *names]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    outcomes = {}
    for line in results.read_text().splitlines():
        outcome = json.loads(line)
        outcomes[outcome["case"]] = Outcome(outcome["outcome"], outcome["message"])
    return outcomes


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    return run_cases(SAMPLE, tmp_path_factory.mktemp("cpu") / "results", backend="gloo")


@pytest.fixture(scope="module")
def on_gloo(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    return run_cases([*PASSING, *ENDS], tmp_path_factory.mktemp("gloo") / "results", backend="gloo")


@pytest.fixture(scope="module")
def on_nccl(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    return run_cases(PASSING, tmp_path_factory.mktemp("nccl") / "results", backend="nccl")


@pytest.mark.slow
def test_the_table_names_each_case_of_torch() -> None:
    """A case that appears in torch's suite, or disappears, or changes its name, is reported."""
    listed = subprocess.run([sys.executable, str(RUNNER), "--list"], check=True, capture_output=True, text=True)
    assert sorted([*PASSING, *ENDS]) == sorted(listed.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("case", SAMPLE)
def test_a_case_without_devices_passes(case: str, on_cpu: Mapping[str, Outcome]) -> None:
    """A case that needs no device passes on gloo and the CPU."""
    assert on_cpu[case].kind == "passed", on_cpu[case].message


@pytest.mark.gpu2
@needs_two_devices
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", PASSING)
def test_a_case_passes(case: str, on_gloo: Mapping[str, Outcome]) -> None:
    """A case passes on gloo and two devices."""
    assert on_gloo[case].kind == "passed", on_gloo[case].message


@pytest.mark.gpu2
@needs_two_devices
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", ENDS)
def test_a_case_ends_for_the_reason_of_the_table(case: str, on_gloo: Mapping[str, Outcome]) -> None:
    """A case that does not pass ends with the message of the table; one that begins to pass is reported."""
    end, outcome = ENDS[case], on_gloo[case]
    if end.reason is Reason.PRETENDED_DEVICE and not is_pretended:
        assert outcome.kind == "passed", outcome.message
        return
    expected = "skipped" if end.reason is Reason.SKIPS_ITSELF else "failed"
    assert outcome.kind == expected, outcome.message
    assert end.message in outcome.message


@pytest.mark.gpu2
@needs_two_devices
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", PASSING)
def test_a_case_passes_on_nccl(case: str, on_nccl: Mapping[str, Outcome]) -> None:
    """A case that passes on gloo passes on NCCL, too, unless it is for gloo alone."""
    assert on_nccl[case].kind != "failed", on_nccl[case].message
