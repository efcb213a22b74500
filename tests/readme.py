"""Generated parts of README, the guides and the benchmarks' READMEs; `python tests/readme.py` rewrites them.

A part is between two markers, such as `<!-- support -->` and `<!-- end -->`, each in a line of its own. Figures from
`benchmarks/results` may also stand in a sentence: `<!-- figures: launch/second call -->0.09 s<!-- end -->`, but not at
the start of a line. `figures.NAMES` lists them. README's small table of what this library costs, with the machine and
the dates below it, is between `<!-- cost -->` and `<!-- end -->`.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

import changes
import figures

from parallelize.plugins import registry
from parallelize.precision.levels import TABLE

__all__ = [
    "BENCHMARKS",
    "CONTRIBUTING",
    "GUIDES",
    "MIGRATION",
    "PAGES",
    "README",
    "ROOT",
    "SKILL",
    "changed",
    "difference",
    "migrations",
    "proofs",
    "skill",
    "support",
    "written",
]

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MIGRATION = ROOT / "examples/13_migration/README.md"
GUIDES = sorted((ROOT / "examples/guides").glob("*.md"))
CONTRIBUTING = ROOT / ".github/CONTRIBUTING.md"
BENCHMARKS = [ROOT / "benchmarks/README.md", *sorted((ROOT / "benchmarks").glob("*/README.md"))]
PAGES = [README, MIGRATION, CONTRIBUTING, *GUIDES, *BENCHMARKS]
SKILL = ROOT / ".github/skills/parallelize/SKILL.md"


def support() -> str:
    """Return Markdown tables of the backends and precision engines, from what each plug-in declares."""
    precisions = {name: registry.find("precision", name) for name in registry.names("precision")}
    rows = [["`backend=`", "one process per", "devices", "nodes", *(f"`amp=`, {name} engine" for name in precisions)]]
    for name in registry.names("backends"):
        backend = registry.find("backends", name)
        nodes = "any number" if backend.max_nodes is None else str(backend.max_nodes)
        if backend.multi_node_fallback is not None:
            nodes += f"; on more, `{backend.multi_node_fallback}` takes over with a warning"
        levels = [", ".join(sorted(backend.amp.get(engine, ()))) or "refused" for engine in precisions]
        rows.append([f"`{name}`", backend.process_per, ", ".join(sorted(backend.device_types)), nodes, *levels])
    engines = [["`amp_engine=`", "half precision on", "`amp=True` means"]]
    for name, precision in precisions.items():
        types = [
            f"{device}: {', '.join(sorted(map(_short, each)))}" for device, each in sorted(precision.dtypes.items())
        ]
        engines.append([f"`{name}`", "; ".join(types), f"`{precision.default_level}`"])
    return f"{_table(rows)}\n\n{_table(engines)}"


def levels() -> str:
    """Return the table of the mixed-precision levels."""
    rows = {level: row.cells() for level, row in TABLE.items()}
    return _table([["level", *rows["O0"]], *([level, *cells.values()] for level, cells in rows.items())])


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def program(name: str) -> str:
    """Return an example as a Markdown block."""
    return f"```python\n{(ROOT / 'examples' / name).read_text()}```"


def changed() -> str:
    """Return the diff of the example and its single-device version as a Markdown block, ignoring indentation."""
    return difference(ROOT / "examples/01_digits_single.py", ROOT / "examples/01_digits.py")


def migrations() -> dict[str, str]:
    """Return the diff of the two scripts in each folder of examples/13_migration, by folder."""
    return {
        path.name: difference(path / "before.py", path / "after.py")
        for path in sorted(MIGRATION.parent.iterdir())
        if path.is_dir()
    }


def difference(old: Path, new: Path) -> str:
    """Return the diff of two scripts as a Markdown block, ignoring indentation."""
    before, after = old.read_text().splitlines(), new.read_text().splitlines()
    lines = difflib.unified_diff([line.strip() for line in before], [line.strip() for line in after], n=2, lineterm="")
    return "\n".join(["```diff", *_indented(list(lines), before, after), "```"])


def _indented(lines: list[str], before: list[str], after: list[str]) -> list[str]:
    """Restore the indentation of the lines in a diff of stripped lines."""
    shown: list[str] = []
    old = new = 0
    for line in lines[2:]:  # without the two file names
        header = re.fullmatch(r"@@ -(\d+)\S* \+(\d+)\S* @@", line)
        if header is not None:
            old, new = int(header[1]), int(header[2])
            if shown:
                shown = [*_without_blank_end(shown), " ..."]
        elif line.startswith("-"):
            shown.append(f"-{before[old - 1]}".rstrip())
            old += 1
        else:
            shown_line = f"{line[0]}{after[new - 1]}".rstrip()
            if shown_line or shown[-1:] != [" ..."]:
                shown.append(shown_line)
            old, new = old + (line[0] == " "), new + 1
    return shown


def _without_blank_end(lines: list[str]) -> list[str]:
    """Return lines without the blank ones at their end."""
    return "\n".join(lines).rstrip().splitlines()


def peers() -> str:
    """Return the table that compares this library with others, from benchmarks/peers/answers.json."""
    found = json.loads((ROOT / "benchmarks" / "peers" / "answers.json").read_text())
    rows = [["", *(f"{name} {version}" for name, version in found["versions"].items())]]
    for row in found["rows"].values():
        cells = (_SHORT.get(answer, answer).replace("|", "\\|") for answer in row["answers"].values())
        rows.append([f"[{row['says']}](../../{row['proof'].partition('::')[0]})", *cells])
    return _table(rows)


def proofs() -> list[str]:
    """Return the tests that prove the claims for this library in that table, as path::name."""
    found = json.loads((ROOT / "benchmarks" / "peers" / "answers.json").read_text())
    return [row["proof"] for row in found["rows"].values()]


_SHORT = {"yes": "**yes**", "leaves it to you": "(yours)"}


def skill() -> str:
    """Return the cheat sheet as a skill file for agents that write code."""
    what = "Run a PyTorch training function on several GPUs or machines with the package parallelize."
    return f"---\nname: parallelize\ndescription: {what}\n---\n\n{(ROOT / 'examples/guides/cheatsheet.md').read_text()}"


def written(text: str) -> str:
    """Return the text of a page with everything between markers regenerated."""
    for name, block in {
        "changed": changed(),
        "logging": program("17_logging.py"),
        "support": support(),
        "levels": levels(),
        "peers": peers(),
        "cost": figures.costs(),
        "changes of torch": changes.table(changes.OF_TORCH),
        "changes of Python": changes.table(changes.OF_PYTHON),
        **migrations(),
    }.items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, b=block: f"{m[1]}{b}\n{m[2]}", text, flags=re.DOTALL
        )
    return figures.written(text)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path.read_text()))
    SKILL.parent.mkdir(parents=True, exist_ok=True)
    SKILL.write_text(skill())
