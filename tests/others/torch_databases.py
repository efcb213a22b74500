"""The databases that torch tests itself with, as they lie in every installed wheel of torch.

Ranks import them: the import changes settings of the process, which a process of pytest shares with other tests.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
import types
import unittest
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["EQUAL", "Refusal", "imported", "largest_difference", "outcome_of", "unexplained"]

EQUAL = "equal"


def imported(name: str) -> Any:
    """Import a module of torch's own tests, and leave the process as it was.

    torch's test helpers import `expecttest`, which torch does not require, for a base class of their test cases.
    They also forbid to set flags such as `torch.backends.cudnn.benchmark` for the rest of the process.
    """
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(name)
    # The module that has the flag; `torch.backends` is an object that stands for it.
    flags = torch.backends.disable_global_flags.__globals__
    flags["__allow_nonbracketed_mutation_flag"] = True
    return module


def outcome_of(check: Callable[[], float | None]) -> str:
    """Return "equal", "differs by ...", or the error of a check that returns the largest difference that it finds."""
    try:
        difference = check()
    except Exception as error:  # noqa: BLE001 - what a back end refuses is in the table of a test
        place = traceback.extract_tb(error.__traceback__)[-1]
        first_line = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {first_line} [{place.filename}:{place.lineno}]"
    if difference == 0.0:
        return EQUAL
    return f"differs by {difference:.1e}"


def largest_difference(found: Any, expected: Any) -> float:
    """Return the largest absolute difference of two tensors; infinity, if one is nan where the other is not."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if found.numel() == 0 or torch.equal(found, expected):
        return 0.0
    found, expected = found.detach(), expected.detach()
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    differences = (found - expected).abs().masked_fill(is_same, 0.0)
    return float(differences.nan_to_num(nan=float("inf")).max())


@dataclass(frozen=True)
class Refusal:
    """What a table says of cases that do not end as in one process.

    Attributes:
        text: is in the outcome of each of them.
        reason: why that is right, or what is missing.
    """

    text: str
    reason: str


def unexplained(outcomes: Mapping[str, str], refusals: Mapping[str, Refusal], *, is_sample: bool) -> dict[str, str]:
    """Return the cases that do not end as the table says, and the entries of the table without a case.

    Args:
        outcomes: what `outcome_of` has returned, by the name of the case.
        refusals: what is in the outcome of each case whose name begins with the key.
        is_sample: whether entries may have no case.
    """
    wrong = {}
    unused = set(refusals)
    for case, outcome in outcomes.items():
        is_in_table = False
        for begin, refusal in refusals.items():
            if not case.startswith(begin):
                continue
            is_in_table = True
            unused.discard(begin)
            if outcome == EQUAL or refusal.text not in outcome:
                wrong[case] = f"{outcome}; the table says {refusal.text!r}"
        if not is_in_table and outcome != EQUAL:
            wrong[case] = outcome
    if not is_sample:
        for begin in unused:
            wrong[begin] = "is in the table, and no case has this name"
    return wrong
