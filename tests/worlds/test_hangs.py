"""Ranks that wait for each other for ever: the caller hears within seconds who waits where, and what the other does."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallelize import SyncError, all_reduce, barrier, distributed, main_first, parallel_model, save

# The whole call, on a machine that does other things, too.
WITHIN_S = 10.0


@distributed(processes=2)
def nothing() -> None:
    """Start the fork server, which the first call of a program waits for."""


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """Let each test measure a call, and no import of torch."""
    nothing()


def other_operation(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(4))  # rank 0
    else:
        dist.broadcast(torch.ones(4), src=0)  # rank 1


def other_shape(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(4))  # rank 0
    else:
        dist.all_reduce(torch.ones(5))  # rank 1


def other_root(rank: int) -> None:
    if rank == 0:
        dist.broadcast(torch.ones(4), src=1)  # rank 0
    else:
        dist.broadcast(torch.ones(4), src=0)  # rank 1


def other_order(rank: int) -> None:
    if rank == 0:
        dist.barrier()  # rank 0
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))  # rank 1
        dist.barrier()


def other_groups(rank: int) -> None:
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


def skips_a_batch(rank: int) -> None:
    with parallel_model(nn.Linear(4, 4)) as model:
        for step in range(3):
            if rank == 0 and step == 1:
                continue
            loss(model).backward()  # rank 1


def trains_alone(rank: int) -> None:
    with parallel_model(nn.Linear(4, 4)) as model:
        if rank == 0:
            loss(model).backward()  # rank 0
        all_reduce(torch.ones(1))  # rank 1


def unfreezes_alone(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    with parallel_model(model):
        loss(model).backward()
        if rank == 0:
            model[0].requires_grad_(True)
        loss(model).backward()


def other_barriers(rank: int) -> None:
    if rank == 0:
        barrier("data is there")  # rank 0
    else:
        barrier("epoch")  # rank 1


def barrier_alone(rank: int) -> None:
    if rank == 0:
        barrier("data is there")  # rank 0
    else:
        dist.broadcast(torch.ones(4), src=0)  # rank 1


def other_dtype(rank: int) -> None:
    if rank == 0:
        all_reduce(torch.ones(4))  # rank 0
    else:
        all_reduce(torch.ones(4, dtype=torch.float64))  # rank 1


def first_alone(rank: int) -> None:
    if rank == 0:
        with main_first():  # rank 0
            pass
    else:
        dist.barrier()  # rank 1


# What goes wrong -> what the error says of it, besides the places.
WRONG: dict[Callable[[int], None], str] = {
    other_operation: r"all_reduce of float32\[4\].*broadcast of float32\[4\]",
    other_shape: r"different shapes",
    other_root: r"\(root 1\).*\(root 0\)",
    other_order: r"in barrier.*in all_reduce",
    other_groups: r"rank 0 waits .* for rank 1; rank 1 waits .* for rank 0",
    returns_early: r"rank 1 waits .* in all_reduce of float32\[4\] for rank 0, which has returned",
    one_step_more: r"rank 1 waits .* in backward \(all_reduce of float32\[20\]\) for rank 0, which has returned",
    skips_a_batch: r"rank 1 waits .* in backward \(all_reduce of float32\[20\]\) for rank 0, which has returned",
    trains_alone: r"rank 0 .* in backward \(all_reduce of float32\[20\]\); rank 1 .* in all_reduce\(op='mean'\)",
    unfreezes_alone: r"rank 0 waits .* in forward.*rank 1 waits .* in forward",
    other_barriers: r"barrier\('data is there'\).*barrier\('epoch'\)",
    barrier_alone: r"barrier\('data is there'\).*broadcast",
    other_dtype: r"float32\[4\].*float64\[4\]",
    first_alone: r"main_first.*barrier",
}


@distributed(processes=2)
def do(wrong: Callable[[int], None]) -> None:
    dist.all_reduce(torch.ones(1))
    wrong(dist.get_rank())


def places(wrong: Callable[[int], None]) -> list[str]:
    """The lines of a function that are marked with a rank."""
    lines, first = inspect.getsourcelines(wrong)
    return [f"{Path(__file__).name}:{first + n}" for n, line in enumerate(lines) if re.search(r"# rank \d$", line)]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_ranks_that_disagree_are_told_where_each_is(wrong: Callable[[int], None]) -> None:
    """Each way of getting it wrong is a SyncError, soon, which names the places of both ranks."""
    started = time.monotonic()
    with pytest.raises(SyncError) as caught:
        do(wrong)
    assert time.monotonic() - started < WITHIN_S
    said = str(caught.value)
    assert re.search(WRONG[wrong], said), said
    assert all(place in said for place in places(wrong)), said


def sleeps() -> None:
    time.sleep(6)  # rank 0


def computes() -> None:
    end = time.monotonic() + 6
    while time.monotonic() < end:
        torch.ones(20_000_000).sort()


@distributed(processes=4)
def wait_for_busy_ranks() -> list[float]:
    """Ranks 0 to 2 are busy in different ways, rank 3 waits for them."""
    rank, group = dist.get_rank(), dist.new_group([2, 3])
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True) if rank == 2 else None
    if rank < 3:
        [sleeps, computes, sleeps][rank]()
    mine = torch.ones(4)
    dist.all_reduce(mine)
    if rank == 3:
        dist.all_reduce(torch.ones(4), group=group)
    if work is not None:
        work.wait()
    return mine.tolist()


def test_a_rank_that_is_busy_is_waited_for() -> None:
    """Ranks that sleep, compute or have another collective under way come late, and nobody is ended before."""
    assert wait_for_busy_ranks() == [4.0] * 4


@distributed(processes=2)
def meet_in_threads() -> bool:
    """Each rank waits in a group into which a thread of the other comes later."""
    own, other = (dist.new_group([0, 1]) for _ in range(2))
    if dist.get_rank() == 1:
        own, other = other, own

    def come_later() -> None:
        time.sleep(6)
        dist.all_reduce(torch.ones(4), group=other)

    thread = threading.Thread(target=come_later)
    thread.start()
    dist.all_reduce(torch.ones(4), group=own)
    thread.join()
    return True


def test_a_thread_of_the_user_may_still_come() -> None:
    """What would be a circle of two ranks is none as long as other threads of theirs run."""
    assert meet_in_threads()


@distributed(processes=2, timeout=3)
def miss() -> None:
    if dist.get_rank() == 1:
        barrier("data is there")  # rank 1
    sleeps()  # rank 0


def test_when_the_time_is_over_the_error_says_where_all_were() -> None:
    """Not only that torch has waited for 3 s, but who waited where, and where the other one was."""
    with pytest.raises(SyncError) as caught:
        miss()
    said = str(caught.value)
    (waited, _), (busy,) = places(miss.__wrapped__), places(sleeps)
    assert f"rank 1 waits at {waited} in barrier('data is there')" in said
    assert f"for rank 0, which is at {busy}" in said
    assert "imed out" in said
    assert caught.value.__notes__[-1] == "the others: rank 0: stopped"


@distributed(processes=2, timeout=4)
def stop() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))  # rank 1


def test_a_rank_that_is_stopped_is_named_when_the_time_is_over() -> None:
    """It cannot say where it is, and that is said."""
    with pytest.raises(SyncError) as caught:
        stop()
    (waited,) = places(stop.__wrapped__)
    expected = f"rank 1 waits at {waited} in all_reduce of float32[1] for rank 0, which has not answered\n"
    assert str(caught.value).startswith(expected)


@distributed(processes=2, backend="fsdp")
def save_alone(path: Path) -> tuple[float, str]:
    with parallel_model(nn.Linear(4, 4)) as model:
        started, said = time.monotonic(), ""
        if dist.get_rank() == 0:
            try:
                save(path, model=model)  # rank 0
            except SyncError as error:
                said = str(error)
        seconds = time.monotonic() - started
        barrier("saved")  # rank 1
    return seconds, said


def test_a_save_that_others_cannot_come_to_is_ended_at_once(tmp_path: Path) -> None:
    """Where one rank waits for the others' shards and they for that rank, it alone is told, and may go on."""
    seconds, said = save_alone(tmp_path / "a.pt")
    saves, waits = places(save_alone.__wrapped__)
    assert f"save at {saves}: rank 1 did not come: rank 1 waits at {waits} in barrier('saved') for rank 0" in said
    assert seconds < WITHIN_S


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_programs_that_torchrun_has_started_end_by_it_too(
    run_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Without a caller that could be told, the error is printed, and the program ends as by an exception."""
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


def test_who_leaves_a_run_in_a_group_of_the_users_own_may_still_come(
    run_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """A group that was there before the run lives on after it, and so may the wait."""
    ran = run_script(
        """
        import time, torch, torch.distributed as dist
        from parallelize.runtime import context

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


@distributed(processes=3)
def evaluate_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(36)  # rank 0
    barrier("evaluated")  # rank 1


@pytest.mark.soak
def test_after_half_a_minute_a_line_says_who_is_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    """Once, on rank 0's output, with the places of both, and the run goes on."""
    evaluate_on_rank_0()
    busy, waited = places(evaluate_on_rank_0.__wrapped__)
    said = capfd.readouterr().err
    assert said.count("ranks 1-2 wait at") == 1
    assert f"ranks 1-2 wait at {waited} in barrier('evaluated') for rank 0, which is at {busy}" in said
