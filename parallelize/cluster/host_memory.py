"""The memory of this host that its processes can still take, by the kernel and the cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _CgroupFiles:
    """The names that a version of cgroups gives to its files.

    Args:
        limit: file with the bytes that the processes of the cgroup may take; "max": no limit.
        usage: file with the bytes that they take, pages of files included.
        cache: line of memory.stat with the bytes of files that the kernel frees when it needs them.
    """

    limit: str
    usage: str
    cache: str


_VERSION_1 = _CgroupFiles(
    limit="memory.limit_in_bytes", usage="memory.usage_in_bytes", cache="total_inactive_file"
)
_VERSION_2 = _CgroupFiles(limit="memory.max", usage="memory.current", cache="inactive_file")


def available_host_bytes(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> float:
    """Return the bytes that all processes of this host together can still take.

    A container, or a job of Slurm or Kubernetes, is limited by its cgroup: the kernel kills one of
    its processes when it takes more, although the host has free memory.

    Args:
        proc: where the kernel shows processes and memory.
        cgroups: where the kernel shows cgroups.

    Returns:
        The least of what the host and each cgroup of this process leave; infinity if no file says
        so, as on macOS.
    """
    available = float("inf")
    memory = _texts_by_name(proc / "meminfo", separator=":")
    if "MemAvailable" in memory:
        available = 1024 * float(memory["MemAvailable"].split()[0])
    for folder, files in _folders_of_process(proc, cgroups):
        available = min(available, _available_in(folder, files))
    return max(0.0, available)


def _folders_of_process(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield the folder of each cgroup that limits the memory of this process.

    A container often sees its own cgroup as the root, but its path as the host has it, which does
    not exist there. So the root is looked at in any case.
    """
    for line in _lines(proc / "self" / "cgroup"):
        # Such as "4:memory:/user.slice" of version 1, or "0::/user.slice" of version 2.
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, files = cgroups / "memory", _VERSION_1
        elif not controllers:
            root, files = cgroups, _VERSION_2
        else:
            continue
        yield root, files
        # The limits of all parents hold, too.
        folder = root
        for name in Path(path).parts[1:]:
            folder /= name
            yield folder, files


def _available_in(folder: Path, files: _CgroupFiles) -> float:
    """Return the bytes that a cgroup leaves to its processes; infinity: it has no limit."""
    limit = _lines(folder / files.limit)
    usage = _lines(folder / files.usage)
    if not limit or not usage or limit[0] == "max":
        return float("inf")
    cached = _texts_by_name(folder / "memory.stat", separator=" ").get(files.cache, "0")
    return float(limit[0]) - float(usage[0]) + float(cached)


def _texts_by_name(path: Path, *, separator: str) -> dict[str, str]:
    """Return the lines of a file that have the form "name, separator, text"."""
    texts = {}
    for line in _lines(path):
        name, _, text = line.partition(separator)
        texts[name] = text
    return texts


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
