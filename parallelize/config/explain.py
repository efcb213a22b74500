"""What a call would do, as text for a person: processes, devices, precision, what was changed on her behalf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parallelize.cluster.world import World
from parallelize.config.layout import Layout
from parallelize.plugins import registry
from parallelize.plugins.base import Precision

__all__ = ["explanation", "precision_row"]


def explanation(layout: Layout, world: World | None, *, name: str, queue: str | None = None) -> str:
    """A short table of what is known before anything starts.

    Args:
        layout: the processes and what each drives.
        world: where a launcher has placed this process; None: nobody has.
        name: the function's.
        queue: name of the launcher that takes the call for later; None: none does.
    """
    config = layout.config
    rows = {
        "backend": f"{config.backend.name} (one process per {config.backend.process_per})",
        "processes": f"{layout.num_nodes} node(s) x {layout.local_world_size} = {layout.world_size}",
        "devices": _devices(layout),
        "starts": _how(layout, world)
        if queue is None
        else f"nothing here: a job of {layout.num_nodes} node(s), by {queue}",
        "collectives": layout.process_group_backend,
        "precision": precision_row(layout).replace(": ", "\n", 1).replace("; ", "\n"),
        "seed": "none: no global generator is touched" if config.seed is None else str(config.seed),
        "timeout": f"{config.timeout.total_seconds():g} s",
        "restarts": str(config.max_restarts),
        "logs": config.logs,
    }
    if layout.world_size > 1:
        rows["inside"] = "rank 0 logs batches, traffic and memory when training begins, at logging.INFO"
    return "\n".join([f"{name} would run as", *_lines(rows), *(f"  note: {warning}" for warning in layout.warnings)])


def _lines(rows: dict[str, str]) -> Iterator[str]:
    width = max(len(row) for row in rows)
    for row, text in rows.items():
        first, *others = text.split("\n")
        yield f"  {row:<{width}}  {first}"
        yield from (f"  {'':<{width}}    {other}" for other in others)


def _devices(layout: Layout) -> str:
    """On the CPU one word for all; else what each process drives, a line each."""
    drives = [", ".join(str(device) for device in devices) for devices in layout.devices]
    if len(drives) > 1 and len(set(drives)) == 1:
        return f"{drives[0]}, for each of {len(drives)} local ranks"
    return "\n".join(f"local rank {rank}: {devices}" for rank, devices in enumerate(drives))


def precision_row(layout: Layout) -> str:
    """In which types a model computes, as one line."""
    if layout.config.amp is None:
        return "fp32"
    find: Any = registry.find
    precision: Precision = find("precision", layout.config.amp_engine)()
    return precision.describe(layout.config.amp, device_type=layout.device_type)


def _how(layout: Layout, world: World | None) -> str:
    if world is not None:
        return f"nothing: a launcher has placed this process as rank {world.rank} of {world.world_size}"
    if layout.world_size == 1:
        return "nothing: runs in the calling process"
    launcher = layout.config.launcher
    return f"{layout.local_world_size} processes on this node, by {launcher.name if launcher else 'elastic'}"
