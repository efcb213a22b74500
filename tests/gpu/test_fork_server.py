"""Packages that use a GPU when they are imported: the fork server imports them before it forks workers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="a package of this name is installed there"),
]

Run = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """
import os
import sys
import timm
import torch
from parallelize import device, distributed

@distributed(gpus=2)
def train():
    loaded = "timm" in sys.modules
    import timm
    return torch.ones(2, device=device()).sum().item(), loaded, os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")

print(train.all_ranks())
print(train.all_ranks())
"""


def script_with(package: str, folder: Path, run_script: Run) -> list[str]:
    """Run the script beside a package of one file, by the name of one that the fork server imports."""
    (folder / "timm.py").write_text(f"import torch\n{package}")
    return run_script(SCRIPT, env={"PYTHONDONTWRITEBYTECODE": "1"}, timeout_s=100).stdout.splitlines()


def test_a_package_that_initializes_cuda_is_left_to_the_workers(tmp_path: Path, run_script: Run) -> None:
    """A process that is forked after that can use no GPU."""
    shown = script_with("torch.cuda.init()\n", tmp_path, run_script)
    assert shown == ["[(2.0, False, None), (2.0, False, None)]"] * 2


def test_a_package_may_ask_for_gpus(tmp_path: Path, run_script: Run) -> None:
    """The fork server asks NVML, and imports it; a worker's own questions are answered as always."""
    shown = script_with("IS_AVAILABLE = torch.cuda.is_available()\n", tmp_path, run_script)
    assert shown == ["[(2.0, True, None), (2.0, True, None)]"] * 2
