"""README's picture, `results/overview.svg`, drawn from results of the benchmarks launch, faults and step_overhead.

`python benchmarks/picture.py` writes it. README's table has numbers of the same files (tests/figures.py), and a test
fails if the picture was not drawn again after a run.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Panel", "draw", "drawn", "panels"]

_RESULTS = Path(__file__).parent / "results"
_WIDTH, _LEFT, _BAR, _ROW = 860, 300, 440, 20
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Panel:
    """One group of bars, on a linear scale that starts at 0.

    Args:
        title: what was measured.
        bars: label -> value.
        unit: appended to the values.
    """

    title: str
    bars: dict[str, float]
    unit: str = ""


def panels(launch: Any, faults: Any, step_overhead: Any) -> list[Panel]:
    """Return the panels of three results, which `suite.py` has written."""
    notes = {"yes": "", "no": " (fork: not after CUDA)"}
    calls = {row[""] + notes[row["after CUDA"]]: _first_number(row["second call"]) for row in _rows(launch)}
    reports = {}
    for row in _rows(faults):
        if row["a rank"] in ("SIGKILL", "another collective than the other"):
            for name in ("parallelize", "torchrun"):
                reports[f"{row['a rank'].partition(' than')[0]}: {name}"] = _first_number(row[name])
    steps = {
        row["loop"]: round(float(row["ratio of CPU time"]), 2)
        for row in _rows(step_overhead)
        if (row["model"], row["ranks"], row["level"]) == ("GPT of 6 layers", "2", "O0") and "tokens" not in row["loop"]
    }
    return [
        Panel("Second call of a function in two processes", calls, " s"),
        Panel("From a rank's fault to its report", reports, " s"),
        Panel("CPU time of a step of a GPT, two ranks; DistributedDataParallel by hand is 1", steps),
    ]


def _rows(result: Any) -> Iterator[dict[str, str]]:
    for table in result["tables"]:
        for row in table["rows"]:
            yield dict(zip(table["columns"], row, strict=False))


def _first_number(cell: str) -> float:
    found = _NUMBER.match(cell)
    return float(found[0]) if found else 0.0


def draw(shown: Iterable[Panel], title: str) -> str:
    """Return the panels as SVG, one below the other."""
    parts, y = [], 16
    for panel in shown:
        y += 14
        parts.append(f'<text x="12" y="{y}" font-size="13" font-weight="bold">{html.escape(panel.title)}</text>')
        widest = max(panel.bars.values())
        y += 8
        for label, value in panel.bars.items():
            color = "#0a64a4" if "parallelize" in label else "#999"
            length = max(_BAR * value / widest, 1)
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{html.escape(label)}</text>')
            parts.append(f'<rect x="{_LEFT}" y="{y + 2}" width="{length:.1f}" height="{_ROW - 6}" fill="{color}"/>')
            parts.append(f'<text x="{_LEFT + length + 6:.1f}" y="{y + 12}">{value:g}{panel.unit}</text>')
            y += _ROW
        y += 10
    parts.append(f'<text x="12" y="{y + 4}" fill="#666">{html.escape(title)}</text>')
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 16}" font-family="sans-serif"
 font-size="11">
<rect width="{_WIDTH}" height="{y + 16}" fill="white"/>
{body}
</svg>
"""


def drawn() -> str:
    """Return the picture of the saved results."""
    results = [json.loads((_RESULTS / f"{name}.json").read_text()) for name in ("launch", "faults", "step_overhead")]
    facts = results[0]["machine"]
    days = sorted(result["machine"]["date"] for result in results)
    where = f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}, gloo"
    return draw(panels(*results), f"{where}; {days[0]} to {days[-1]}; benchmarks/results")


if __name__ == "__main__":
    (_RESULTS / "overview.svg").write_text(drawn())
