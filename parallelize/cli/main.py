"""Entry point of the command line: `parallelize`, or `python -m parallelize`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from parallelize.version import __version__

__all__ = ["main"]

_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: the words after the program's name; None: sys.argv[1:].

    Returns:
        The exit code: 0 for success, 1 for a fault, 130 after Ctrl-C.

    Raises:
        SystemExit: the command line is invalid (2), or asks for help or the version (0).
    """
    parser = argparse.ArgumentParser(prog="parallelize")
    parser.add_argument("--version", action="version", version=f"parallelize {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    help_text = "check this machine: what is wrong, why, how to fix it; exit code 1 if there is a fault"
    doctor = commands.add_parser("doctor", help=help_text, description=help_text)
    doctor.add_argument("--json", action="store_true", help="the findings as JSON: [{status, check, what, why, fix}]")
    help_text = "show what each rank of a running program does, every 5 s, and which rank the others wait for"
    top = commands.add_parser("top", help=help_text, description=help_text)
    top.add_argument(
        "run", nargs="?", metavar="HOST:PORT", help="a run's store, or its path; else the runs of this user here"
    )
    top.add_argument("--once", action="store_true", help="one table, for logs")
    help_text = "run one step of a run with logical= again in this process, from a checkpoint, with the same bits"
    again = commands.add_parser("replay", help=help_text, description=help_text)
    again.add_argument("checkpoint", help="a file that checkpoints() of the script has written")
    again.add_argument("--step", type=int, required=True, help="number of the step, from 1, after the checkpoint's")
    again.add_argument("--debug", action="store_true", help="stop in pdb before the step")
    again.add_argument("script", help="the script that wrote it")
    again.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args(arguments)
    try:
        if options.command == "replay":
            from parallelize.cli.replay import replay

            words = [options.script, *options.arguments]
            return replay(os.environ, options.checkpoint, options.step, words, debugs=options.debug)
        if options.command == "top":
            from parallelize.cli.top import show

            return show(options.run, once=options.once)
        from parallelize.cli.doctor import diagnose  # imports torch

        return diagnose(os.environ, as_json=options.json)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
