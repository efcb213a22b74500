"""Figures in documents, read from `benchmarks/results/*.json`, and the search for those that were typed by hand.

A document has a figure between two markers, and `python tests/readme.py` writes what is between them:

    <!-- figures: faults/faults -->                                    a table, in lines of its own
    <!-- end -->
    It takes <!-- figures: launch/second call -->0.09 s<!-- end -->.   words in a sentence

A marker in a sentence is not at the start of a line, where Markdown would take the rest of that line for HTML. `NAMES`
has the names that a marker may have. Beside these, `<result>/table` is the first table of a file of results as it was
printed, `<result>/table 2` its second one, and `<result>/machine` says when and on which machine it was measured.

A new figure is a function here, and a name in `NAMES`. A number that is a limit or a setting, and was not measured, is
named in `LIMITS` with its reason: other numbers with a unit fail a test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

__all__ = [
    "LIMITS",
    "NAMES",
    "RESULTS",
    "blocks",
    "costs",
    "rounded",
    "table_of",
    "text_of",
    "typed_by_hand",
    "written",
]

RESULTS = Path(__file__).parents[1] / "benchmarks/results"


# --- Results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of results: every cell is text, as the benchmark has printed it."""

    columns: list[str]
    rows: list[list[str]]

    def cell(self, row: tuple[str, ...], column: str) -> str:
        """Return a cell.

        Args:
            row: the first cells of its row.
            column: the title of its column.
        """
        for cells in self.rows:
            if tuple(cells[: len(row)]) == row:
                return cells[self.columns.index(column)]
        raise KeyError(f"no row begins with {row}")


def result(name: str) -> dict[str, Any]:
    """Return the contents of `benchmarks/results/<name>.json`."""
    contents: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return contents


def table_of(name: str, number: int = 1) -> Table:
    """Return a table of a result; the first one has number 1."""
    table = result(name)["tables"][number - 1]
    return Table(table["columns"], table["rows"])


def median(cell: str) -> str:
    """Return "0.09 s" of "0.09 / 0.08 s (1.0x)", which has the median, the least and a ratio."""
    parts = re.match(r"([\d.]+)(?: / [\d.]+)? (s|ms|us)\b", cell)
    assert parts is not None, cell
    return f"{parts[1]} {parts[2]}"


def number(cell: str) -> float:
    """Return the first number of a cell."""
    parts = re.match(r"[\d.]+", cell)
    assert parts is not None, cell
    return float(parts[0])


def ratio(cell: str) -> float:
    """Return 21.6 of "1.98 / 1.74 s (21.6x)"."""
    parts = re.search(r"([\d.]+)x", cell)
    assert parts is not None, cell
    return float(parts[1])


# --- Words -----------------------------------------------------------------------------------------------------------


def difference(relative: float) -> str:
    """Return in words how this library's time differs from another's.

    Args:
        relative: this library's time divided by the other's.
    """
    percent = rounded(abs(relative - 1) * 100, digits=0)
    # Ratios of two runs differ by some hundredths.
    if abs(relative - 1) < 0.03:
        return "the same time, within 3 %"
    if relative > 1:
        return f"{percent} % more time"
    if relative > 0.5:
        return f"{percent} % less time"
    return f"{_short(1 / relative)} times as fast"


def times(factor: float) -> str:
    """Return a factor with about two digits: 0.04x, 1.1x, 22x."""
    return f"{_short(factor)}x"


def _short(factor: float) -> str:
    if factor >= 10:
        return rounded(factor, digits=0)
    if factor >= 0.1:
        return rounded(factor, digits=1)
    return rounded(factor, digits=2)


