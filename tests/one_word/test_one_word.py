"""Programs in the style of published scripts train the same under every backend: only the word changes."""

from __future__ import annotations

import re

import pytest
import torch
from one_word.refusals import DIFFERENCES, REFUSALS
from one_word.worlds import PROGRAMS, WORLDS, outcome

# The first test of a group of programs runs all of them.
pytestmark = pytest.mark.one_word

TOLERANCE = {torch.float64: 1e-9}
# Gradients of each micro-batch are rounded to bf16, with a relative precision of 4e-3, before they are added.
BF16_PROGRAMS = ("amp_bf16", "autocast_bf16")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_word_changes_the_engine_alone(name: str, world: str) -> None:
    """The program runs, and ends with the reference's weights, averages and predictions; or is refused as declared."""
    got = outcome(name, world)
    refusal = REFUSALS.get((name, world))
    if refusal is not None:
        assert got.error is not None, f"runs: remove it from REFUSALS ({refusal.reason})"
        assert re.search(refusal.words, got.error)
        return
    assert got.error is None, got.error
    assert all(torch.isfinite(tensor).all() for tensor in got.tensors.values())
    reference = WORLDS[world].reference
    if reference is None:
        return
    want = outcome(name, reference)
    assert want.error is None, f"{reference}: {want.error}"
    assert got.tensors.keys() == want.tensors.keys()
    least = 2e-3 if world == "balanced" and name in BF16_PROGRAMS else 0.0
    pairs = {key: (got.tensors[key], each, least) for key, each in want.tensors.items()}
    different = {key: message for key, pair in pairs.items() if (message := difference(*pair))}
    if (name, world) in DIFFERENCES:
        assert different, f"no difference: remove it from DIFFERENCES ({DIFFERENCES[name, world]})"
    else:
        assert not different


def difference(got: torch.Tensor, want: torch.Tensor, least: float) -> str | None:
    """Return how `got` differs from `want` by more than rounding, which is at least `least`; None: it does not."""
    tolerance = max(least, TOLERANCE.get(want.dtype, 1e-4))
    try:
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("world", WORLDS)
def test_nearly_every_program_runs(world: str) -> None:
    """At least 95 % of the programs are neither refused nor different under a backend."""
    excepted = {name for name, where in (*REFUSALS, *DIFFERENCES) if where == world}
    assert len(PROGRAMS) >= 32
    assert len(excepted) <= 0.05 * len(PROGRAMS)


def test_exceptions_name_programs_and_worlds() -> None:
    """Each declared refusal and difference belongs to a program and a world that exist."""
    assert {name for name, _ in (*REFUSALS, *DIFFERENCES)} <= PROGRAMS.keys()
    assert {world for _, world in (*REFUSALS, *DIFFERENCES)} <= WORLDS.keys()
