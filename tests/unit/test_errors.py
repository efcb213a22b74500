"""Messages of exceptions, and their pickling."""

from __future__ import annotations

import copy
import pickle

import pytest

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

KINDS = [ConfigError, LaunchError, MissingDependencyError, ParallelizeError, SyncError, WorkerError]


@pytest.mark.parametrize("kind", KINDS)
def test_message_has_what_why_and_fix(kind):
    """A message has three parts: what, why and fix."""
    assert str(kind("gpus=9", why="there are 4", fix="use gpus=4")) == "gpus=9\n  why: there are 4\n  fix: use gpus=4"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (LaunchError, RuntimeError),
        (MissingDependencyError, ImportError),
        (SyncError, RuntimeError),
        (WorkerError, RuntimeError),
    ],
)
def test_base_classes(kind, builtin):
    """Each exception derives from a builtin one and from ParallelizeError."""
    assert issubclass(kind, builtin)
    assert issubclass(kind, ParallelizeError)


def test_lists_every_fault():
    """An error of several faults counts and numbers them, and holds them in `faults`."""
    faults = [Fault("a=1", "no a", "drop a"), Fault("b=2", "no b", "drop b")]
    error = ConfigError.of(faults)
    assert error.faults == tuple(faults)
    assert str(error) == (
        "2 faults in this request\n1. a=1\n  why: no a\n  fix: drop a\n2. b=2\n  why: no b\n  fix: drop b"
    )


def test_one_fault_is_not_numbered():
    """The message of a single fault has no number."""
    assert str(ConfigError.of([Fault("a=1", "no a", "drop a")])) == str(ConfigError("a=1", why="no a", fix="drop a"))


class PartialError(WorkerError):
    """A user's subclass with another constructor."""

    def __init__(self, shard: int) -> None:
        super().__init__(f"shard {shard}", why="lost", fix="again")
        self.shard = shard


def copies(error):
    """Return the error after pickling, copy and deepcopy."""
    return [pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)]


@pytest.mark.parametrize("kind", KINDS)
def test_pickles(kind):
    """Pickling keeps type, message, faults and notes."""
    error = kind("what", why="why", fix="fix", is_secondary=True)
    error.__notes__ = ["rank 1 on n2"]
    for other in copies(error):
        assert type(other) is kind
        assert str(other) == str(error)
        assert other.faults == error.faults
        assert other.__notes__ == ["rank 1 on n2"]
        assert other.is_secondary


def test_several_faults_pickle():
    """Pickling keeps the message and faults of an error of several faults."""
    error = ConfigError.of([Fault("a", "b", "c"), Fault("d", "e", "f")])
    for other in copies(error):
        assert (str(other), other.faults) == (str(error), error.faults)


def test_attributes_pickle():
    """Pickling keeps the attributes of a subclass with another constructor."""
    error = PartialError(3)
    error.rank, error.host, error.exitcode, error.signal_name = 5, "n2", -9, "SIGKILL"
    for other in copies(error):
        assert (other.shard, other.rank, other.host, other.exitcode, other.signal_name) == (3, 5, "n2", -9, "SIGKILL")
        assert str(other) == str(error)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dpp", "did you mean 'ddp'? known: 'ddp', 'fsdp'"),
        ("DDP", "did you mean 'ddp'? known: 'ddp', 'fsdp'"),
        ("horovod", "known: 'ddp', 'fsdp'"),
    ],
)
def test_did_you_mean(name, hint):
    """A close match is suggested regardless of case, and all names are listed in order."""
    assert did_you_mean(name, ["fsdp", "ddp"]) == hint


def test_a_name_of_the_same_length_is_preferred():
    """A typo more often exchanges letters than it adds one; the longer list is that of the backends."""
    assert did_you_mean("dpp", ["dp", "ddp", "ddp2", "fsdp"]).startswith("did you mean 'ddp'? ")


def test_did_you_mean_without_names():
    """Without known names, the hint is "known: none"."""
    assert did_you_mean("x", []) == "known: none"


@pytest.mark.parametrize(
    ("ranks", "text"), [({3}, "rank 3"), ([7, 2, 1, 3], "ranks 1-3, 7"), (range(1000), "ranks 0-999")]
)
def test_ranks_are_listed_as_ranges(ranks, text):
    """Consecutive ranks are one range, in any order of the ranks."""
    assert list_ranks(ranks) == text
