"""Stop signals of a caller while its workers run."""

from __future__ import annotations

import signal

import pytest

from parallelize.launchers.stop_signals import StopSignals


def test_a_handler_of_another_language_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where R or Julia has started Python and handles a signal, `getsignal` returns None, which `signal` refuses."""
    handlers = {signal.SIGINT: None, signal.SIGHUP: signal.SIG_IGN}
    monkeypatch.setattr(signal, "getsignal", lambda number: handlers.get(number, signal.SIG_DFL))
    handled = {}
    monkeypatch.setattr(signal, "signal", lambda number, handler: handled.setdefault(number, []).append(handler))
    signals = StopSignals()
    with signals.handled():
        pass
    assert handled[signal.SIGTERM] == [signals.stop, signal.SIG_DFL]
    assert not handled.keys() & handlers.keys()
