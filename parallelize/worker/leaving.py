"""The end of a worker whose outcome is written: what the function has left in its process ends.

The caller has the value, and waits for the process for some seconds only.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback

from parallelize.hang_detection.stack_frames import call_site

LEAVE_GRACE_S = 5.0  # after the function has returned: time for threads and `atexit` functions
# A process in compiled code runs no Python, so that `_end_threads` cannot end it.
_COMPILED_CODE_GRACE_S = 1.2 * LEAVE_GRACE_S


def leave() -> None:
    """End this process after a grace, if it has not ended by itself until then."""
    timer = threading.Timer(LEAVE_GRACE_S, _end_threads)
    timer.daemon = True
    timer.start()
    # Descriptor 2, as sys.stderr may be another object by now.
    faulthandler.dump_traceback_later(_COMPILED_CODE_GRACE_S, exit=True, file=2)


def _end_threads() -> None:
    """End a process that waits for threads which the function has left.

    The caller logs the last line of stderr.
    """
    frames = sys._current_frames()
    places = []
    for thread in threading.enumerate():
        if thread.daemon or thread is threading.main_thread() or thread.ident is None:
            continue
        frame = frames.get(thread.ident)
        if frame is not None:  # else the thread has ended just now
            places.append(f"{thread.name} at {call_site([*traceback.walk_stack(frame)])}")
    if places:
        sys.stderr.write(f"threads that the function has left were ended: {', '.join(places)}\n")
        os._exit(1)
