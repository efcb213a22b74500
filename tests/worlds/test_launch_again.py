"""A call leaves no state that affects a later or a concurrent call."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from parallelize import distributed

pytestmark = pytest.mark.slow

TASKS = Path("/proc/self/task")
FILES = Path("/proc/self/fd")
CORES = len(os.sched_getaffinity(0))


@distributed(processes=2)
def total(number: int) -> tuple[int, int]:
    value = torch.tensor([number])
    dist.all_reduce(value)
    return int(value.item()), dist.get_world_size()


def test_calls_with_different_numbers_of_processes() -> None:
    """Each call has its own world size."""
    sizes = [2, 3, 1, 4, 2]
    assert [total.options(processes=size)(1) for size in sizes] == [(size, size) for size in sizes]


@distributed(processes=2)
def imported_settings() -> str:
    return str(torch._logging._internal.log_state.log_qname_to_level)


def test_variables_that_torch_reads_at_import_apply_to_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_LOGS that is set after the first call: the fork server, which has imported torch, starts again."""
    before = imported_settings()
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    assert imported_settings() != before
    monkeypatch.delenv("TORCH_LOGS")
    assert imported_settings() == before


@distributed(processes=2)
def server() -> int:
    return psutil.Process(os.getppid()).ppid()


@pytest.mark.skipif(not FILES.is_dir(), reason="open files are seen on Linux only")
def test_no_file_stays_open() -> None:
    """All files are closed after a call and after a failed call, without a garbage collection."""

    @distributed(processes=2, max_restarts=1)
    def fail() -> None:
        raise LookupError("twice")

    total(1)  # the fork server's files stay
    gc.collect()
    gc.disable()
    try:
        before = len(list(FILES.iterdir()))
        total(1)
        with pytest.raises(LookupError):
            fail()
        assert len(list(FILES.iterdir())) == before
    finally:
        gc.enable()


@pytest.mark.skipif(not TASKS.is_dir(), reason="threads of compiled code are seen on Linux only")
@pytest.mark.parametrize("is_failing", [False, True])
def test_no_thread_of_compiled_code_stays(is_failing: bool) -> None:
    """The store's thread ends without a garbage collection: a process forked before one would crash."""

    @distributed(processes=2)
    def call() -> None:
        if is_failing:
            raise LookupError("once")

    gc.collect()
    before = set(TASKS.iterdir())
    gc.disable()
    try:
        with pytest.raises(LookupError) if is_failing else contextlib.nullcontext():
            call()
        assert set(TASKS.iterdir()) <= before
    finally:
        gc.enable()


def test_concurrent_calls_in_two_threads() -> None:
    """Concurrent calls share no port, folder or process group."""
    values: dict[int, list[tuple[int, int]]] = {}
    together = threading.Barrier(2)

    def work(number: int) -> None:
        together.wait()
        values[number] = [total.options(processes=number)(10**number) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(number,)) for number in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == {2: [(200, 2)] * 3, 3: [(3000, 3)] * 3}


@distributed(processes=2)
def look(*names: str) -> tuple[dict[str, str | None], int]:
    return {name: os.environ.get(name) for name in names}, torch.get_num_threads()


def test_the_environment_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables set, changed and removed between calls reach the workers, although the fork server is older."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert look("NEW") == ({"NEW": None}, max(1, CORES // 2))
    before = server()
    monkeypatch.setenv("NEW", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp")  # as torch does with the first optimizer
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert look("NEW", "OMP_NUM_THREADS") == ({"NEW": "1", "OMP_NUM_THREADS": "3"}, 3)
    monkeypatch.delenv("NEW")
    assert look("NEW") == ({"NEW": None}, 3)
    assert server() == before
    assert "RANK" not in os.environ


def test_the_callers_process_group_stays() -> None:
    """A caller that has a process group keeps it during a call."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert total(1) == (2, 2)
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_a_decorated_function_is_decorated_in_a_worker() -> None:
    """Functions pickled by value see each other decorated, with all_ranks, options and explain."""

    @distributed(processes=2, seed=7)
    def inner(number: int) -> int:
        return number + dist.get_rank()

    @distributed(processes=2)
    def outer() -> tuple[int, list[int], str]:
        return inner(10), inner.all_ranks(10), inner.options(processes=2).explain()

    own, everyones, explained = outer()
    assert (own, everyones) == (10, [10, 11])
    assert "rank 0 of 2" in explained
