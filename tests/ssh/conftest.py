"""Two hosts for all tests in this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sshd import SSHD, Hosts


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts that `ssh` reaches."""
    if not Path(SSHD).exists():
        pytest.skip("no sshd: install openssh-server")
    found = Hosts(tmp_path_factory.mktemp("ssh"))
    try:
        found.wait()
        yield found
    finally:
        found.close()