def rounded(value: float, *, digits: int = 2) -> str:
    """Return a number with so many digits behind the point; halves are rounded up, as people do."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def span(numbers: Iterable[float], *, digits: int = 2) -> str:
    """Return "0.91 to 1.05"."""
    values = list(numbers)
    return f"{rounded(min(values), digits=digits)} to {rounded(max(values), digits=digits)}"


def percent_more(relatives: Iterable[float]) -> str:
    """Return "2 to 3 %" of ratios that are above 1."""
    percents = [100 * (relative - 1) for relative in relatives]
    return f"{span(percents, digits=0)} %"


def markdown(rows: list[list[str]]) -> str:
    """Return rows, the first one with the titles, as a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def machine(*names: str) -> str:
    """Return where and when results were measured, in one line."""
    machines = [result(name)["machine"] for name in names]
    days = sorted(date.fromisoformat(facts["date"]) for facts in machines)
    processors = [facts["cpu"] for facts in machines if facts["cpu"] != "x86 virtual machine"]
    processor = f" ({processors[0]})" if processors else ""
    facts = machines[0]
    where = f"a virtual machine with {facts['cores']} cores{processor} and no GPU"
    torch = facts["torch"].removesuffix("+cpu")
    return f"Measured on {where}, Python {facts['python']}, torch {torch}, {_days(days[0], days[-1])}."


def _days(first: date, last: date) -> str:
    if first == last:
        return f"{last.day} {last:%B %Y}"
    if (first.year, first.month) == (last.year, last.month):
        return f"{first.day} to {last.day} {last:%B %Y}"
    return f"{first.day} {first:%B %Y} to {last.day} {last:%B %Y}"


# --- Calls and failures ----------------------------------------------------------------------------------------------

_SPAWN = "torch.multiprocessing.spawn"
_SMALL_GPT = ("GPT of 6 layers", "2", "O0")


def costs() -> str:
    """Return the small table of README: a step, a first call, a second call and a fault."""
    steps, first, calls, faults = (table_of(name) for name in ("step_overhead", "first_call", "launch", "faults"))
    by_hand, ours = (*_SMALL_GPT, "by hand"), (*_SMALL_GPT, "parallelize")
    rows = [
        ["two processes", "this library", "torch", "compared"],
        [
            "step of a small GPT",
            _cpu_time(steps, ours),
            f"{_cpu_time(steps, by_hand)}, DDP",
            difference(_cpu_ratio(steps, ours)),
        ],
    ]
    for title, table, column in (
        ("first call", first, "first that trains"),
        ("second call", calls, "second call"),
    ):
        theirs = table.cell((_SPAWN,), column)
        rows.append(
            [
                title,
                median(table.cell(("parallelize",), column)),
                f"{median(theirs)}, `spawn`",
                difference(number(table.cell(("parallelize",), column)) / number(theirs)),
            ]
        )
    killed = ("SIGKILL",)
    rows.append(
        [
            "report of a killed process",
            median(faults.cell(killed, "parallelize")),
            f"{median(faults.cell(killed, 'torchrun'))}, torchrun",
            difference(1 / ratio(faults.cell(killed, "ratio"))),
        ]
    )
    return f"{markdown(rows)}\n\n{machine('step_overhead', 'first_call', 'launch', 'faults')}"


def first_calls() -> str:
    """Return the table of first calls."""
    table = table_of("first_call")
    rows = [["first call of a program", "this library", f"`{_SPAWN}`", "compared"]]
    for title, column in (
        ("a function that does not train", "first call"),
        ("a function that makes an optimizer", "first that trains"),
    ):
        theirs = table.cell((_SPAWN,), column)
        ours = table.cell(("parallelize",), column)
        rows.append([title, median(ours), median(theirs), difference(number(ours) / number(theirs))])
    return markdown(rows)


def second_calls() -> str:
    """Return the table of second calls by all launchers, with and without a large argument."""
    table = table_of("launch")
    columns = ["second call", "relative to this library", "with a 200 MB model", "relative to this library"]
    rows = [["two processes", *columns]]
    for cells in table.rows:
        name = cells[0]
        row = [_launcher(table, name)]
        for column in ("second call", "with a 200 MB model"):
            cell = table.cell((name,), column)
            row += ["-", "-"] if cell == "-" else [median(cell), times(_to_ours(table, cell, column))]
        rows.append(row)
    return markdown(rows)


