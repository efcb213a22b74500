"""The variables of a worker: the caller's, with its GPUs and its share of the cores."""

from __future__ import annotations

from collections.abc import Mapping

from parallelize.cluster.devices import compose_mask
from parallelize.config.layout import Layout

__all__ = ["worker_environ"]

_MASK = "CUDA_VISIBLE_DEVICES"


def worker_environ(
    environ: Mapping[str, str], layout: Layout, *, cores: int, columns: int | None = None, interface: str | None = None
) -> dict[str, str]:
    """What every worker of a node finds in its environment, besides its ranks.

    Args:
        environ: the caller's variables; what the user has set there stays.
        layout: the processes of the node.
        cores: processor cores this node's processes may use.
        columns: width of the caller's terminal, for progress bars; None: it has none.
        interface: the network interface that leads to the other nodes; None: left for gloo to find.
    """
    changed = dict(environ)
    if layout.device_type == "cuda":
        changed.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        changed[_MASK] = compose_mask(environ.get(_MASK), layout.indices)
    changed["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS") or str(max(1, cores // layout.local_world_size))
    if columns is not None:
        changed.setdefault("COLUMNS", str(columns))
    if interface is not None:
        changed.setdefault("GLOO_SOCKET_IFNAME", interface)
    return changed
