"""Result of a benchmark run: its Markdown tables as data, the machine, and an SVG plot of the ratios.

A benchmark only has to print tables. A ratio is a cell with "1.23x" in it, or a number in a column with "ratio" in its
title.
"""

from __future__ import annotations

import html
import itertools
import math
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["Ratio", "Table", "machine", "plot", "ratios_of", "tables_of"]

PEERS = ("accelerate", "lightning-fabric", "pytorch-ignite", "ray", "torchgpipe", "torchmonarch", "torchrunx")
_TIMES = re.compile(r"(\d+(?:\.\d+)?)x\b")
_NUMBER = re.compile(r"\d+(?:\.\d+)?$")


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge the numbers; without name, address or paths of the machine."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    peers = {name: _version(name) for name in PEERS}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parallelize": _version("parallelize"),
        "peers": {name: version for name, version in peers.items() if version is not None},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@dataclass(frozen=True)
class Table:
    """One Markdown table, with cells as printed.

    Args:
        title: the last line of text before the table.
        columns: cells of the first row.
        rows: cells of the other rows.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]


def tables_of(text: str) -> list[Table]:
    """Parse the tables in the output of a benchmark."""
    tables: list[Table] = []
    title, lines = "", iter([*text.splitlines(), ""])
    for line in lines:
        if not line.startswith("|"):
            title = line.strip() or title
            continue
        block = [line, *itertools.takewhile(lambda other: other.startswith("|"), lines)]
        cells = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in block]
        tables.append(Table(title, cells[0], [row for row in cells[1:] if not _is_rule(row)]))
    return tables


def _is_rule(row: Iterable[str]) -> bool:
    return all(re.fullmatch(r":?-+:?", cell) for cell in row)


@dataclass(frozen=True)
class Ratio:
    """One bar of the plot: a label, and the ratio to the reference."""

    label: str
    value: float


def ratios_of(tables: Iterable[Table]) -> list[Ratio]:
    """Return every ratio in the tables, labelled with its row and column."""
    return [ratio for table in tables for row in table.rows for ratio in _of_row(table, row)]


def _of_row(table: Table, row: list[str]) -> Iterator[Ratio]:
    name = ", ".join(_name(table, row))
    for column, cell in zip(table.columns, row, strict=False):
        match = _TIMES.search(cell)
        if match is not None:
            yield Ratio(f"{name}: {column}", float(match[1]))
        elif "ratio" in column and _NUMBER.match(cell):
            yield Ratio(f"{name}: {column}", float(cell))


def _name(table: Table, row: list[str]) -> Iterator[str]:
    """Yield the parts of a row's label: its cells before the first measurement."""
    if " " in table.columns[0]:
        yield table.columns[0]
    for column, cell in zip(table.columns, row, strict=False):
        if re.match(r"\d+\.\d", cell) or _TIMES.search(cell) or re.search(r"\bms\b", column):
            return
        if cell.isdigit():
            yield f"{cell} {column}"
        elif cell not in ("yes", "no"):
            yield cell


def plot(ratios: list[Ratio], title: str) -> str:
    """Return an SVG bar chart on a logarithmic scale; bars start at 1.0, to the left or right."""
    shown = [ratio for ratio in ratios if ratio.value > 0]
    widest = max((abs(math.log(ratio.value)) for ratio in shown), default=0.0) or 1.0
    middle, span, step = 640, 150, 20
    height = 60 + step * len(shown)
    parts = [f'<text x="12" y="24" font-size="14">{html.escape(title)}</text>']
    for number, ratio in enumerate(shown):
        y, length = 40 + step * number, span * abs(math.log(ratio.value)) / widest
        left = middle if ratio.value >= 1 else middle - length
        colour = "#0a64a4" if "parallelize" in ratio.label or "balanced" in ratio.label else "#999"
        label = f'<text x="{middle - span - 12}" y="{y + 12}" text-anchor="end">{html.escape(ratio.label)}</text>'
        parts.append(label)
        parts.append(
            f'<rect x="{left:.1f}" y="{y + 2}" width="{max(length, 1):.1f}" height="{step - 6}" fill="{colour}"/>'
        )
        parts.append(f'<text x="{middle + span + 8}" y="{y + 12}">{ratio.value:g}x</text>')
    body = "\n".join(parts)
    style = 'font-family="sans-serif" font-size="11"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="860" height="{height}" {style}>
<rect width="860" height="{height}" fill="white"/>
{body}
<path d="M{middle} 36V{height - 16}" stroke="#333"/>
<text x="{middle}" y="{height - 4}" text-anchor="middle">1x</text>
</svg>
"""
