"""Entry point of the command line: `parallelize`, or `python -m parallelize`.

Glossary of this room:

    command     the first word after `parallelize`: doctor, top or replay
    check       a function of doctor that examines one subject of this machine
    finding     a fact or a problem that a check reports
    exchange    an all_reduce between two new ranks, by which doctor proves that calls work
    run         processes that train together; `top` finds them by the store in which they meet
    facts       what a rank says of itself: its steps, its memory, what its main thread does
    share       the part of its time that a rank computes, loads data or waits

Each command is imported when it is called, because all of them import torch: `--help` answers at
once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from parallelize.version import __version__

_EXIT_INTERRUPTED = 130
_DOCTOR = "check this machine: what is wrong, why, how to fix it; exit code 1 if there is a fault"
_TOP = (
    "show what each rank of a running program does, every 5 s, and which rank the others wait for"
)
_REPLAY = (
    "run one step of a run with logical= again in this process, from a checkpoint, "
    "with the same bits"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: the words after the program's name; None: sys.argv[1:].

    Returns:
        The exit code: 0 for success, 1 for a fault, 130 after Ctrl-C.

    Raises:
        SystemExit: the command line is invalid (2), or asks for help or the version (0).
    """
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parallelize")
    parser.add_argument("--version", action="version", version=f"parallelize {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help=_DOCTOR, description=_DOCTOR)
    doctor.add_argument(
        "--json",
        action="store_true",
        help="the findings as JSON: [{status, check, what, why, fix}]",
    )

    top = commands.add_parser("top", help=_TOP, description=_TOP)
    top.add_argument(
        "run",
        nargs="?",
        metavar="HOST:PORT",
        help="a run's store, or its path; else the runs of this user here",
    )
    top.add_argument("--once", action="store_true", help="one table, for logs")

    replay = commands.add_parser("replay", help=_REPLAY, description=_REPLAY)
    replay.add_argument("checkpoint", help="a file that checkpoints() of the script has written")
    replay.add_argument(
        "--step",
        type=int,
        required=True,
        help="number of the step, from 1, after the checkpoint's",
    )
    replay.add_argument("--debug", action="store_true", help="stop in pdb before the step")
    replay.add_argument("script", help="the script that wrote it")
    replay.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def _run(options: argparse.Namespace) -> int:
    """Run the command of a parsed command line; return the exit code."""
    if options.command == "doctor":
        from parallelize.cli.doctor import diagnose

        return diagnose(os.environ, as_json=options.json)
    if options.command == "top":
        from parallelize.cli.top import show

        return show(options.run, once=options.once)
    from parallelize.cli.replay import replay

    words = [options.script, *options.arguments]
    return replay(os.environ, options.checkpoint, options.step, words, debugs=options.debug)
