"""should_stop() in one process, and the handlers of a call inside a user's own Slurm job."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from parallelize import should_stop
from parallelize.cluster.slurm_allocation import STOP_FILE
from parallelize.worker.preemption import heeding


@pytest.fixture
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "65")


def test_nobody_asks_outside_of_a_job() -> None:
    """No file is named, no handler installed."""
    with heeding():
        assert STOP_FILE not in os.environ
        assert not should_stop()


@pytest.mark.usefixtures("in_a_job")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_says_so(number: signal.Signals) -> None:
    """True from the signal on; afterwards the signal is the system's again (the leak guard looks, too)."""
    with heeding():
        assert not should_stop()
        signal.raise_signal(number)
        assert should_stop()
        assert should_stop()
    assert signal.getsignal(number) is signal.SIG_DFL
    assert not should_stop()


@pytest.mark.usefixtures("in_a_job")
def test_a_users_handler_stays() -> None:
    """Her own handler for USR1 hears of it, and nobody else."""
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        with heeding():
            signal.raise_signal(signal.SIGUSR1)
            assert not should_stop()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [1]


@pytest.mark.usefixtures("in_a_job")
def test_another_thread_touches_nothing() -> None:
    """Python lets only the main thread have handlers."""
    found = []

    def look() -> None:
        with heeding():
            found.append((STOP_FILE in os.environ, signal.getsignal(signal.SIGUSR1)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(False, signal.SIG_DFL)]
