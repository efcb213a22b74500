"""DataLoaders of these tests start workers."""

from __future__ import annotations

import pytest
from ranks import keep_sigchld_handler


@pytest.fixture(scope="module", autouse=True)
def workers_may_start() -> None:
    """Install torch's handler of SIGCHLD before the first test, whose guard would take it for a leak."""
    keep_sigchld_handler()
