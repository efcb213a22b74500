"""loguru's logger, which has a file that cannot be sent, is in the workers that of its import."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallelize.call.pickling import dump, load

pytestmark = pytest.mark.slow

loguru = pytest.importorskip("loguru", reason="loguru is not installed")

PROGRAM = """
import sys
from loguru import logger
from parallelize import distributed, rank
logger.add(sys.argv[1])
@distributed(processes=2)
def train():
    logger.info("rank {} trains", rank())
if __name__ == "__main__":
    train()
    logger.info("after the call")
"""


def test_rank_0_is_shown_and_the_file_stays_the_callers(run_script, tmp_path: Path) -> None:
    """The call is made; its records are on stderr, those of the caller in the caller's file, too."""
    done = run_script(PROGRAM, args=[str(tmp_path / "log")])
    assert "- rank 0 trains" in done.stderr
    assert "rank 1" not in done.stderr
    assert [line.rpartition(" - ")[2] for line in (tmp_path / "log").read_text().splitlines()] == ["after the call"]


def test_a_process_without_that_object_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library's object that the program has made, and no import: it is not replaced by None in silence."""
    number = loguru.logger.add(tmp_path / "log")
    dump(loguru.logger, tmp_path / "file")
    assert load(tmp_path / "file", device=torch.device("cpu")) is loguru.logger
    loguru.logger.remove(number)
    monkeypatch.setattr(loguru, "logger", None)
    with pytest.raises(TypeError, match="loguru:logger is a NoneType in a worker: make the Logger in the function"):
        load(tmp_path / "file", device=torch.device("cpu"))
