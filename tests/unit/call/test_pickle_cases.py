"""What programs have that cloudpickle refuses: objects of one process, weak dictionaries, and what has them inside."""

from __future__ import annotations

import concurrent.futures
import contextvars
import functools
import logging
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from parallelize import distributed
from parallelize.call.pickling import dump, load
from parallelize.errors import ConfigError


def round_trip(obj: object, folder: Path) -> Any:
    dump(obj, folder / "file")
    return load(folder / "file", device=torch.device("cpu"))


def of_script(source: str) -> dict[str, Any]:
    """Return the variables of a script: what it defines is pickled by value."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "script.py", "exec"), variables)
    return variables


CACHED = """
import functools
class Data:
    def __init__(self, size):
        self.size = size
    @functools.cached_property
    def items(self):
        return list(range(self.size))
"""
LOCKED = """
import threading
class Cache:
    lock = threading.Lock()
    def __init__(self):
        self.reentrant = threading.RLock()
    def locks(self):
        with self.lock, self.reentrant:
            return self.lock.locked()
"""
DISPATCHED = """
import functools
@functools.singledispatch
def double(value):
    return value
@double.register
def _(value: list):
    return [double(item) for item in value] * 2
class Doubler:
    @functools.singledispatchmethod
    def double(self, value):
        return value
    @double.register
    def _(self, value: int):
        return 2 * value
"""


def test_classes_of_a_script_with_cached_properties(tmp_path: Path) -> None:
    """Python 3.11 has a lock in functools.cached_property."""
    assert round_trip(of_script(CACHED)["Data"](3), tmp_path).items == [0, 1, 2]


def test_classes_and_objects_of_a_script_with_locks(tmp_path: Path) -> None:
    """The reader gets a lock that is free, whoever holds the caller's."""
    cache = of_script(LOCKED)["Cache"]()
    with cache.lock, cache.reentrant:
        # A class that this process has sent stays as it is here: the copy is one of a worker.
        copied = pickle.loads(pickle_of_worker(cache, tmp_path))
    assert copied is True


def pickle_of_worker(cache: Any, folder: Path) -> bytes:
    """Return what a process that has the pickle alone returns, pickled."""
    dump(cache, folder / "file")
    source = (
        "import pickle, sys\nfrom pathlib import Path\nimport torch\n"
        "from parallelize.call.pickling import load\n"
        f"cache = load(Path({str(folder / 'file')!r}), device=torch.device('cpu'))\n"
        "sys.stdout.buffer.write(pickle.dumps(cache.locks()))"
    )
    return subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, timeout=300).stdout


def test_functions_of_a_script_with_singledispatch(tmp_path: Path) -> None:
    """Their cache is a weak dictionary."""
    variables = of_script(DISPATCHED)
    double, doubler = round_trip((variables["double"], variables["Doubler"]()), tmp_path)
    assert double([1]) == [1, 1]
    assert (doubler.double(2), doubler.double("a")) == (4, "a")


def test_a_lock_of_two_objects_is_one(tmp_path: Path) -> None:
    """Also inside a Condition; an Event, a Semaphore and a Barrier keep what they have counted."""
    lock, event = threading.Lock(), threading.Event()
    event.set()
    semaphore = threading.Semaphore(3)
    first, second, condition, event, semaphore, barrier = round_trip(
        (lock, lock, threading.Condition(lock), event, semaphore, threading.Barrier(2)), tmp_path
    )
    assert first is second
    with condition:
        assert first.locked()
    assert event.is_set()
    assert [semaphore.acquire(blocking=False) for _ in range(4)] == [True, True, True, False]
    assert barrier.parties == 2


LOCK, LOCAL, CURRENT = threading.Lock(), threading.local(), contextvars.ContextVar("CURRENT", default=1)


def test_a_variable_of_a_module_is_that_of_the_reader(tmp_path: Path) -> None:
    """A script that has imported it shares it with the module in each process."""
    for variable in (LOCK, LOCAL, CURRENT):
        assert round_trip(variable, tmp_path) is variable


def test_variables_of_a_context_or_thread_keep_their_values(tmp_path: Path) -> None:
    """A ContextVar has its default and its value, and a thread-local the attributes of the calling thread."""
    plain: contextvars.ContextVar[int] = contextvars.ContextVar("plain")
    with pytest.raises(LookupError):
        round_trip(plain, tmp_path).get()
    by_default = contextvars.ContextVar("by_default", default=3)
    assert round_trip(by_default, tmp_path).get() == 3
    by_default.set(4)
    loaded = round_trip(by_default, tmp_path)
    assert (loaded.name, loaded.get(), contextvars.Context().run(loaded.get)) == ("by_default", 4, 3)
    local = threading.local()
    local.depth = 5
    assert vars(round_trip(local, tmp_path)) == {"depth": 5}


class Key:
    pass


def test_weak_dictionaries_keep_what_is_sent_with_them(tmp_path: Path) -> None:
    """What nothing else has is gone in the reader, as in the caller."""
    key, value = Key(), Key()
    by_key = weakref.WeakKeyDictionary({key: 1})
    values = weakref.WeakValueDictionary({"kept": value})
    keys, new_key, kept, new_value = round_trip((by_key, key, values, value), tmp_path)
    assert dict(keys) == {new_key: 1}
    assert dict(kept) == {"kept": new_value}
    assert dict(round_trip(values, tmp_path)) == {}


class Monitor(threading.Thread):
    pass


@pytest.mark.parametrize(
    "holder",
    [threading.Thread(), Monitor(), logging.StreamHandler(), queue.Queue(), concurrent.futures.Future()],
    ids=lambda holder: type(holder).__name__,
)
def test_objects_that_threads_share_are_refused(holder: object, tmp_path: Path) -> None:
    """A copy would look alive, and nothing would come out of it."""
    with pytest.raises(ConfigError, match=f"cannot pickle '{type(holder).__name__}' object: its lock"):
        dump(holder, tmp_path / "file")


@distributed(processes=1)
@functools.lru_cache
def cached(number: int) -> int:
    return number


def test_a_decorated_function_is_pickled_by_its_name(tmp_path: Path) -> None:
    """By pickle as a plain function; by a call, too, if a worker can import its module."""
    assert pickle.loads(pickle.dumps(cached)) is cached
    assert round_trip(cached, tmp_path) is cached
    assert cloudpickle.loads(cloudpickle.dumps(cached)) is cached


def test_a_decorated_function_of_a_script_is_sent_with_its_options(tmp_path: Path) -> None:
    """A worker has another __main__."""
    variables = of_script("def function():\n    return 7")
    loaded = round_trip(distributed(processes=3)(variables["function"]), tmp_path)
    assert "3 processes" in loaded.explain()
    assert loaded.__wrapped__() == 7
