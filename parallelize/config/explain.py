"""Text of `explain()`: the processes, devices, precision and launcher that a call would use."""

from __future__ import annotations

from parallelize.config.layout import Layout

# A row has its name in this many columns; further lines of its text are indented below the first.
_WIDTH_OF_NAMES = 11
_INDENT = "\n" + " " * (_WIDTH_OF_NAMES + 6)


def explain(layout: Layout, *, name: str, queue: str | None = None) -> str:
    """Return a table of the processes, devices and options of a call, made before it starts.

    Args:
        layout: processes of the call and their devices.
        name: name of the function.
        queue: launcher that makes the call on other machines; None: it runs on this one.
    """
    config = layout.config
    processes_of_node = layout.local_world_size
    seed = "none: global generators are not seeded"
    if config.seed is not None:
        seed = str(config.seed)
    rows = {
        "backend": _backend(layout),
        "processes": f"{layout.num_nodes} node(s) x {processes_of_node} = {layout.world_size}",
        "devices": _devices(layout),
        "starts": _starts(layout, queue),
        "collectives": layout.process_group_backend,
        "precision": precision_summary(layout).replace(": ", "\n", 1).replace("; ", "\n"),
        "seed": seed,
        "timeout": f"{config.timeout.total_seconds():g} s",
        "restarts": str(config.max_restarts),
        "logs": config.logs,
    }
    if layout.world_size > 1:
        inside = "rank 0 logs batches, traffic and memory when training begins, at logging.INFO"
        rows["inside"] = inside
    lines = [f"{name} would run as"]
    for row, text in rows.items():
        lines.append(f"  {row:<{_WIDTH_OF_NAMES}}  {text}".replace("\n", _INDENT))
    lines.extend(f"  note: {warning}" for warning in layout.warnings)
    return "\n".join(lines)


def _backend(layout: Layout) -> str:
    """Return the name of the backend, what one process drives, and what the backend adds."""
    backend = layout.config.backend
    driven: str = backend.process_per
    if backend.devices_per_process:
        driven = f"{backend.devices_per_process} devices"
    return f"{backend.name} (one process per {driven})\n{backend.note}".strip()


def _devices(layout: Layout) -> str:
    """Return a line for each local rank; one line if all have the same devices."""
    devices_of_ranks = [", ".join(map(str, devices)) for devices in layout.devices]
    # Ranks have the same devices on the CPU, or where several of them share a GPU.
    are_same = len(set(devices_of_ranks)) == 1
    if are_same and len(devices_of_ranks) > 1:
        return f"{devices_of_ranks[0]}, for each of {len(devices_of_ranks)} local ranks"
    lines = []
    for local_rank, text in enumerate(devices_of_ranks):
        lines.append(f"local rank {local_rank}: {text}")
    return "\n".join(lines)


def _starts(layout: Layout, queue: str | None) -> str:
    """Return what the call starts on this machine, and what starts it."""
    if queue is not None:
        return f"nothing here: {layout.num_nodes} node(s), by {queue}"
    if layout.world is not None:
        rank = f"rank {layout.world.rank} of {layout.world.world_size}"
        return f"nothing: a launcher has started this process as {rank}"
    if layout.world_size == 1:
        return "nothing: runs in the calling process"
    launcher = layout.config.launcher
    name = "local" if launcher is None else launcher.name
    return f"{layout.local_world_size} processes on this node, by {name}"


def precision_summary(layout: Layout) -> str:
    """Return a one-line description of the dtypes that a model computes in."""
    config = layout.config
    if config.amp is None:
        return "fp32"
    return config.amp_engine().describe(config.amp, device_type=layout.device_type)
