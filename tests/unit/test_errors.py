"""What an exception says, and what is left of it after a trip to another process."""

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
)

KINDS = [ConfigError, LaunchError, MissingDependencyError, ParallelizeError, SyncError, WorkerError]


@pytest.mark.parametrize("kind", KINDS)
def test_says_what_why_and_fix(kind):
    """A message has its three parts, in this order."""
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
def test_is_what_python_calls_it(kind, builtin):
    """Code that knows only the builtin exceptions catches ours, and so does code that knows only our base."""
    assert issubclass(kind, builtin)
    assert issubclass(kind, ParallelizeError)


def test_lists_every_fault():
    """An error of several faults says how many, numbers them and keeps them."""
    faults = [Fault("a=1", "no a", "drop a"), Fault("b=2", "no b", "drop b")]
    error = ConfigError.of(faults)
    assert error.faults == tuple(faults)
    assert str(error) == (
        "2 faults in this request\n1. a=1\n  why: no a\n  fix: drop a\n2. b=2\n  why: no b\n  fix: drop b"
    )


def test_one_fault_is_not_counted():
    """An error of one fault reads like one that was raised for it."""
    assert str(ConfigError.of([Fault("a=1", "no a", "drop a")])) == str(ConfigError("a=1", why="no a", fix="drop a"))


class PartialError(WorkerError):
    """A user's own exception on top of ours, with a constructor of its own."""

    def __init__(self, shard: int) -> None:
        super().__init__(f"shard {shard}", why="lost", fix="again")
        self.shard = shard


def travelled(error):
    """The exception as another process gets it, and as a copy."""
    return [pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)]


@pytest.mark.parametrize("kind", KINDS)
def test_travels_whole(kind):
    """Pickling keeps type, message, faults and notes."""
    error = kind("what", why="why", fix="fix", is_echo=True)
    error.__notes__ = ["rank 1 on n2"]
    for other in travelled(error):
        assert type(other) is kind
        assert str(other) == str(error)
        assert other.faults == error.faults
        assert other.__notes__ == ["rank 1 on n2"]
        assert other.is_echo


def test_several_faults_travel():
    """Pickling keeps an error of several faults as it reads."""
    error = ConfigError.of([Fault("a", "b", "c"), Fault("d", "e", "f")])
    for other in travelled(error):
        assert (str(other), other.faults) == (str(error), error.faults)


def test_attributes_travel():
    """Pickling keeps what a subclass adds, whatever its constructor takes."""
    error = PartialError(3)
    error.rank, error.host, error.exitcode, error.signal_name = 5, "n2", -9, "SIGKILL"
    for other in travelled(error):
        assert (other.shard, other.rank, other.host, other.exitcode, other.signal_name) == (3, 5, "n2", -9, "SIGKILL")
        assert str(other) == str(error)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dpp", "did you mean 'ddp'? known: 'ddp', 'fsdp'"),
        ("DDP", "did you mean 'ddp'? known: 'ddp', 'fsdp'"),
        ("horovod", "known: 'ddp', 'fsdp'"),
    ],
)
def test_did_you_mean(name, said):
    """A near name is offered, in whatever case; all are listed, sorted."""
    assert did_you_mean(name, ["fsdp", "ddp"]) == said


def test_did_you_mean_of_nothing():
    """Where nothing is known, that is said."""
    assert did_you_mean("x", []) == "known: none"


def test_did_you_mean_with_a_prefix():
    """What all names start with makes no two of them alike."""
    assert did_you_mean("gpu", ["gpus", "seed"], prefix="X_") == "did you mean 'X_gpus'? known: 'X_gpus', 'X_seed'"
    assert did_you_mean("logs", ["gpus", "seed"], prefix="X_") == "known: 'X_gpus', 'X_seed'"
