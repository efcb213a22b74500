"""Environment variables of the workers: the caller's, with CUDA_VISIBLE_DEVICES and OMP_NUM_THREADS set."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from parallelize.cluster.devices import MASKS, compose_visible_devices
from parallelize.config.layout import Layout

__all__ = ["available_cores", "terminal_columns", "worker_environ"]


def worker_environ(
    environ: Mapping[str, str], layout: Layout, *, cores: int, columns: int | None = None, interface: str | None = None
) -> dict[str, str]:
    """Return the environment variables for all workers of this node; rank variables are not included.

    Args:
        environ: the caller's variables; only CUDA_VISIBLE_DEVICES is overwritten.
        layout: the processes of the node.
        cores: processor cores that this node's processes may use.
        columns: width of the caller's terminal, for progress bars; None: no terminal.
        interface: network interface to the other nodes; None: gloo chooses one.
    """
    changed = dict(environ)
    mask = MASKS.get(layout.device_type)
    if mask is not None:
        changed[mask] = compose_visible_devices(environ.get(mask), layout.indices)
    changed["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS") or str(max(1, cores // layout.local_world_size))
    if columns is not None:
        changed.setdefault("COLUMNS", str(columns))
    if interface is not None:
        changed.setdefault("GLOO_SOCKET_IFNAME", interface)
    return changed


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def terminal_columns() -> int | None:
    """Return the width of the terminal on stderr; None: stderr is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stderr is not None and sys.stderr.isatty() else None
