"""Entry point of the command line: `parallelize`, or `python -m parallelize`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from parallelize.errors import ConfigError, did_you_mean
from parallelize.version import __version__

__all__ = ["main"]

_HELP = """\
usage: parallelize run [options] script.py [-- arguments]   run a script in every process (parallelize run --help)
       parallelize doctor [--json]                          check this machine: what is wrong, why, how to fix it
       parallelize --version
"""

_EXIT_INTERRUPTED = 130
_EXIT_CONFIG_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: the words after the program's name; None: sys.argv[1:].

    Returns:
        The exit code: 0 for success, 1 for a fault or failure, 2 for an invalid request, or that of the user's script.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_CONFIG_ERROR
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _dispatch(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0
    if command == "--version":
        sys.stdout.write(f"parallelize {__version__}\n")
        return 0
    if command == "doctor":
        from parallelize.cli import doctor  # imports torch, as run does

        return doctor.doctor(rest, os.environ, _write)
    if command == "run":
        from parallelize.cli import run

        return run.run(rest, os.environ)
    raise ConfigError(
        f"parallelize {command}", why="no such command", fix=did_you_mean(command, ("doctor", "run", "--version"))
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
