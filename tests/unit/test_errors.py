"""Messages of exceptions, and their pickling."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

import parallelize
from parallelize.errors import (
    ConfigError,
    Fault,
    LaunchError,
    MissingDependencyError,
    ParallelizeError,
    SyncError,
    WorkerError,
    did_you_mean,
    list_ranks,
)

BUILTINS = {
    ConfigError: ValueError,
    LaunchError: RuntimeError,
    MissingDependencyError: ImportError,
    ParallelizeError: Exception,
    SyncError: RuntimeError,
    WorkerError: RuntimeError,
}


@pytest.mark.parametrize("kind", BUILTINS)
def test_message_has_what_why_and_fix(kind):
    """A message has three parts, and each exception derives from a builtin one and from ParallelizeError."""
    error = kind("gpus=9", why="there are 4", fix="use gpus=4")
    assert str(error) == "gpus=9\n  why: there are 4\n  fix: use gpus=4"
    assert isinstance(error, BUILTINS[kind])
    assert isinstance(error, ParallelizeError)


def test_lists_every_fault():
    """An error of several faults counts and numbers them, and holds them in `faults`; a single one has no number."""
    faults = [Fault("a=1", "no a", "drop a"), Fault("b=2", "no b", "drop b")]
    error = ConfigError.of(faults)
    assert error.faults == tuple(faults)
    assert str(error) == (
        "2 faults in this request\n1. a=1\n  why: no a\n  fix: drop a\n2. b=2\n  why: no b\n  fix: drop b"
    )
    assert str(ConfigError.of(faults[:1])) == str(ConfigError("a=1", why="no a", fix="drop a"))


class PartialError(WorkerError):
    """A user's subclass with another constructor."""

    def __init__(self, shard: int) -> None:
        super().__init__(f"shard {shard}", why="lost", fix="again")
        self.shard = shard


def errors_to_copy():
    """Return an error of each kind, one of several faults, and one of a subclass with another constructor."""
    several, partial = ConfigError.of([Fault("a", "b", "c"), Fault("d", "e", "f")]), PartialError(3)
    partial.rank, partial.host, partial.exitcode, partial.signal_name = 5, "n2", -9, "SIGKILL"
    return [*(kind("what", why="why", fix="fix", is_secondary=True) for kind in BUILTINS), several, partial]


@pytest.mark.parametrize("error", errors_to_copy(), ids=lambda error: type(error).__name__)
def test_copies_and_pickles_are_equal(error):
    """Type, message, faults, notes and attributes are kept."""
    error.__notes__ = ["rank 1 on n2"]
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert (str(other), vars(other)) == (str(error), vars(error))
        assert (other.faults, other.__notes__) == (error.faults, ["rank 1 on n2"])


@pytest.mark.parametrize(
    ("name", "names", "hint"),
    [
        ("dpp", ["fsdp", "ddp"], "did you mean 'ddp'? known: 'ddp', 'fsdp'"),
        ("DDP", ["fsdp", "ddp"], "did you mean 'ddp'? known: 'ddp', 'fsdp'"),
        ("horovod", ["fsdp", "ddp"], "known: 'ddp', 'fsdp'"),
        # A typo more often exchanges letters than it adds one.
        ("dpp", ["dp", "ddp", "ddp2", "fsdp"], "did you mean 'ddp'? known: 'ddp', 'ddp2', 'dp', 'fsdp'"),
        ("x", [], "known: none"),
    ],
)
def test_did_you_mean(name, names, hint):
    """A close match is suggested regardless of case, and all names are listed in order."""
    assert did_you_mean(name, names) == hint


@pytest.mark.parametrize(
    ("ranks", "text"), [({3}, "rank 3"), ([7, 2, 1, 3], "ranks 1-3, 7"), (range(1000), "ranks 0-999")]
)
def test_ranks_are_listed_as_ranges(ranks, text):
    """Consecutive ranks are one range, in any order of the ranks."""
    assert list_ranks(ranks) == text


def test_classes_that_a_text_says_to_write_can_be_imported() -> None:
    """As `launcher=LocalLauncher(...)`, by the name of the package."""
    sources = [path.read_text() for path in Path(parallelize.__file__).parent.rglob("*.py")]
    written = {
        name for text in sources for name in re.findall(r"(?:launcher|backend)=(\w+)\(|\b(Local\w+)\(\w*=", text)
    }
    names = {name for pair in written for name in pair if name[:1].isupper()}
    assert "LocalLauncher" in names
    assert names <= set(parallelize.__all__)
