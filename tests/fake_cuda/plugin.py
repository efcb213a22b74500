"""The pytest plug-in: fails a test after an unordered access to device memory, in this process or in its workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

__all__ = ["take_reports"]


def take_reports() -> list[str]:
    """Return what this process and its workers have reported since the last call."""
    path = Path(os.environ.get("FAKE_CUDA_REPORT", os.devnull))
    if not path.is_file():  # nothing was reported
        return []
    found = path.read_text().splitlines()
    path.unlink()
    return found


def pytest_configure() -> None:
    """Give each of several processes that run tests at once a file of its own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and "FAKE_CUDA_REPORT" in os.environ:
        os.environ["FAKE_CUDA_REPORT"] += f"-{worker}"


def pytest_report_header() -> str:
    missing = os.environ.get("FAKE_CUDA_UNAVAILABLE")
    return f"CUDA: pretended, {os.environ['FAKE_CUDA']}" if missing is None else f"CUDA: none, {missing}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = os.environ.get("FAKE_CUDA_UNAVAILABLE")
    for each in items:
        if missing is not None and (each.get_closest_marker("gpu") or each.get_closest_marker("gpu2")):
            reason = f"no pretended CUDA: {missing}"  # before the reasons of the test itself
            each.add_marker(pytest.mark.skipif(True, reason=reason), append=False)


@pytest.fixture(autouse=True)
def accesses_are_ordered() -> Iterator[None]:
    """Fail a test after an access to device memory that a real device would not have ordered."""
    take_reports()
    yield
    if found := take_reports():
        pytest.fail("unordered accesses to device memory:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture
def host_waits() -> Callable[[], int]:
    """Return how often the host has waited for a device; in a worker, call `fake_cuda.counters.host_waits`."""
    from fake_cuda import counters

    return counters.host_waits