def _to_ours(table: Table, cell: str, column: str) -> float:
    """Return the ratio of a cell; one that was printed as 0.0 is that of the medians."""
    return ratio(cell) or number(cell) / number(table.cell(("parallelize",), column))


def _launcher(table: Table, name: str) -> str:
    if name == "parallelize":
        return "**this library**"
    forks = " (forks: not after CUDA)" if table.cell((name,), "after CUDA") == "no" else ""
    return f"{name}{forks}"


def second_call_compared(name: str) -> str:
    """Return how a second call compares with spawn's in a run: "22 times as fast"."""
    return difference(1 / ratio(table_of(name).cell((_SPAWN,), "second call")))


def failures() -> str:
    """Return the table of the time from an exception to the caller, by all launchers."""
    table = table_of("launch")
    rows = [["two processes", "from the exception to the caller", "relative to this library"]]
    for cells in table.rows:
        cell = table.cell((cells[0],), "from failure to exception")
        rows.append([_launcher(table, cells[0]), median(cell), times(ratio(cell))])
    return markdown(rows)


_FAULTS = {
    "an exception": "raises an exception",
    "`sys.exit(3)`": "calls `sys.exit(3)`",
    "`os._exit(3)`": "calls `os._exit(3)`",
    "SIGKILL": "is killed by SIGKILL",
    "another collective than the other": "calls another collective than the other rank",
    "returns while the other is in a collective": "returns while the other rank is in a collective",
}


def faults() -> str:
    """Return the table of the time from a fault to its report."""
    table = table_of("faults")
    columns = ["one of two ranks", "this library", "names the rank"]
    columns += ["torchrun", "names the rank", "torchrun relative to this library"]
    rows = [columns]
    for cells in table.rows:
        row = dict(zip(["rank", "ours", "ours names", "theirs", "theirs names", "ratio"], cells, strict=True))
        rows.append(
            [
                _FAULTS[row["rank"]],
                median(row["ours"]),
                row["ours names"],
                median(row["theirs"]),
                row["theirs names"],
                times(ratio(row["ratio"])),
            ]
        )
    return markdown(rows)


# --- Steps -----------------------------------------------------------------------------------------------------------


def _models(table: Table) -> list[str]:
    """Return the models of a table in their order."""
    return list(dict.fromkeys(row[0] for row in table.rows))


def _cpu_time(table: Table, row: tuple[str, ...]) -> str:
    return median(table.cell(row, "CPU time"))


def _cpu_ratio(table: Table, row: tuple[str, ...]) -> float:
    return number(table.cell(row, "ratio of CPU time"))


def steps() -> str:
    """Return the table of a step in fp32 beside DDP, Fabric and Accelerate."""
    table = table_of("step_overhead")
    loops = [f"{library} relative to DDP" for library in ("this library", "Fabric", "Accelerate")]
    rows = [["model, two processes", "DDP by hand", "this library", *loops]]
    for model in _models(table):
        times_of_step = [_cpu_time(table, (model, "2", "O0", loop)) for loop in ("by hand", "parallelize")]
        libraries = ("parallelize", "Fabric", "Accelerate")
        ratios = [rounded(_cpu_ratio(table, (model, "2", "O0", library))) for library in libraries]
        rows.append([model, *times_of_step, *ratios])
    return markdown(rows)


def steps_span(loop: str) -> str:
    """Return the least and the largest ratio of a loop's CPU time in fp32, of all models with one and two ranks."""
    table = table_of("step_overhead")
    ratios = []
    for model in _models(table):
        ratios += [_cpu_ratio(table, (model, ranks, "O0", loop)) for ranks in ("1", "2")]
    return span(ratios)


def steps_in_bf16() -> str:
    """Return the table of a step in bf16 beside DDP and autocast."""
    table = table_of("step_overhead")
    rows = [["model, two processes", "level", "DDP and autocast by hand", "this library", "relative to by hand"]]
    for model in _models(table):
        for level in ("O1 bf16", "O2 bf16"):
            ours = (model, "2", level, "parallelize")
            by_hand = _cpu_time(table, (model, "2", level, "by hand"))
            rows.append([model, level, by_hand, _cpu_time(table, ours), rounded(_cpu_ratio(table, ours))])
    return markdown(rows)


