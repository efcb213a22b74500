"""The verdict of a comparison, from recordings: whether two runs are the same, where they part, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from parallelize.comparison.recording import RecordedStep, Recording
from parallelize.comparison.report import Comparison, compare_recordings

GRADIENT = torch.tensor([1.0, 2.0, -1.0])


def step(**changes: Any) -> RecordedStep:
    given = RecordedStep(
        loss=2.0,
        names=("weight",),
        gradients=(GRADIENT,),
        weights=(torch.ones(3),),
        learning_rates=(0.1,),
    )
    return dataclasses.replace(given, **changes)


def recording(*steps: RecordedStep, samples: tuple[str, ...] = ("a",), **changes: Any) -> Recording:
    return Recording(list(steps), changes.get("initial", [torch.zeros(3)]), [samples] * len(steps))


def compare(single: Recording, *ranks: Recording, tolerance: float = 1e-4) -> Comparison:
    return compare_recordings(single, ranks, labels=("1 process", "2 processes"), tolerance=tolerance)


def compare_steps(a: RecordedStep, first: RecordedStep, second: RecordedStep, tolerance: float = 1e-4) -> Comparison:
    """Compare a step that follows an equal one."""
    return compare(
        recording(step(), a, samples=("a", "b")),
        recording(step(), first),
        recording(step(), second, samples=("b",)),
        tolerance=tolerance,
    )


def names(comparison: Comparison) -> list[str]:
    return [reason.name for reason in comparison.reasons]


def test_rounding_is_no_difference() -> None:
    """Gradients that differ by less than the tolerance are the same training."""
    rounded = step(gradients=(GRADIENT * (1 + 1e-6),), weights=(torch.ones(3) + 1e-6,))
    comparison = compare_steps(step(), rounded, rounded)
    assert comparison.is_same
    assert comparison.first_difference is None
    assert names(comparison) == []
    assert str(comparison).splitlines() == [
        "step  loss, 1 process  loss, 2 processes  gradients differ by  weights differ at most by",
        "   1                2                  2              0.0e+00           0.0e+00 (weight)",
        "   2                2                  2              9.5e-07           9.5e-07 (weight)",
        "The same training, up to rounding.",
    ]


OTHER = (torch.tensor([2.0, 1.0, 1.0]),)


@pytest.mark.parametrize(
    ("a", "first", "second", "expected"),
    [
        ({"batch_norm": "1 (BatchNorm1d)"}, {}, {}, ["batch norm"]),
        ({}, {}, {"draws_random_numbers": True}, ["random numbers"]),
        ({"batch_norm": "1"}, {"draws_random_numbers": True}, {}, ["random numbers", "batch norm"]),
        ({}, {"loss": 1.0, "gradients": (GRADIENT / 2,)}, {"loss": 1.2}, ["sum instead of mean"]),
        ({}, {"loss": 4.0, "gradients": (GRADIENT * 2,)}, {"loss": 4.0}, ["sum instead of mean"]),
        ({}, {"loss": 1.5}, {"loss": 2.2}, ["token mean"]),
        ({}, {"loss": 2.001}, {}, ["token mean"]),
        ({}, {}, {"loss": 1.5}, ["token mean"]),
        ({}, {"loss": 2.0 + 1e-8}, {}, ["rounding that grows"]),
        ({}, {"loss": 1.2}, {"loss": 1.4}, ["loss over the batch"]),
        ({}, {}, {}, ["rounding that grows"]),
        ({}, {"loss": None}, {}, ["rounding that grows"]),
        ({}, {"gradients": (None,)}, {}, ["rounding that grows"]),
        ({}, {"gradients": (torch.ones(2),)}, {}, ["rounding that grows"]),
        ({"gradients": (GRADIENT * 0,)}, {}, {}, ["rounding that grows"]),
        ({}, {"gradients": (GRADIENT,), "learning_rates": (0.2,)}, {}, ["learning rate"]),
    ],
)
def test_the_reason_follows_from_what_was_recorded(
    a: dict[str, Any], first: dict[str, Any], second: dict[str, Any], expected: list[str]
) -> None:
    """Each fact at the first differing step has its reason, and the text shows it."""
    comparison = compare_steps(step(**a), step(**{"gradients": OTHER, **first}), step(**second))
    assert not comparison.is_same
    assert comparison.first_difference == 2
    assert names(comparison) == expected
    assert "The runs part at step 2. Likely reasons:\n  " + expected[0] in str(comparison)


def test_a_tolerance_of_zero_compares_bits() -> None:
    """Equal runs are the same; a loss at the end of the ranks' range is still a mean of another number of terms."""
    assert compare_steps(step(), step(), step(), tolerance=0.0).is_same
    other = step(gradients=OTHER)
    assert names(compare_steps(step(), other, other, tolerance=0.0)) == ["rounding that grows"]
    for losses in [(2.0, 3.0), (1.0, 2.0)]:
        ranks = [step(gradients=OTHER, loss=loss) for loss in losses]
        assert names(compare_steps(step(), *ranks, tolerance=0.0)) == ["token mean"]


def test_the_learning_rates_of_both_runs_are_named() -> None:
    """Equal rates of several groups are named once."""
    comparison = compare_steps(step(learning_rates=(0.1, 0.1)), step(learning_rates=(0.2, 0.4)), step())
    assert "0.1 with 1 process, 0.2, 0.4 with 2 processes" in str(comparison)


