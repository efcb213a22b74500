"""Deadlocked ranks: within seconds the caller gets an error that says which rank waits where for which."""

from __future__ import annotations

import ctypes
import inspect
import io
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import TORCHRUN
from torch import nn
from tqdm import tqdm

from parallelize import SyncError, all_reduce, barrier, distributed, load, parallel_model, save

pytestmark = pytest.mark.slow


def other_operation(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(4))  # rank 0
    else:
        dist.broadcast(torch.ones(4), src=0)  # rank 1


def other_groups(rank: int) -> None:
    bar = tqdm(range(3), file=io.StringIO())  # its monitor is a thread
    next(iter(bar))
    pair, both = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=pair)  # rank 0
        dist.all_reduce(torch.ones(4), group=both)
    else:
        dist.all_reduce(torch.ones(4), group=both)  # rank 1
        dist.all_reduce(torch.ones(4), group=pair)


def returns_early(rank: int) -> None:
    if rank == 0:
        return
    dist.all_reduce(torch.ones(4))  # rank 1


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 4)).sum()


def one_step_more(rank: int) -> None:
    with parallel_model(nn.Linear(4, 4)) as model:
        for _ in range(3 + rank):
            loss(model).backward()  # rank 1


def trains_alone(rank: int) -> None:
    with parallel_model(nn.Linear(4, 4)) as model:
        if rank == 0:
            loss(model).backward()  # rank 0
        all_reduce(torch.ones(1), "mean")  # rank 1


def unfreezes_alone(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    with parallel_model(model):
        loss(model).backward()
        if rank == 0:
            model[0].requires_grad_(True)
        loss(model).backward()


def path() -> Path:
    """Return a path in the folder of these tests."""
    return Path(tempfile.gettempdir(), "hangs.pt")


def saves_shards_alone(rank: int) -> None:
    with parallel_model(nn.Linear(4, 4), backend="fsdp") as model:
        if rank == 0:
            save(path(), model=model)  # rank 0
        barrier("saved")  # rank 1


def saves_the_best_of_a_rank(rank: int) -> None:
    with parallel_model(nn.Linear(4, 4)) as model:
        for _ in range(2):
            loss(model).backward()  # rank 0
            if rank == 1:
                save(path(), model=model)  # rank 1


def loads_alone(rank: int) -> None:
    with parallel_model(nn.Linear(4, 4)) as model:
        save(path(), model=model)
        if rank == 0:
            load(path(), model=model)  # rank 0
        barrier("loaded")  # rank 1


# Deadlocking function -> pattern of its error, which also names the marked lines.
DEADLOCKS: dict[Callable[[int], None], str] = {
    other_operation: r"all_reduce of float32\[4\].*broadcast of float32\[4\]",
    other_groups: r"rank 0 waits .* for rank 1; rank 1 waits .* for rank 0",
    returns_early: r"rank 1 waits .* in all_reduce of float32\[4\] for rank 0, which has returned",
    one_step_more: r"rank 0 has left the loop .* end of the block .*; "
    r"rank 1 .* in backward \(all_reduce of float32\[22\]\)",
    trains_alone: r"rank 0 .* in backward \(all_reduce of float32\[22\]\) for .*; rank 1 .* in all_reduce\(op='mean'\)",
    unfreezes_alone: r"data of another size|in backward.*different shapes",
    saves_shards_alone: r"rank 0 waits at .* in save\(.*\) for rank 1; rank 1 waits at .* in barrier\('saved'\)",
    saves_the_best_of_a_rank: r"rank 0 waits at .* in backward .*; rank 1 waits at .* in save\(.*\)",
    loads_alone: r"rank 0 waits at .* in load\(.*\) for rank 1; rank 1 waits at .* in barrier\('loaded'\)",
}


@distributed(processes=2)
def run(deadlock: Callable[[int], None]) -> None:
    dist.all_reduce(torch.ones(1))
    deadlock(dist.get_rank())


def marked_lines(function: Callable[..., None]) -> list[str]:
    """Return the lines of a function that are marked with a rank."""
    lines, first = inspect.getsourcelines(function)
    return [f"{Path(__file__).name}:{first + n}" for n, line in enumerate(lines) if re.search(r"# rank \d$", line)]


@pytest.mark.parametrize("deadlock", DEADLOCKS, ids=lambda deadlock: deadlock.__name__)
def test_a_deadlock_is_an_error_with_the_line_of_each_rank(deadlock: Callable[[int], None]) -> None:
    """Each kind of deadlock ends, long before the timeout, in a SyncError that names the lines of both ranks."""
    with pytest.raises(SyncError) as caught:
        run(deadlock)
    text = str(caught.value)
    assert re.search(DEADLOCKS[deadlock], text), text
    assert all(line in text for line in marked_lines(deadlock)), text


def sleeps() -> None:
    time.sleep(6)  # rank 0


def computes() -> None:
    end = time.monotonic() + 6
    while time.monotonic() < end:
        torch.ones(20_000_000).sort()


@distributed(processes=4)
def wait_for_busy_ranks() -> list[float]:
    """Keep ranks 0 to 2 busy in different ways while rank 3 waits for them."""
    rank, group = dist.get_rank(), dist.new_group([2, 3])
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True) if rank == 2 else None
    if rank < 3:
        [sleeps, computes, sleeps][rank]()
    total = torch.ones(4)
    dist.all_reduce(total)
    if rank == 3:
        dist.all_reduce(torch.ones(4), group=group)
    if work is not None:
        work.wait()
    return total.tolist()


