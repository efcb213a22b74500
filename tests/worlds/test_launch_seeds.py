"""`seed=` makes every rank start alike; without it ranks and calls draw independently, and nothing here is touched."""

from __future__ import annotations

import random

import numpy as np
import torch

from parallelize import distributed


@distributed(processes=2)
def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def drawn_here() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_a_seed_is_the_same_on_every_rank_and_in_every_call() -> None:
    """Initial weights agree before anything is sent, and a run can be repeated."""
    first = draw.options(seed=7).all_ranks()
    assert first[0] == first[1]
    assert draw.options(seed=7).all_ranks() == first
    assert draw.options(seed=8)() != first[0]


def test_without_a_seed_no_two_draws_are_alike() -> None:
    """Workers come from one server, and yet no generator of any rank or call repeats another's numbers."""
    rows = [*draw.all_ranks(), *draw.all_ranks(), draw.options(processes=1)()]
    for numbers in zip(*rows, strict=True):
        assert len(set(numbers)) == len(rows), rows


def test_generators_of_the_caller_are_left_alone() -> None:
    """Seeded or not, in other processes or in this one, a call takes nothing from the caller's generators."""
    before = drawn_here()
    for processes in (1, 2):
        for seed in (None, 3):
            draw.options(processes=processes, seed=seed)()
            assert drawn_here() == before


def test_one_process_starts_from_the_seed_too() -> None:
    """The same seed gives one process the numbers of rank 0."""
    assert draw.options(processes=1, seed=7)() == draw.options(seed=7)()