@pytest.mark.parametrize(
    ("single", "main", "expected"),
    [
        ((), (), "0.0e+00 ()"),
        ((torch.ones(2), torch.ones(2)), (torch.ones(2), torch.ones(2)), "0.0e+00 (a)"),
        ((torch.ones(2), torch.ones(2)), (torch.zeros(2), torch.zeros(2)), "1.0e+00 (a)"),
        ((torch.ones(2), torch.ones(2)), (torch.ones(2), torch.zeros(2)), "1.0e+00 (b)"),
        ((torch.ones(0), torch.ones(2)), (torch.ones(0), torch.ones(2)), "0.0e+00 (a)"),
        ((torch.ones(2), torch.ones(2)), (torch.ones(3), torch.ones(2)), "inf (a)"),
        ((torch.ones(2), torch.ones(2)), (torch.ones(2), torch.tensor([1.0, torch.nan])), "nan (b)"),
    ],
)
def test_the_weight_that_differs_most_is_named(single: Any, main: Any, expected: str) -> None:
    """Of equal differences the first weight is named; another shape is an infinite difference."""
    parameters = ("a", "b")[: len(main)]
    found = compare_steps(step(weights=single), step(weights=main, names=parameters), step())
    assert str(found).splitlines()[2].endswith(f" {expected}")


@pytest.mark.parametrize(
    ("single", "main", "expected"),
    [
        ((), (), 0.0),
        ((GRADIENT * 0,), (GRADIENT * 0,), 0.0),
        ((GRADIENT * 0,), (GRADIENT,), torch.inf),
        ((GRADIENT, None), (GRADIENT, None), 0.0),
        ((GRADIENT, None), (GRADIENT, GRADIENT * 0), 0.0),
        ((GRADIENT, GRADIENT), (GRADIENT, GRADIENT * 2), 0.5**0.5),
    ],
)
def test_a_missing_gradient_is_zero(single: Any, main: Any, expected: float) -> None:
    """The difference of gradients is a fraction of their norm with one process."""
    comparison = compare_steps(step(gradients=single), step(gradients=main), step())
    assert comparison.steps[1].gradient_difference == pytest.approx(expected)
    assert comparison.is_same == (expected == 0.0)


def test_other_gradients_at_the_first_step_are_not_rounding() -> None:
    """With equal weights, samples and losses, something acts on each process's gradient."""
    other = recording(step(gradients=OTHER))
    assert names(compare(recording(step(), samples=("a", "a")), other, other)) == ["gradients"]


def test_other_samples_are_named_with_batch_and_rank() -> None:
    """The first batch and rank with other samples than the merged batch are in the text."""
    other = recording(step(gradients=OTHER), samples=("c",))
    comparison = compare(recording(step(), samples=("a", "b")), other, recording(step(), samples=("b",)))
    assert names(comparison) == ["order or content of the data"]
    assert "batch 1 of rank 0" in str(comparison)


def test_a_later_batch_and_rank_are_named() -> None:
    """Batches and ranks before it have the same samples."""
    single = Recording([step()] * 2, [torch.zeros(3)], [("a", "b"), ("c", "d")])
    ranks = [Recording([step(), step(gradients=OTHER)], [torch.zeros(3)], [("a",), ("c",)])]
    ranks.append(Recording([step()] * 2, [torch.zeros(3)], [("b",), ("e",)]))
    assert "batch 2 of rank 1 has other samples" in str(compare(single, *ranks))


def test_after_other_initial_weights_the_first_step_is_explained() -> None:
    """Facts of later steps are no reasons."""
    normed = recording(step(batch_norm="1 (BatchNorm1d)"), step(), step(draws_random_numbers=True), samples=("a", "a"))
    started = recording(step(), step(), step(), initial=[torch.ones(3)])
    assert names(compare(normed, started, started)) == ["initial weights", "batch norm"]


def test_setups_that_cannot_be_the_same() -> None:
    """Loaders outside of shard_loader are named even if both runs agree; other setups where they part."""
    unsharded = Recording([step()], [torch.zeros(3)])
    comparison = compare(unsharded, unsharded, unsharded)
    assert names(comparison) == ["data not from shard_loader"]
    assert "The same training, up to rounding, but:\n  data not" in str(comparison)
    outside = recording(step(gradients=OTHER, is_in_block=False))
    single = recording(step(), samples=("a", "a"))
    assert names(compare(single, outside, outside))[0] == "no parallel_model block"
    started = recording(step(), initial=[torch.ones(3)])
    comparison = compare(single, started, started)
    assert names(comparison)[0] == "initial weights"
    assert comparison.first_difference == 0
    assert "The runs part before the first step." in str(comparison)
    longer = compare(single, recording(step(), step()), recording(step(), step()))
    assert names(longer)[0] == "number of steps"
    assert longer.first_difference == 2


def test_several_devices_of_one_process_have_one_recording() -> None:
    """Under dp one process reads the batches that the compared process reads, in the same merged way."""
    comparison = compare_recordings(
        recording(step(), samples=("a", "b")),
        [recording(step(is_in_block=False), samples=("a", "b"))],
        labels=("1 device", "2 devices"),
        tolerance=1e-4,
    )
    assert comparison.is_same
    assert names(comparison) == []
    unsharded = Recording([step()], [torch.zeros(3)])  # one process reads all data with any loader
    comparison = compare_recordings(unsharded, [unsharded], labels=("1 device", "2 devices"), tolerance=1e-4)
    assert names(comparison) == []
