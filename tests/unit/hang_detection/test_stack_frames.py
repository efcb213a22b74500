"""Lines of the user's program, and threads that may make a collective call."""

from __future__ import annotations

import importlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from parallelize.hang_detection.stack_frames import call_site_in, has_other_active_threads, traceback_of


def test_printed_tracebacks_are_parsed_in_both_orders() -> None:
    """Python prints the innermost line last, its faulthandler first."""
    torch_line = f'File "{torch.__file__}", line 3, in all_reduce'
    printed = f'Traceback:\n  File "/home/a/train.py", line 4, in train\n  {torch_line}\nRuntimeError'
    dumped = "(most recent call first):\n  " + torch_line.replace(", in", " in") + '\n  File "/a/train.py", line 9 in f'
    assert [call_site_in(text) for text in (printed, dumped, "")] == ["train.py:4", "train.py:9", ""]


def stack_here() -> list[tuple[FrameType, int]]:
    return [*traceback.walk_stack(sys._getframe())]


def call(function: Callable[[], list[tuple[FrameType, int]]]) -> list[tuple[FrameType, int]]:
    return function()


def test_a_traceback_begins_below_who_has_called_the_users_function() -> None:
    """What has started the process is nothing to a user."""
    trace = traceback_of(call(stack_here), call.__code__)
    assert [frame.name for frame in traceback.extract_tb(trace)] == ["stack_here"]
    whole = traceback_of(stack_here(), None)
    assert [frame.name for frame in traceback.extract_tb(whole)][-2:] == [
        "test_a_traceback_begins_below_who_has_called_the_users_function",
        "stack_here",
    ]


@pytest.fixture
def ended() -> Iterator[threading.Event]:
    event = threading.Event()
    before = set(threading.enumerate())
    yield event
    event.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()


def wait(ended: threading.Event) -> None:
    ended.wait()


def test_a_thread_in_the_users_code_is_active(ended: threading.Event) -> None:
    """It could make a call that the main thread does not make."""
    assert not has_other_active_threads(threading.get_ident())
    threading.Thread(target=wait, args=[ended]).start()
    assert has_other_active_threads(threading.get_ident())


def test_a_timer_is_active(ended: threading.Event) -> None:
    """It could call a function of torch.distributed directly, without a frame of the user."""
    timer = threading.Timer(60, ended.set)
    timer.start()
    assert has_other_active_threads(threading.get_ident())
    timer.cancel()


@pytest.mark.parametrize("uses_torch", [False, True])
def test_a_thread_of_an_installed_library_is_told_by_its_module(
    uses_torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: threading.Event
) -> None:
    """It is active if its library uses torch, wherever that is installed."""
    (tmp_path / "some_monitor.py").write_text(f"{'import torch' * uses_torch}\ndef run(ended):\n    ended.wait()\n")
    metadata = tmp_path / "some_monitor-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some_monitor\nVersion: 1.0\n")
    (metadata / "top_level.txt").write_text("some_monitor\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_monitor", raising=False)
    library = importlib.import_module("some_monitor")
    threading.Thread(target=library.run, args=[ended]).start()
    assert has_other_active_threads(threading.get_ident()) is uses_torch
    monkeypatch.delitem(sys.modules, "some_monitor")
