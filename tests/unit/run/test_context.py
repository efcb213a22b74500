"""The contexts that a decorated function leaves open end with it, and those of the function around it do not."""

from __future__ import annotations

import sys

from torch import nn

from parallelize import distributed, parallel_model
from parallelize.run.context import active


@distributed(processes=1)
def inner(model: nn.Module) -> bool:
    run = active()
    assert run is not None
    parallel_model(model).start()
    return run.state.is_in_block


@distributed(processes=1)
def outer(calls: int) -> tuple[bool, bool]:
    run = active()
    assert run is not None
    were_in_block = all(inner(nn.Linear(2, 1)) for _ in range(calls))
    ended = not run.state.is_in_block
    parallel_model(nn.Linear(2, 1)).start()
    inner(nn.Linear(2, 1))
    return were_in_block and ended, run.state.is_in_block


def test_blocks_of_an_inner_call_end_with_it() -> None:
    """One that the outer function has begun goes on."""
    assert outer(2) == (True, True)


@distributed(processes=1)
def number() -> int:
    return 1


@distributed(processes=1)
def calls_often(times: int) -> int:
    return sum(number() for _ in range(times))


def test_a_function_may_call_another_one_often() -> None:
    """A loop of training may call a decorated step."""
    assert calls_often(3 * sys.getrecursionlimit()) == 3 * sys.getrecursionlimit()
