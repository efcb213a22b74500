"""Text of `explain()`: the processes, devices, precision and launcher that a call would use."""

from __future__ import annotations

from parallelize.config.layout import Layout


def explain(layout: Layout, *, name: str, queue: str | None = None) -> str:
    """Return a text table with the processes, devices and options of a call, computed before it starts.

    Args:
        layout: processes of the call and their devices.
        name: name of the function.
        queue: name of the launcher that makes the call on other machines; None: it runs on this one.
    """
    config = layout.config
    count, launcher = (
        config.backend.devices_per_process,
        config.launcher.name if config.launcher else "local",
    )
    per = f"{count} devices" if count else config.backend.process_per
    if queue is not None:
        starts = f"nothing here: {layout.num_nodes} node(s), by {queue}"
    elif layout.world is not None:
        world = layout.world
        starts = f"nothing: a launcher has started this process as rank {world.rank} of {world.world_size}"
    elif layout.world_size == 1:
        starts = "nothing: runs in the calling process"
    else:
        starts = f"{layout.local_world_size} processes on this node, by {launcher}"
    drives = [", ".join(map(str, driven)) for driven in layout.devices]
    devices = "\n".join(f"local rank {rank}: {each}" for rank, each in enumerate(drives))
    if len(drives) > 1 and len(set(drives)) == 1:  # on the CPU, or on one GPU
        devices = f"{drives[0]}, for each of {len(drives)} local ranks"
    rows = {
        "backend": f"{config.backend.name} (one process per {per})\n{config.backend.note}".strip(),
        "processes": f"{layout.num_nodes} node(s) x {layout.local_world_size} = {layout.world_size}",
        "devices": devices,
        "starts": starts,
        "collectives": layout.process_group_backend,
        "precision": precision_summary(layout).replace(": ", "\n", 1).replace("; ", "\n"),
        "seed": "none: global generators are not seeded"
        if config.seed is None
        else str(config.seed),
        "timeout": f"{config.timeout.total_seconds():g} s",
        "restarts": str(config.max_restarts),
        "logs": config.logs,
    }
    if layout.world_size > 1:
        rows["inside"] = (
            "rank 0 logs batches, traffic and memory when training begins, at logging.INFO"
        )
    # Of several lines, the others are indented below the first.
    texts = (f"  {row:<11}  " + text.replace("\n", f"\n{'':<17}") for row, text in rows.items())
    return "\n".join(
        [f"{name} would run as", *texts, *(f"  note: {each}" for each in layout.warnings)]
    )


def precision_summary(layout: Layout) -> str:
    """Return a one-line description of the dtypes that a model computes in."""
    config = layout.config
    return (
        "fp32"
        if config.amp is None
        else config.amp_engine().describe(config.amp, device_type=layout.device_type)
    )
