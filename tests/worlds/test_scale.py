"""benchmarks/scale runs on simulated nodes, and the requests per rank and per node do not grow with their number."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from report import tables_of  # noqa: E402 - benchmarks/ is not a package

pytestmark = pytest.mark.slow


@pytest.mark.timeout(150)
def test_requests_per_rank_are_bounded() -> None:
    """A rank asks twice a second, and a few times more until the missing rank is found."""
    arguments = ["--counts", "4", "--seconds", "1", "--processes", "2"]
    command = [sys.executable, str(BENCHMARKS / "scale/main.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=True)
    table, descriptors = tables_of(done.stdout)
    assert [row[:2] for row in table.rows] == [["4", "32"]]
    assert 0 < int(descriptors.rows[0][1]) <= 40
    for row in table.rows:
        ranks = int(row[1])
        counts = {name: float(cell) for name, cell in zip(table.columns, row, strict=True) if "requests" in name}
        assert 0 < counts["training: requests/s"] <= 2.5 * ranks
        assert 0 < counts["until found: requests per rank"] <= 25
        assert 0 < counts["waiting: requests/s"] <= 8 * ranks  # also the judge's, which do not depend on the ranks
