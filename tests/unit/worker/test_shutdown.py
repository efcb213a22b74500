"""The handler of stop signals in a worker."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, signal, threading, time
from parallelize.worker.shutdown import StopHandler

StopHandler(0, has_accelerator=True).install()
watcher = next(thread for thread in threading.enumerate() if thread.name == "parallelize-stop")
signal.signal(signal.SIGUSR1, lambda *_: None)
os.kill(os.getpid(), signal.SIGUSR1)
watcher.join(1.0)
print(watcher.is_alive())
"""


def test_a_signal_of_the_users_leaves_the_watch_for_stop_signals() -> None:
    """Python tells the watching thread of every signal that has a handler."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
