"""Python stacks split into user and library code, other threads, and CPU time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from parallelize.hang_detection import stack_frames


def inner() -> stack_frames.Stack:
    return stack_frames.stack_of(sys._getframe())


def test_user_lines_of_a_stack() -> None:
    """Lines of the program, outermost first, without those of libraries and of Python."""
    stack = inner()
    lines = stack_frames.user_lines(stack)
    assert lines[-1].startswith("test_stack_frames.py:")
    assert lines[-1].endswith(" in inner")
    assert lines[-2].endswith(" in test_user_lines_of_a_stack")
    assert stack_frames.call_site(stack) == lines[-1].partition(" ")[0]
    assert not any("site-packages" in line or "threading" in line for line in lines)


def test_an_errors_stack_ends_where_it_was_raised() -> None:
    """It is the line that raised, not a line of a `finally` or `except` after it."""
    try:
        torch.ones(2) + torch.ones(3)
    except RuntimeError as error:
        stack = stack_frames.stack_of_error(error)
    assert stack_frames.user_lines(stack)[-1].endswith(" in test_an_errors_stack_ends_where_it_was_raised")


def test_printed_tracebacks_are_parsed_in_both_orders() -> None:
    """Python prints the innermost line last, its faulthandler first."""
    torch_line = f'File "{torch.__file__}", line 3, in all_reduce'
    printed = f'Traceback:\n  File "/home/a/train.py", line 4, in train\n  {torch_line}\nRuntimeError'
    dumped = "(most recent call first):\n  " + torch_line.replace(", in", " in") + '\n  File "/a/train.py", line 9 in f'
    sites = [stack_frames.call_site_in(text) for text in (printed, dumped, "")]
    assert sites == ["train.py:4", "train.py:9", ""]
    elsewhere = printed + '  File "/opt/other/parallelize/worker/main.py", line 7, in run\n'
    assert stack_frames.call_site_in(elsewhere) == "train.py:4"
    assert stack_frames.call_site_in(elsewhere.replace("worker/main.py", "worker/mine.py")) == "mine.py:7"


def _wait(ended: threading.Event) -> None:
    ended.wait()


def test_other_active_threads_are_found() -> None:
    """A thread that runs user code could make a call that the main thread does not make."""
    ended = threading.Event()
    assert not stack_frames.has_other_active_threads(threading.get_ident())
    thread = threading.Thread(target=_wait, args=(ended,))
    thread.start()
    try:
        assert stack_frames.has_other_active_threads(threading.get_ident())
    finally:
        ended.set()
        thread.join()


def test_a_thread_that_computes_is_not_idle() -> None:
    """Its CPU clock does not advance while it sleeps."""
    clock = stack_frames.ThreadCpuClock(threading.get_ident())
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    assert not clock.is_idle()
    time.sleep(0.05)
    assert clock.is_idle()


class OnDevice:
    """A tensor whose methods wait in compiled code, as those of a CUDA tensor for a collective."""

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self.item = self.sleep = lock.acquire
        self.finish = lock.release


def read_value(loss: OnDevice) -> None:
    float(loss.item())


def sleep(loss: OnDevice) -> None:
    loss.finish()
    _ = loss.item()  # does not wait
    loss.sleep()


@pytest.mark.parametrize(("function", "blocks"), [(read_value, True), (sleep, False)])
def test_a_wait_for_a_device_is_seen_in_the_users_frame(function: Callable[[OnDevice], None], blocks: bool) -> None:
    """Under NCCL, `loss.item()` waits for the other ranks if a collective is pending; other calls may not."""
    loss = OnDevice()
    thread = threading.Thread(target=function, args=(loss,))
    thread.start()
    stack: stack_frames.Stack = ()
    while not stack or stack[0][0].f_code is not function.__code__ or stack[0][0].f_lineno != _last_line(function):
        stack = stack_frames.stack_of(sys._current_frames().get(thread.ident))
        time.sleep(0.01)
    try:
        assert stack_frames.is_blocking(stack, on_device=True) is blocks
        assert not stack_frames.is_blocking(stack, on_device=False)
        assert stack_frames.operation(stack) == ("item" if blocks else "sleep")
    finally:
        loss.finish()
        thread.join()


def _last_line(function: Callable[..., object]) -> int:
    return max(line for _, _, line in function.__code__.co_lines() if line)