def steps_of_fsdp() -> str:
    """Return the table of a step under fsdp beside `fully_shard`."""
    table = table_of("step_overhead")
    rows = [["model, two processes", "`fully_shard` by hand", 'this library, `backend="fsdp"`', "relative to by hand"]]
    for model in _models(table):
        ours = (model, "2", "fsdp", "parallelize, fsdp")
        by_hand = _cpu_time(table, (model, "2", "fsdp", "fully_shard by hand"))
        rows.append([model, by_hand, _cpu_time(table, ours), rounded(_cpu_ratio(table, ours))])
    return markdown(rows)


def logical() -> str:
    """Return what `logical=` costs with one part in each process."""
    table = table_of("logical")

    def ratios(model: str) -> list[float]:
        one_part = (("1", "logical=1"), ("2", "logical=2"))
        return [_cpu_ratio(table, (model, *loop)) for loop in one_part]

    gpt, convolutions = percent_more(ratios("GPT of 6 layers")), percent_more(ratios("8 convolutions"))
    return f"{gpt} more CPU time in a step of a small GPT, and {convolutions} in one of eight convolutions"


def parts() -> str:
    """Return the table of what `logical=` costs by the number of parts in each process."""
    table = table_of("logical")
    rows = [["model", "processes", "1 part in each", "2 parts", "4 parts", "8 parts"]]
    for model in _models(table):
        for processes in (1, 2):
            row = [model, str(processes)]
            for parts_of_process in (1, 2, 4, 8):
                loop = [model, str(processes), f"logical={processes * parts_of_process}"]
                was_measured = any(cells[:3] == loop for cells in table.rows)
                row.append(rounded(_cpu_ratio(table, tuple(loop))) if was_measured else "-")
            rows.append(row)
    return markdown(rows)


# --- Data, checkpoints and memory ------------------------------------------------------------------------------------


def loaders() -> str:
    """Return the table of the time that a loader takes."""
    rows = [["one process", "`DistributedSampler` by hand", "`shard_loader`", "relative to by hand"]]
    for title, table_number in (
        ("a batch, without workers", 1),
        ("a batch, with two workers", 2),
        ("the first of ten million shuffled samples", 3),
    ):
        table = table_of("data", table_number)
        by_hand, ours = table.cell(("by hand",), "median"), table.cell(("parallelize",), "median")
        over = ratio(table.cell(("parallelize",), "over by hand"))
        rows.append([title, median(by_hand), median(ours), rounded(over)])
    return markdown(rows)


def loaders_of_peers() -> str:
    """Return the ratios of Fabric and Accelerate without workers."""
    table = table_of("data_peers")
    column = "over by hand, without workers"
    fabric, accelerate = (ratio(table.cell((name,), column)) for name in ("Fabric", "Accelerate"))
    return f"{rounded(fabric)} for Fabric and {rounded(accelerate)} for Accelerate"


def memory() -> str:
    """Return the table of the memory of a process under each engine."""
    table = table_of("auto")
    engines = {"ddp": "ddp", "fsdp reshard_after_forward=False": "fsdp, `reshard_after_forward=False`", "fsdp": "fsdp"}
    rows = [["model, two processes", *engines.values()]]
    for model in _models(table):
        mebibytes = [table.cell((model, engine), "MiB measured") for engine in engines]
        rows.append([model, *(f"{measured} MiB" for measured in mebibytes)])
    return markdown(rows)


def peak_of_arguments() -> str:
    """Return the peak memory of a rank that writes to all of a large argument, beside the size of the argument."""
    table = table_of("arguments")
    peaks = {table.cell((kind,), "peak of a rank that writes all of it") for kind in ("tensor", "NumPy array")}
    assert len(peaks) == 1
    return peaks.pop()


