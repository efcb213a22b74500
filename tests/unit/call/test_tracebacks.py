"""Tracebacks without this package's frames: what remains, in which exceptions, and what stays as it was."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
import torch

from parallelize import ConfigError, distributed, parallel_model, shard_loader
from parallelize.call.tracebacks import in_users_code, shorten_chain
from parallelize.errors import SyncError, list_ranks


def functions(trace: TracebackType | None) -> list[str]:
    return [each.name for each in traceback.extract_tb(trace)]


def raised_by(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - the tests look at it
        return error
    raise AssertionError("nothing was raised")


@distributed(processes=1)
def fail_in_forward() -> None:
    model = torch.nn.Linear(3, 1)
    with parallel_model(model):
        model(torch.ones(2, 4))


@distributed(processes=1)
def chain_of_errors() -> None:
    try:
        with parallel_model(torch.nn.Linear(2, 2), backend="ddd"):  # type: ignore[call-arg]  # the mistake
            pass
    except ConfigError as error:
        raise LookupError("outer", 3) from error


@distributed(processes=1)
def nested() -> None:
    fail_in_forward()


@distributed(processes=1)
def frames_of_a_nested_call() -> list[str]:
    return functions(raised_by(fail_in_forward).__traceback__)


def test_inside_a_run_the_traceback_is_complete() -> None:
    """Hang detection finds the pending call in it."""
    assert "_run" in frames_of_a_nested_call()


def test_only_the_users_frames_and_the_innermost_ones_of_torch_are_left() -> None:
    """Frames of torch that lead to this package are folded with it; those that raise are shown."""
    shown = functions(raised_by(fail_in_forward).__traceback__)
    assert shown == ["raised_by", "fail_in_forward", "forward"]
    assert functions(raised_by(nested).__traceback__) == ["raised_by", "nested", "fail_in_forward", "forward"]


def test_a_block_of_a_script_is_folded() -> None:
    """A script under torchrun decorates no function."""
    shown = functions(raised_by(fail_in_forward.__wrapped__).__traceback__)
    assert shown == ["raised_by", "fail_in_forward", "forward"]


def test_invalid_options_are_shown_at_the_users_line() -> None:
    """No frame of the parser, or of a dataclass that has the options, follows the user's line."""
    for mistake in (
        lambda: distributed(2),
        lambda: distributed(backend="dpp"),
        lambda: nested.options(gpus="x"),
        lambda: nested.sbatch_script("job.sh"),
        lambda: nested.compare(3),
        lambda: nested.explain(gpus="two"),  # type: ignore[arg-type]  # the mistake
        distributed(processes=1)(lambda: shard_loader([1], tail="exac")),
    ):
        assert functions(raised_by(mistake).__traceback__) == ["raised_by", "<lambda>"]
    assert functions(raised_by(nested.options(processes=None, gpus=512)).__traceback__) == ["raised_by"]


def test_the_exception_and_its_causes_stay_the_same() -> None:
    """Type, arguments and cause are kept; the cause's traceback is folded, too."""
    error = raised_by(chain_of_errors)
    assert (type(error), error.args, error.__suppress_context__) == (LookupError, ("outer", 3), True)
    assert isinstance(error.__cause__, ConfigError)
    assert error.__context__ is error.__cause__
    assert functions(error.__cause__.__traceback__) == ["chain_of_errors"]


def fails_in_torch() -> None:
    torch.ones(2).reshape(3).sum()


def fails_below_torch() -> None:
    torch.nn.Linear(3, 1)(torch.ones(2, 4))


@pytest.mark.parametrize("function", [fails_in_torch, fails_below_torch])
def test_a_sync_error_ends_at_the_users_line(function: Callable[[], None]) -> None:
    """Neither it nor the error of torch that it explains shows what torch does below that line."""
    error = raised_by(function)
    explained = SyncError("rank 0 waits", why="w", fix="f").with_traceback(error.__traceback__)
    explained.__cause__ = RuntimeError("torch's").with_traceback(error.__traceback__)
    shorten_chain(explained)
    assert functions(explained.__traceback__) == ["raised_by", function.__name__]
    assert explained.__cause__.__traceback__ is None
    shorten_chain(error)
    assert functions(error.__traceback__)[:2] == ["raised_by", function.__name__]


def test_all_frames_are_shown_if_the_user_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """PARALLELIZE_TRACEBACK=full is for reports of defects."""
    monkeypatch.setenv("PARALLELIZE_TRACEBACK", "full")
    assert "_run" in functions(raised_by(fail_in_forward).__traceback__)


def test_a_traceback_without_frames_to_fold_is_the_same_object() -> None:
    """An exception that the user is handling is not rebuilt; one without a frame of the user has none."""
    trace = raised_by(lambda: 1 / 0).__traceback__
    assert in_users_code(trace) is trace
    assert in_users_code(None) is None
    assert in_users_code(raised_by(functools.partial(list_ranks, 8)).__traceback__.tb_next) is None


def test_a_defect_of_this_package_is_shown() -> None:
    """An undocumented exception keeps the frame that raises it, also as the cause of the user's own."""

    @distributed(processes=1)
    def defect() -> None:
        list_ranks(8)  # type: ignore[arg-type]  # the defect

    @distributed(processes=1)
    def wrapped() -> None:
        try:
            list_ranks(8)  # type: ignore[arg-type]  # the defect
        except TypeError as error:
            raise LookupError("outer") from error

    assert functions(raised_by(defect).__traceback__) == ["raised_by", "defect", "list_ranks"]
    cause = raised_by(wrapped).__cause__
    assert cause is not None
    assert functions(cause.__traceback__) == ["wrapped", "list_ranks"]
