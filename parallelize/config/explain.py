"""Text of `explain()`: the processes, devices, precision and launcher that a call would use."""

from __future__ import annotations

from collections.abc import Iterator

from parallelize.cluster.world import World
from parallelize.config.layout import Layout
from parallelize.plugins import registry

__all__ = ["explain_call", "precision_summary"]


def explain_call(layout: Layout, world: World | None, *, name: str, queue: str | None = None) -> str:
    """Return a text table with the processes, devices and options of a call, computed before it starts.

    Args:
        layout: processes of the call and their devices.
        world: rank and world size that a launcher has assigned to this process; None: no launcher has started it.
        name: name of the function.
        queue: name of the launcher that submits the call to a batch queue; None: the call runs now.
    """
    config = layout.config
    count = config.backend.devices_per_process
    per = config.backend.process_per if count is None else f"{count} devices"
    rows = {
        "backend": f"{config.backend.name} (one process per {per})",
        "processes": f"{layout.num_nodes} node(s) x {layout.local_world_size} = {layout.world_size}",
        "devices": _devices(layout),
        "starts": _start_text(layout, world)
        if queue is None
        else f"nothing here: a job of {layout.num_nodes} node(s), by {queue}",
        "collectives": layout.process_group_backend,
        "precision": precision_summary(layout).replace(": ", "\n", 1).replace("; ", "\n"),
        "seed": "none: global generators are not seeded" if config.seed is None else str(config.seed),
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
    """Return a text with the devices of each local rank on a line; a single line if all have the same devices."""
    drives = [", ".join(str(device) for device in devices) for devices in layout.devices]
    if len(drives) > 1 and len(set(drives)) == 1:
        return f"{drives[0]}, for each of {len(drives)} local ranks"
    return "\n".join(f"local rank {rank}: {devices}" for rank, devices in enumerate(drives))


def precision_summary(layout: Layout) -> str:
    """Return a one-line description of the dtypes that a model computes in."""
    if layout.config.amp is None:
        return "fp32"
    precision = registry.get("precision", layout.config.amp_engine)()
    return precision.describe(layout.config.amp, device_type=layout.device_type)


def _start_text(layout: Layout, world: World | None) -> str:
    if world is not None:
        return f"nothing: a launcher has started this process as rank {world.rank} of {world.world_size}"
    if layout.world_size == 1:
        return "nothing: runs in the calling process"
    launcher = layout.config.launcher
    return f"{layout.local_world_size} processes on this node, by {launcher.name if launcher else 'local'}"
