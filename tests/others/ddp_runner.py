"""Runs torch's cases of DistributedDataParallel with the adapter in its place: python ddp_runner.py RESULTS CASE...

    --list              prints the names of all cases
    --of-torch          leaves torch's own class in its place
    RESULTS             gets a line of JSON for each case: its name, its outcome, and the reason or traceback

The cases are methods of a class in the installed torch, and run unmodified. Each has two fresh processes. They are
forked from this one, which has imported torch and the suite, and has done nothing else: a case takes half a second.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

RANKS = 2
TIMEOUT_S = 1500

# The suite reads these variables when it is imported.
os.environ.setdefault("BACKEND", "gloo")
os.environ["WORLD_SIZE"] = str(RANKS)
os.environ["TEMP_DIR"] = tempfile.gettempdir()
# A case that hangs fails; one on a busy machine does not.
os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(TIMEOUT_S)
# Without this, the question whether there are devices starts the driver, which a forked process cannot use.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch  # noqa: E402  # after the variables
from torch_databases import imported  # noqa: E402  # after the variables

suite = imported("torch.testing._internal.distributed.distributed_test")
SUITE = suite.DistributedTest._DistTestBase
suite.default_pg_timeout = TIMEOUT_S


class Cases(SUITE, suite.TestDistBackend):
    """The cases of torch's suite, in forked processes."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @override
    def _barrier(self, **_: Any) -> None:
        """Wait for the other ranks, for longer than the ten seconds of the suite."""
        suite.Barrier.sync(timeout=TIMEOUT_S)


class Outcomes(unittest.TestResult):
    """Writes the outcome of each case.

    Args:
        path: the file, which gets a line for each case.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @override
    def addSuccess(self, test: unittest.TestCase) -> None:
        unordered = unordered_accesses()
        if unordered:
            self.write(test, "failed", unordered)
        else:
            self.write(test, "passed", "")

    @override
    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.write(test, "skipped", reason)

    @override
    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.write(test, "failed", self._exc_info_to_string(err, test) + unordered_accesses())

    @override
    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.addError(test, err)

    def write(self, test: unittest.TestCase, outcome: str, message: str) -> None:
        line = json.dumps({"case": test._testMethodName, "outcome": outcome, "message": message})
        with self.path.open("a") as file:
            file.write(line + "\n")


def unordered_accesses() -> str:
    """Return what the pretended CUDA has reported of the latest case, as its pytest plug-in does for other tests."""
    report = Path(os.environ.get("FAKE_CUDA_REPORT", os.devnull))
    if not report.is_file():
        return ""
    text = report.read_text()
    report.unlink()
    return f"unordered accesses to device memory:\n{text}"


def cases() -> list[str]:
    """Return the names of the suite's cases that construct DistributedDataParallel, themselves or in a helper."""
    return [name for name in vars(SUITE) if name.startswith("test_") and constructs_ddp(name, set())]


def constructs_ddp(method: str, searched: set[str]) -> bool:
    """Whether a method of the suite, or one that it names, has DistributedDataParallel in its code.

    Args:
        method: name of an attribute of the suite.
        searched: names of methods that were searched before, to which this adds.
    """
    searched.add(method)
    function = vars(SUITE).get(method)
    if not callable(function):
        return False
    names = set(names_in(inspect.unwrap(function).__code__))
    if "DistributedDataParallel" in names:
        return True
    return any(constructs_ddp(name, searched) for name in names - searched)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that a function and those inside it read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def replace_ddp(adapter: Callable[..., Any]) -> None:
    """Put the adapter where the cases find DistributedDataParallel."""
    torch.nn.parallel.DistributedDataParallel = adapter
    suite.DistributedDataParallel = adapter


def main(arguments: list[str]) -> None:
    if arguments == ["--list"]:
        print(*cases(), sep="\n")
        return
    if arguments[0] == "--of-torch":
        arguments.pop(0)
    else:
        from ddp_adapter import DistributedDataParallel

        replace_ddp(DistributedDataParallel)
    results, *names = arguments
    outcomes = Outcomes(Path(results))
    for name in names or cases():
        Cases(name).run(outcomes)


if __name__ == "__main__":
    main(sys.argv[1:])
