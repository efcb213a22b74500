"""examples/17_logging.py: rank 0 writes values of all ranks to TensorBoard, and every rank saves the best weights."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import parallelize

pytestmark = pytest.mark.slow

pytest.importorskip("tensorboard", reason="tensorboard is not installed")
EXAMPLE = Path(__file__).parents[2] / "examples" / "17_logging.py"


def test_what_is_logged_and_saved_is_what_one_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file of events, the caller's log lines, and saved weights whose accuracy is the one that was logged."""
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):
        monkeypatch.setenv(name, "")  # scikit-learn sets them
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    best = float(done.stdout.rpartition(" ")[2])
    assert len(re.findall(r"^[\d-]+ [\d:,]+ digits: epoch \d", done.stderr, re.MULTILINE)) == 10
    assert "Warning" not in done.stderr
    (file,) = tmp_path.glob("events*")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of protobuf and NumPy, in tensorboard's own files
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(file)).Reload()
        data = runpy.run_path(str(EXAMPLE), run_name="imported")["load_digits"]()
    logged = [event.value for event in events.Scalars("accuracy")]
    assert len(logged) == len(events.Scalars("loss")) == 10
    assert max(logged) == pytest.approx(best, abs=1e-3)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    parallelize.load(tmp_path / "best.safetensors", model=model)
    images, labels = torch.tensor(data.data, dtype=torch.float32)[:357] / 16, torch.tensor(data.target)[:357]
    assert (model(images).argmax(dim=1) == labels).float().mean().item() == pytest.approx(max(logged))
