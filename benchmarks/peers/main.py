"""Checks expected behaviours of this library and of others, each behaviour and library in a new process."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

from behaviours import BEHAVIOURS
from libraries import LIBRARIES

TIMEOUT_S = 150.0  # long enough for a busy machine
NOTHING = "leaves it to you"


def check(behaviour: str, library: str) -> str:
    """Check a behaviour in this process: return "yes", or what was observed instead."""
    warnings.simplefilter("ignore")
    try:
        BEHAVIOURS[behaviour].check(library)
    except AssertionError as error:
        return str(error) or "no"
    except BaseException as error:  # noqa: BLE001 - a library may end in any way
        return f"fails: {type(error).__name__}"
    return "yes"


def check_in_new_process(behaviour: str, library: str) -> str:
    """Check a behaviour in a new process, which may hang or crash."""
    if any(getattr(LIBRARIES[library], need) is None for need in BEHAVIOURS[behaviour].needs):
        return NOTHING
    command = [sys.executable, __file__, "--one", behaviour, library]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"hangs (more than {TIMEOUT_S:.0f} s)"
        finally:
            _kill(process)
    answers = [line for line in output.splitlines() if line.startswith("answer: ")]
    return answers[-1].removeprefix("answer: ") if answers else "the caller dies"


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def table(rows: dict[str, dict[str, str]]) -> str:
    """Format the answers as a Markdown table."""
    names = list(next(iter(rows.values())))
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for behaviour, answers in rows.items():
        cells = ["**yes**" if answer == "yes" else answer for answer in answers.values()]
        lines.append(f"| {BEHAVIOURS[behaviour].expectation} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(BEHAVIOURS), choices=list(BEHAVIOURS), metavar="NAME")
    parser.add_argument("--libraries", nargs="*", default=list(LIBRARIES), choices=list(LIBRARIES), metavar="NAME")
    parser.add_argument("--json", type=Path, help="file to update with the answers; its other rows are kept")
    parser.add_argument("--one", nargs=2, metavar=("BEHAVIOUR", "LIBRARY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("answer: " + check(*args.one), flush=True)
        return
    installed = [name for name in args.libraries if importlib.util.find_spec(LIBRARIES[name].package)]
    found = {}
    for behaviour in args.only:
        found[behaviour] = {name: check_in_new_process(behaviour, name) for name in installed}
        print(behaviour, found[behaviour], file=sys.stderr, flush=True)
    print(table(found))
    if args.json:
        versions = {name: importlib.metadata.version(_DISTRIBUTIONS[name]) for name in installed}
        rows = json.loads(args.json.read_text())["rows"] if args.json.exists() else {}
        for name, answers in found.items():
            rows[name] = {"says": BEHAVIOURS[name].expectation, "proof": BEHAVIOURS[name].test, "answers": answers}
        args.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=2) + "\n")


_DISTRIBUTIONS = {
    "parallelize": "parallelize",
    "Fabric": "lightning-fabric",
    "Accelerate": "accelerate",
    "ignite": "pytorch-ignite",
    "Ray Train": "ray",
    "Monarch": "torchmonarch",
    "torchrunx": "torchrunx",
}


if __name__ == "__main__":
    main()
