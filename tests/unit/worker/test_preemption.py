"""should_stop() in one process, and the signal handlers of a call in a Slurm job that the user has submitted."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from parallelize import should_stop
from parallelize.cluster.slurm_allocation import STOP_FILE_VARIABLE
from parallelize.worker.preemption import handle_stop_signals


@pytest.fixture
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "65")


def test_outside_of_a_job_no_handler_is_installed() -> None:
    """Outside of a Slurm job, the variable with the path of the stop file is not set either."""
    with handle_stop_signals():
        assert STOP_FILE_VARIABLE not in os.environ
        assert not should_stop()


@pytest.mark.usefixtures("in_a_job")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_makes_should_stop_true(number: signal.Signals) -> None:
    """should_stop() is true from the signal to the end of the call, which restores the default handler."""
    with handle_stop_signals():
        assert not should_stop()
        signal.raise_signal(number)
        assert should_stop()
        assert should_stop()
    assert signal.getsignal(number) is signal.SIG_DFL
    assert not should_stop()


@pytest.mark.usefixtures("in_a_job")
def test_a_users_handler_stays() -> None:
    """A handler that the user has installed for USR1 is called instead of ours."""
    calls = []
    before = signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    try:
        with handle_stop_signals():
            signal.raise_signal(signal.SIGUSR1)
            assert not should_stop()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert calls == [1]


@pytest.mark.usefixtures("in_a_job")
def test_in_another_thread_no_handler_is_installed() -> None:
    """A call in another thread installs no handlers, because Python allows them in the main thread only."""
    seen = []

    def call() -> None:
        with handle_stop_signals():
            seen.append((STOP_FILE_VARIABLE in os.environ, signal.getsignal(signal.SIGUSR1)))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert seen == [(False, signal.SIG_DFL)]
