"""Runs the benchmarks that this machine supports, one after the other, and saves their results.

    tox run -e bench                          all, about half an hour on two cores
    tox run -e bench -- --only launch data    some
    tox run -e bench -- --quick --folder x    each for a few seconds, to see that it works; the numbers mean nothing

Each benchmark writes `results/<name>.json` (tables, machine, command) and `results/<name>.svg` (the ratios). The ratios
are printed at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from report import Table, machine, plot, ratios_of, tables_of

__all__ = ["BENCHMARKS", "Benchmark", "plot_of", "present", "run"]

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    """How to run a benchmark; `{folder}` in an argument is replaced by the folder of the results.

    Args:
        full: arguments for published numbers.
        quick: arguments with which it takes seconds.
        on_gpu: what it measures only on a GPU; "": nothing.
    """

    full: Sequence[str] = ()
    quick: Sequence[str] = ()
    on_gpu: str = ""


# A folder that is not listed runs without arguments and is left out by --quick.
BENCHMARKS = {
    "amp": Benchmark(
        quick=("--rounds", "1", "--size", "small", "--nets", "gpt", "--contenders", "torch.amp by hand", "parallelize"),
        on_gpu="a GPT of 124M parameters and a residual net in fp16 and bf16, with their memory",
    ),
    "auto": Benchmark(quick=("--models", "large embedding", "--steps", "3", "--rounds", "1")),
    "balanced": Benchmark(quick=("--models", "conv chain", "--no-host")),
    "checkpoint": Benchmark(
        full=("--rounds", "15"),
        quick=("--megabytes", "10", "--rounds", "1"),
        on_gpu="how long a save holds a loop on the GPU",
    ),
    "data": Benchmark(quick=("--rounds", "1"), on_gpu="(b): whether the copy of a batch is hidden"),
    "faults": Benchmark(quick=("--rounds", "1", "--faults", "killed")),
    "launch": Benchmark(
        quick=("--rounds", "1", "--measures", "first", "--contenders", "parallelize", "torch.multiprocessing.spawn")
    ),
    "logical": Benchmark(
        quick=("--rounds", "1", "--steps", "2", "--models", "8 convolutions", "--processes", "1", "--parts", "2")
    ),
    "overlap": Benchmark(
        quick=("--turns", "1", "--steps", "1", "--rows", "8"),
        on_gpu="that of two ranks on one GPU by gloo, or on two by NCCL",
    ),
    "scale": Benchmark(quick=("--counts", "1", "4", "--seconds", "1", "--processes", "1", "2")),
    "scaling": Benchmark(
        full=("--svg", "{folder}/scaling-curve.svg"),
        quick=("--rounds", "1", "--seconds", "0.2", "--counts", "1", "2", "--svg", "{folder}/scaling-curve.svg"),
        on_gpu="1, 2, 4, ... GPUs instead of cores",
    ),
    "step_overhead": Benchmark(
        full=("--turns", "7"),
        quick=("--turns", "1", "--works", "MLP", "--ranks", "2"),
        on_gpu="GPT-2's 124M parameters, with their memory",
    ),
}


def present(*, is_quick: bool) -> list[str]:
    """Return the names of the benchmarks, with is_quick only those with quick arguments."""
    names = sorted(path.parent.name for path in HERE.glob("*/main.py"))
    return [name for name in names if not is_quick or name in BENCHMARKS]


def run(name: str, folder: Path, *, is_quick: bool) -> bool:
    """Run a benchmark, echo its output and write its results; return whether it succeeded."""
    benchmark = BENCHMARKS.get(name, Benchmark())
    arguments = list(benchmark.quick if is_quick else benchmark.full)
    print(f"\n=== {name} ===\n", flush=True)
    machine_facts, begin = machine(), time.monotonic()
    command = [sys.executable, str(HERE / name / "main.py"), *(each.format(folder=folder) for each in arguments)]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    tables = tables_of("".join(lines))
    if process.returncode != 0 or not tables:
        print(f"{name}: exit code {process.returncode}, {len(tables)} tables; nothing is written", file=sys.stderr)
        return False
    report = {
        "benchmark": name,
        "command": " ".join(["python", f"benchmarks/{name}/main.py", *arguments]).format(folder="benchmarks/results"),
        "is_quick": is_quick,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "needs_gpu": "" if torch.cuda.is_available() else benchmark.on_gpu,
        "seconds": round(time.monotonic() - begin),
        "machine": machine_facts,
        "tables": [asdict(table) for table in tables],
        "ratios": [asdict(ratio) for ratio in ratios_of(tables)],
    }
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    (folder / f"{name}.svg").write_text(plot_of(report))
    return True


def plot_of(report: dict[str, Any]) -> str:
    """Return the SVG plot of the ratios in a file of results."""
    facts = report["machine"]
    gpus = "".join(f", {gpu}" for gpu in facts["gpus"])
    title = f"{report['benchmark']}: {facts['cpu']}, {facts['cores']} cores{gpus}, {facts['date']}"
    return plot(ratios_of(Table(**table) for table in report["tables"]), title)


def summary(names: Sequence[str], folder: Path) -> str:
    """Return the ratios of these benchmarks, and what needs a GPU."""
    lines = []
    for name in names:
        report = json.loads((folder / f"{name}.json").read_text())
        lines.append(f"\n{name} ({report['device']}, {report['seconds']} s)")
        lines += [f"  {ratio['value']:>8.2f}x  {ratio['label']}" for ratio in report["ratios"]]
        lines += [f"  not here, needs a GPU: {report['needs_gpu']}"] if report["needs_gpu"] else []
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=present(is_quick=False), metavar="NAME", help="default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, help="folder for the results; default: benchmarks/results")
    options = parser.parse_args()
    names = options.only or present(is_quick=options.quick)
    folder = options.folder or HERE / "results"
    if options.quick and options.folder is None:
        parser.error("--quick needs a separate --folder: its numbers must not replace real ones")
    folder.mkdir(parents=True, exist_ok=True)
    done = [name for name in names if run(name, folder, is_quick=options.quick)]
    print(summary(done, folder))
    print(f"\nwritten to {folder}")
    if len(done) < len(names):
        sys.exit(f"failed: {', '.join(name for name in names if name not in done)}")


if __name__ == "__main__":
    main()
