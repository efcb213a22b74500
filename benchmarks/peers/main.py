"""Which behaviours hold in this library and in its peers: each pair is a fresh program, and either it holds or not."""

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

LIMIT_S = 150.0  # a busy machine is not to be taken for a hang
NOTHING = "leaves it to you"


def one(behaviour: str, library: str) -> str:
    """Whether it holds here: yes, or what was seen instead."""
    warnings.simplefilter("ignore")
    try:
        BEHAVIOURS[behaviour].check(library)
    except AssertionError as error:
        return str(error) or "no"
    except BaseException as error:  # noqa: BLE001 - a library may end in any way
        return f"fails: {type(error).__name__}"
    return "yes"


def asked(behaviour: str, library: str) -> str:
    """The same in a process of its own, which may hang or die."""
    if any(getattr(LIBRARIES[library], need) is None for need in BEHAVIOURS[behaviour].needs):
        return NOTHING
    command = [sys.executable, __file__, "--one", behaviour, library]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"hangs (more than {LIMIT_S:.0f} s)"
        finally:
            _end(process)
    answers = [line for line in output.splitlines() if line.startswith("saw: ")]
    return answers[-1].removeprefix("saw: ") if answers else "the caller dies"


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def table(found: dict[str, dict[str, str]]) -> str:
    """The answers as a Markdown table."""
    names = list(next(iter(found.values())))
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for behaviour, answers in found.items():
        cells = ["**yes**" if answer == "yes" else answer for answer in answers.values()]
        lines.append(f"| {BEHAVIOURS[behaviour].says} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(BEHAVIOURS), choices=list(BEHAVIOURS), metavar="NAME")
    parser.add_argument("--libraries", nargs="*", default=list(LIBRARIES), choices=list(LIBRARIES), metavar="NAME")
    parser.add_argument("--json", type=Path, help="where to leave the answers; other rows there stay")
    parser.add_argument("--one", nargs=2, metavar=("BEHAVIOUR", "LIBRARY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("saw: " + one(*args.one), flush=True)
        return
    present = [name for name in args.libraries if importlib.util.find_spec(LIBRARIES[name].package)]
    found = {}
    for behaviour in args.only:
        found[behaviour] = {name: asked(behaviour, name) for name in present}
        print(behaviour, found[behaviour], file=sys.stderr, flush=True)
    print(table(found))
    if args.json:
        versions = {name: importlib.metadata.version(_DISTRIBUTIONS[name]) for name in present}
        rows = json.loads(args.json.read_text())["rows"] if args.json.exists() else {}
        for name, answers in found.items():
            rows[name] = {"says": BEHAVIOURS[name].says, "proof": BEHAVIOURS[name].proof, "answers": answers}
        args.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=2) + "\n")


_DISTRIBUTIONS = {
    "parallelize": "parallelize",
    "Fabric": "lightning-fabric",
    "Accelerate": "accelerate",
    "ignite": "pytorch-ignite",
    "torchrunx": "torchrunx",
}


if __name__ == "__main__":
    main()
