"""Actors of a call: one on each node, which runs the elastic launcher, and one that keeps the output."""

from __future__ import annotations

import io
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from parallelize.call.log_settings import LogSettings
from parallelize.call.torch_settings import TorchSettings
from parallelize.cluster.world import Node
from parallelize.errors import MissingDependencyError
from parallelize.launchers.batch_launcher import run_on_node

__all__ = ["KEPT_CHARACTERS", "NodeActor", "Output", "import_ray"]

KEPT_CHARACTERS = 4 << 20  # of a job's output


def import_ray() -> Any:
    """Return Ray's package; raise MissingDependencyError without it."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as exc:
        raise MissingDependencyError(
            "ray is not installed", why="launcher='ray' runs calls on Ray", fix="pip install 'parallelize[ray]'"
        ) from exc
    return ray


class Output:
    """Actor that keeps the last output of a job."""

    def __init__(self) -> None:
        self._chunks: list[tuple[str, str]] = []
        self._first = self._size = 0

    def write(self, stream: str, text: str) -> None:
        """Keep a text that was written to "stdout" or "stderr"."""
        self._chunks.append((stream, text))
        self._size += len(text)
        while self._size > KEPT_CHARACTERS:
            self._size -= len(self._chunks.pop(0)[1])
            self._first += 1

    def read(self, start: int) -> tuple[int, list[tuple[str, str]]]:
        """Return the texts from number `start` on, and the number of the next one."""
        return self._first + len(self._chunks), self._chunks[max(0, start - self._first) :]


class _OutputStream(io.TextIOBase):
    """sys.stdout or sys.stderr of a node's actor; what its fd gets is in Ray's logs."""

    def __init__(self, output: Any, name: str) -> None:
        self._output, self._name = output, name

    def write(self, text: str) -> int:
        self._output.write.remote(self._name, text)
        return len(text)


class NodeActor:
    """Runs the call on one node of the cluster."""

    def __init__(self, index: int, output: Any, threads: str) -> None:
        self._index, self._output = index, output
        # Ray sets the variable to all cores of the actor, which its workers share.
        self._environ = {**os.environ, "OMP_NUM_THREADS": threads}
        sys.stdout, sys.stderr = _OutputStream(output, "stdout"), _OutputStream(output, "stderr")

    def rendezvous(self) -> tuple[str, int]:
        """Return this node's address and a free port."""
        address = import_ray().util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((address, 0))
            return str(address), int(free.getsockname()[1])

    def run(self, call: bytes, settings: TorchSettings, logs: LogSettings, address: tuple[str, int] | None) -> bytes:
        """Run the call; return its outcomes, or what it has raised, for `read_result`."""
        settings.apply()
        settings.apply_default_device()
        logs.apply()
        node = None if address is None else Node(*address, self._index)
        with tempfile.TemporaryDirectory(prefix="parallelize-") as folder:
            task = Path(folder, "task")
            task.write_bytes(call)
            result = run_on_node(task, node=node, environ=self._environ)
        import_ray().get(self._output.read.remote(0))  # after all writes of this actor
        return result
