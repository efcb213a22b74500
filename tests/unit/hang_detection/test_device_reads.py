"""Which calls of compiled code hold a thread, by the instruction of its innermost frame."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallelize.hang_detection.device_reads import read_at


class Loss:
    """A number of a device that has not computed it: its methods are compiled code, and wait for a lock."""

    def __init__(self, lock: Any) -> None:
        self.item = self.cpu = self.reshape = lock.acquire


@pytest.fixture
def lock() -> Iterator[Any]:
    lock = threading.Lock()
    lock.acquire()
    yield lock
    lock.release()


def read_in_thread(lock: Any, function: Callable[..., object], *args: object) -> str:
    """Return the read that a thread is in, which waits for the lock in a function."""
    thread = threading.Thread(target=function, args=args)
    thread.start()
    while True:
        assert thread.ident is not None
        frame = sys._current_frames()[thread.ident]
        if frame.f_code is function.__code__ and is_held(frame):
            read = read_at(frame)
            break
    lock.release()
    thread.join()
    return read


def is_held(frame: Any) -> bool:
    """Whether a frame is at its marked line, and has not moved for some switches of threads."""
    first = frame.f_lasti
    for _ in range(3):
        threading.Event().wait(0.02)
        if frame.f_lasti != first:
            return False
    return frame.f_lasti == first and first > 0


def item(loss: Any) -> None:
    loss.item()


def item_of_a_chain(loss: Any) -> None:
    SimpleNamespace(loss=loss).loss.item(
        True,
    )


def item_in_several_lines(loss: Any) -> None:
    (
        SimpleNamespace(
            loss=loss,
        )
        .loss
        .item()
    )  # fmt: skip


def item_in_an_argument(loss: Any) -> None:
    str(float(loss.item()) + 1.0)


def copy_with_arguments(loss: Any) -> None:
    arguments = (True,)
    loss.cpu(*arguments)


def condition(loss: Any) -> None:
    if loss:
        str(loss)


def negation(loss: Any) -> None:
    str(not loss)


def view(loss: Any) -> None:
    loss.reshape()


def held_by_lock(lock: Any) -> None:
    lock.acquire()


READS = [
    (item, "item"),
    (item_of_a_chain, "item"),
    (item_in_several_lines, "item"),
    (item_in_an_argument, "item"),
    (copy_with_arguments, "cpu"),
    (view, ""),
]


@pytest.mark.parametrize(("function", "read"), READS, ids=lambda value: getattr(value, "__name__", value))
def test_a_read_is_told_by_its_instruction(lock: Any, function: Callable[..., None], read: str) -> None:
    """Compiled code has no frame: the instruction says which call of the line has not returned."""
    assert read_in_thread(lock, function, Loss(lock)) == read


@pytest.mark.parametrize("function", [condition, negation])
def test_a_truth_value_is_a_read(lock: Any, function: Callable[..., None]) -> None:
    """`if loss > 3:` has no call, and waits for the device."""
    loss = type("Loss", (), {"__bool__": lock.acquire})()
    assert read_in_thread(lock, function, loss) == "bool"


def test_a_call_of_another_name_is_no_read(lock: Any) -> None:
    """A thread that waits for a lock waits for no device."""
    assert read_in_thread(lock, held_by_lock, lock) == ""


def test_what_torch_calls_to_read_is_known() -> None:
    """The innermost frame may be one of torch: a format, or `torch.cuda.synchronize()`."""
    assert "item" in torch.Tensor.__format__.__code__.co_names
    assert "_cuda_synchronize" in torch.cuda.synchronize.__code__.co_names
    assert "_accelerator_synchronizeDevice" in torch.accelerator.synchronize.__code__.co_names


def test_a_program_without_source_makes_no_read(lock: Any) -> None:
    """A text that `exec` runs has no lines; nothing is guessed."""
    names: dict[str, Any] = {}
    exec("def run(loss):\n    loss.item()\n", names)
    assert read_in_thread(lock, names["run"], Loss(lock)) == ""