def checkpoints() -> str:
    """Return the table of saving and loading a file."""
    columns = ["elapsed time", "relative to plain torch", "processor time", "relative to plain torch"]
    rows = [["a checkpoint of 1 GB", *columns]]
    for name, elapsed, relative, processor, relative_processor in table_of("checkpoint").rows:
        rows.append([name, median(elapsed), relative, processor, relative_processor])
    return markdown(rows)


def checkpoints_in_a_loop() -> str:
    """Return the table of what saving in the background takes of a loop."""
    columns = [
        "the save holds the loop for",
        "relative to torch.save",
        "a step after the save has returned, relative to no save",
    ]
    rows = [["a checkpoint of 1 GB", *columns]]
    for name, held, relative, step in table_of("checkpoint", 2).rows:
        rows.append([name, median(held), relative, step])
    return markdown(rows)


def loss_in_fp32() -> str:
    """Return how much longer a step takes on one GPU, by hand, if the loss is computed in fp32."""
    table = table_of("loss_in_fp32")
    relatives = []
    for column in ("step, first round", "step, second round"):
        in_fp32 = number(table.cell(("by hand, forward under autocast, loss in fp32",), column))
        under_autocast = number(table.cell(("by hand, loss under autocast",), column))
        relatives.append(in_fp32 / under_autocast)
    return f"{percent_more(relatives)} longer"


NAMES: Mapping[str, Callable[[], str]] = {
    "machine": lambda: machine("step_overhead", "first_call", "launch", "faults", "data", "logical", "auto"),
    "first_call/first calls": first_calls,
    "launch/second calls": second_calls,
    "launch/second call compared": lambda: second_call_compared("launch"),
    "first_call/second call compared": lambda: second_call_compared("first_call"),
    "launch/failures": failures,
    "launch/second call": lambda: median(table_of("launch").cell(("parallelize",), "second call")),
    "first_call/first call": lambda: median(table_of("first_call").cell(("parallelize",), "first that trains")),
    "faults/faults": faults,
    "faults/killed": lambda: median(table_of("faults").cell(("SIGKILL",), "parallelize")),
    "faults/deadlock": lambda: median(table_of("faults").cell(("another collective than the other",), "parallelize")),
    "step_overhead/fp32": steps,
    "step_overhead/span": lambda: steps_span("parallelize"),
    "step_overhead/span of Fabric": lambda: steps_span("Fabric"),
    "step_overhead/bf16": steps_in_bf16,
    "step_overhead/fsdp": steps_of_fsdp,
    "logical/one part": logical,
    "logical/parts": parts,
    "data/loaders": loaders,
    "data/peers": loaders_of_peers,
    "auto/engines": memory,
    "arguments/peak": peak_of_arguments,
    "checkpoint/files": checkpoints,
    "checkpoint/loop": checkpoints_in_a_loop,
    "loss_in_fp32/longer": loss_in_fp32,
}


# --- Documents -------------------------------------------------------------------------------------------------------

_BLOCK = re.compile(r"(<!-- figures: ([^>]+?) -->)(.*?)(<!-- end -->)", re.DOTALL)


def text_of(name: str) -> str:
    """Return the text between the markers of a figure.

    Raises:
        KeyError: there is no such figure.
    """
    if name in NAMES:
        return NAMES[name]()
    file, _, kind = name.partition("/")
    if kind == "machine":
        return machine(file)
    printed = re.fullmatch(r"table(?: (\d+))?", kind)
    if printed is None:
        raise KeyError(f"no figure {name!r}; tests/figures.py has {', '.join(NAMES)}, and <result>/table")
    table = table_of(file, int(printed[1] or 1))
    return markdown([table.columns, *table.rows])