def test_a_busy_rank_is_waited_for() -> None:
    """Ranks that sleep, compute or have another collective pending come late, and no rank is ended before."""
    assert wait_for_busy_ranks() == [4.0] * 4


@distributed(processes=3)
def receive_before_the_collectives_end() -> list[float]:
    """Receive a message of rank 2, which is slow, while collectives of ranks 0 and 1 are pending."""
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]), dist.new_group([0, 1])]
    message, total = torch.zeros(2), torch.ones(2)
    if rank == 2:
        sleeps()
        dist.send(total, 0)
        dist.send(total, 1)
        return total.tolist()
    first, second = groups if rank == 0 else groups[::-1]
    works = [dist.all_reduce(total, group=first, async_op=True)]
    dist.recv(message, 2)
    works.append(dist.all_reduce(message, group=second, async_op=True))
    for work in works:
        work.wait()
    return message.tolist()


def test_a_message_of_a_slow_rank_is_waited_for() -> None:
    """The collectives that are pending do not hold the ranks that receive it."""
    assert receive_before_the_collectives_end() == [2.0, 2.0]


@distributed(processes=2, timeout=8)
def come_late() -> None:
    if dist.get_rank() == 1:
        barrier("data is there")  # rank 1
    time.sleep(60)  # rank 0


def test_the_error_of_a_timeout_says_where_all_ranks_were() -> None:
    """Before torch's own, which names no rank, it has the line of the waiting rank and that of the other one."""
    with pytest.raises(SyncError) as caught:
        come_late()
    text = str(caught.value)
    waiting, busy = marked_lines(come_late.__wrapped__)
    assert f"rank 1 waits at {waiting} in barrier('data is there')" in text
    assert f"for rank 0, which is at {busy}" in text
    assert "timeout=8 s is over" in text
    assert caught.value.__notes__[-1] == "the others: rank 0: stopped"


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(60)


def wait_for_silent_rank(silent: int, fall_silent: Callable[[], None]) -> None:
    if dist.get_rank() == silent:
        fall_silent()
    dist.all_reduce(torch.ones(4))


SILENT: list[tuple[Callable[[], None], int, int, str]] = [
    (stop_itself, 1, 15, r"which is stopped by a signal \(process \d+ on .*\)"),
    (stop_itself, 0, 5, r"which is stopped by a signal \(process \d+ on .*\)"),
    (
        hold_the_gil,
        1,
        9,
        r"which does not answer \(process \d+ on .* is stopped, or in compiled code that holds the GIL\)",
    ),
    (hold_the_gil, 0, 2, "which has not answered"),
]


@pytest.mark.parametrize(("fall_silent", "silent", "timeout", "reason"), SILENT)
def test_a_rank_that_cannot_answer_is_named_with_its_last_line(
    fall_silent: Callable[[], None], silent: int, timeout: int, reason: str
) -> None:
    """Whatever timeout= is, and whichever rank it is: its watchdog has published the line before."""
    with pytest.raises(SyncError) as caught:
        distributed(processes=2, timeout=timeout)(wait_for_silent_rank)(silent, fall_silent)
    text = str(caught.value)
    file = Path(__file__).name
    assert re.search(rf"rank {1 - silent} waits at {file}:\d+ in all_reduce of float32\[4\] for rank {silent}", text)
    assert re.search(rf"{reason}, last seen at {file}:\d+ in ", text), text


def test_the_last_line_of_a_rank_under_torchrun(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """There is no folder of a call, so that the store has it."""
    ran = run_script(
        """
        import os, signal, torch, torch.distributed as dist
        from parallelize import distributed

        @distributed(timeout=6)
        def train():
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(torch.ones(4))

        train()
        """,
        launcher=TORCHRUN,
        check=False,
    )
    assert re.search(
        r"for rank 1, which is stopped by a signal \(.*\), last seen at script.py:\d+ in train", ran.stderr
    )


@distributed(processes=2, timeout=1234)
def timeout_of_a_group() -> list[float]:
    groups = [dist.new_group([0, 1]), dist.group.WORLD]
    return [each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups]


def test_groups_of_the_user_have_the_timeout_of_the_run() -> None:
    """torch gives them its own default."""
    assert timeout_of_a_group() == [1234.0, 1234.0]


def test_a_deadlock_under_torchrun_ends_the_program(
    run_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """The error is printed, and the program ends as by an uncaught exception."""
    ran = run_script(
        """
        import torch, torch.distributed as dist
        from parallelize import distributed

        @distributed()
        def train():
            if dist.get_rank() == 1:
                dist.all_reduce(torch.ones(4))

        train()
        """,
        launcher=TORCHRUN,
        check=False,
    )
    assert ran.returncode == 1
    assert "SyncError: ranks are in different collectives: rank 0 waits at script.py:10 in the return" in ran.stderr
    assert "rank 1 waits at script.py:8 in all_reduce of float32[4]" in ran.stderr


def test_a_rank_that_left_the_run_may_still_use_the_users_process_group(
    run_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """A process group that the user has initialized outlives the run, so a wait for that rank is no deadlock."""
    ran = run_script(
        """
        import time, torch, torch.distributed as dist
        from parallelize.run import context

        dist.init_process_group("gloo")
        with context.activate(context.current()):
            if dist.get_rank() == 1:
                dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 0:
            time.sleep(6)
            dist.all_reduce(torch.ones(4))
        print("met")
        dist.destroy_process_group()
        """,
        launcher=TORCHRUN,
    )
    assert ran.stdout.count("met") == 2
