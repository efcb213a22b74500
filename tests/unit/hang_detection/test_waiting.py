"""What a thread says that it waits for."""

from __future__ import annotations

import threading

import pytest

from parallelize.hang_detection.waiting import Wait, wait_of_error, wait_of_thread, waiting_for


def wait_of_this_thread() -> Wait | None:
    return wait_of_thread(threading.get_ident())


def test_the_inner_one_of_nested_waits_counts() -> None:
    """A save that compares weights is in the comparison, and then in the save again."""
    assert wait_of_this_thread() is None
    with waiting_for("save('a.pt')"):
        with waiting_for("backward", is_blocked=True):
            assert wait_of_this_thread() == Wait("backward", is_blocked=True)
        assert wait_of_this_thread() == Wait("save('a.pt')", is_blocked=False)
    assert wait_of_this_thread() is None


def test_each_thread_has_its_own_wait() -> None:
    """A save in the background is not what the main thread waits for; the watchdog reads both from a third thread."""
    seen: dict[str, Wait | None] = {}
    is_entered, may_leave = threading.Event(), threading.Event()

    def save() -> None:
        with waiting_for("save('a.pt')"):
            is_entered.set()
            may_leave.wait()

    def watch(threads: dict[str, int]) -> None:
        for name, number in threads.items():
            seen[name] = wait_of_thread(number)

    saving = threading.Thread(target=save)
    saving.start()
    is_entered.wait()
    with waiting_for("backward"):
        assert saving.ident is not None
        numbers = {"main": threading.get_ident(), "saving": saving.ident}
        watching = threading.Thread(target=watch, args=[numbers])
        watching.start()
        watching.join()
    may_leave.set()
    saving.join()
    assert seen == {"main": Wait("backward", is_blocked=False), "saving": Wait("save('a.pt')", is_blocked=False)}
    assert wait_of_thread(saving.ident) is None


def test_an_error_knows_the_wait_that_it_has_left() -> None:
    """The report of a collective that has failed is written when its block has ended."""
    with pytest.raises(RuntimeError) as caught, waiting_for("save('a.pt')"), waiting_for("backward", is_blocked=True):
        raise RuntimeError("connection closed by peer")
    assert wait_of_error(caught.value) == Wait("backward", is_blocked=True)
    assert wait_of_error(RuntimeError()) is None
    assert wait_of_this_thread() is None
