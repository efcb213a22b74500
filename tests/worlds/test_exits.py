"""sys.exit() in the function ends the program, as it does in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import WorkerError, barrier, distributed, rank

RETURN = "return"


@distributed(processes=2)
def leave(*codes: object) -> str:
    barrier()
    if codes[rank()] == RETURN:
        return "returned"
    sys.exit(codes[rank()])


# What rank 0 and rank 1 do -> the code with which the program ends.
EXITS: dict[tuple[object, object], object] = {
    (None, None): 0,
    (0, 0): 0,
    (None, RETURN): 0,
    (3, 3): 3,
    ("no data", 4): "no data",
    (4, 0): 4,
}


@pytest.mark.parametrize("codes", EXITS, ids=str)
def test_the_program_exits_as_rank_0_does(codes: tuple[object, object]) -> None:
    """If all ranks exit; without an error, also if others return."""
    with pytest.raises(SystemExit) as caught:
        leave(*codes)
    assert caught.value.code == EXITS[codes]


@pytest.mark.parametrize(("codes", "number"), [((RETURN, 3), 1), ((3, RETURN), 0), ((0, 3), 1)], ids=str)
def test_an_exit_with_an_error_that_is_not_the_programs_is_a_failure(codes: tuple[object, object], number: int) -> None:
    """It names the rank, since the code of rank 0 does not say it."""
    with pytest.raises(WorkerError, match=rf"^rank {number} .* ended with exit code 3") as caught:
        leave(*codes)
    assert caught.value.exitcode == 3


def test_an_exit_of_another_rank_is_a_return() -> None:
    """The program goes on with rank 0's value."""
    assert leave.all_ranks(RETURN, None) == ["returned", None]


def test_what_was_trained_comes_back_before_the_program_exits() -> None:
    """The caller may save it in a finally block."""
    model = nn.Linear(1, 1)

    @distributed(processes=2)
    def train() -> None:
        model.weight.data.fill_(7.0)
        torch.manual_seed(3)
        sys.exit()

    with pytest.raises(SystemExit):
        train()
    assert model.weight.item() == 7.0
    assert torch.initial_seed() == 3


SCRIPT = """
import sys
from parallelize import distributed

@distributed(processes=int(sys.argv[1]))
def run():
    sys.exit(sys.argv[2] if len(sys.argv) > 2 else None)

run()
print("the program went on")
"""


@pytest.mark.parametrize("arguments", [(), ("no data",)], ids=str)
def test_a_script_ends_as_in_one_process(arguments: tuple[str, ...], run_script: Callable[..., Any]) -> None:
    """With the same exit code, and the same text on stderr."""
    single, both = (run_script(SCRIPT, args=(size, *arguments), check=False) for size in ("1", "2"))
    assert (both.returncode, both.stdout, both.stderr) == (single.returncode, single.stdout, single.stderr)
    assert (both.returncode, both.stdout) == (len(arguments), "")