def written(text: str) -> str:
    """Return a document with what is between the markers of figures written anew."""

    def replaced(block: re.Match[str]) -> str:
        opening, name, old, closing = block.groups()
        separator = "\n" if old.startswith("\n") else ""
        return f"{opening}{separator}{text_of(name)}{separator}{closing}"

    return _BLOCK.sub(replaced, text)


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the figures of a document: the name and the text of each."""
    return [(block[2], block[3].strip("\n")) for block in _BLOCK.finditer(text)]


_UNITS = {"second": "s", "seconds": "s", "minute": "min", "minutes": "min", "hour": "h", "hours": "h", "percent": "%"}
_QUANTITY = re.compile(
    r"(?<![\w.,/-])(?P<number>\d[\d,]*(?:\.\d+)?)"
    r"(?P<unit>x\b|[\s-]?(?:times\b|%|percent\b|[mu]?s\b|seconds?\b|min\b|minutes?\b|h\b|hours?\b|[KMGT]i?B\b|bytes\b))"
)


def typed_by_hand(text: str) -> list[str]:
    """Return the quantities of a document that are neither generated, nor code, nor limits.

    A quantity is a number and a unit: "22x", "3 times", "5 %", "0.09 s", "1.7 GiB".
    """
    text = re.sub(r"<!-- (?!end )[^>]+ -->.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]+`|\]\([^)]*\)", "", text)
    quantities = []
    for parts in _QUANTITY.finditer(text):
        unit = parts["unit"].strip(" -\n")
        space = "" if unit == "x" else " "
        quantities.append(f"{parts['number']}{space}{_UNITS.get(unit, unit)}")
    return [quantity for quantity in quantities if quantity not in LIMITS]


# Quantities that documents may have outside of markers, each with the reason why it is no measurement.
LIMITS: Mapping[str, str] = {
    "1 s": "faults: the time in which the judge has to judge the states of many ranks, which a test holds",
    "2 s": "hang detection: the last log line before `timeout=`; benchmarks/scale: how long requests are counted",
    "3 s": "hang detection: a rank counts as waiting after it; stopping: without progress of a collective",
    "4 s": "hang detection: how often it adds to the file in which ranks meet",
    "5 s": "`parallelize top`: its interval; a process is ended so long after the last rank has returned",
    "10 s": "stopping: how long a rank that waits for its GPU is left alone; heartbeats after a failure",
    "20 s": "benchmarks/launch: how long the other rank sleeps",
    "30 s": "Ctrl-C: how long `except` may take; hang detection: the first log line; the timeout in benchmarks/faults",
    "60 s": "heartbeats: the default of `heartbeat_timeout=`",
    "90 s": "benchmarks/faults: how long the other rank sleeps",
    "0.5 s": "hang detection: how often ranks and the judge look",
    "5 min": "how long `tox run` may take",
    "10 min": "torch: its default timeout of NCCL",
    "30 min": "torch: its default timeout of a process group; benchmarks: how long all of them may take",
    "40 min": "how long `.ci/run` may take",
    "5 %": "balanced: it does not divide a model that would gain less",
    "32 KiB": "calls: the size from which arrays and tensors are mapped from files",
    "128 KiB": "calls: the size from which changed objects are not named",
    "16 MiB": "calls: the largest value of a module's variable that is sent",
    "3 MB": "hang detection: what it adds in an hour to the file in which ranks meet, computed from its interval",
    "28 GB": "an example: the parameters of a model",
    "224 GB": "an example, computed: the parameters of a model, eight times",
    "448 GB": "an example, computed: the moments of a model, eight times",
    "1 GB": "benchmarks/checkpoint: the size of the checkpoint",
    "200 MB": "benchmarks/launch: the size of the argument",
    "50 MB": "benchmarks/data: the size of a batch for a GPU",
    "20 GB": "benchmarks/balanced: what a pretended link sends in a second",
    "400 GB": "benchmarks/balanced: what a pretended link sends in a second",
    "1.5 TB": "benchmarks/balanced: what a pretended GPU reads in a second",
    "20 times": "benchmarks/balanced: by how much pretended links are faster",
    "1000 times": "benchmarks/balanced: by how much pretended GPUs are slower",
    "1.5 times": "benchmarks/auto: the largest limit of memory relative to what an engine takes",
    "1.15 times": "benchmarks/auto: another limit of memory relative to what an engine takes",
    "1.03 times": "benchmarks/data: the goal",
    "1.3x": "benchmarks/data: the goal on a GPU",
    "1 GiB": "`parallelize top`: what its child process may take",
}
