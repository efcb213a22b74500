"""The command `parallelize`, also as `python -m parallelize`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from parallelize.cli import doctor, run
from parallelize.errors import ConfigError, did_you_mean
from parallelize.version import __version__

__all__ = ["main"]

_HELP = """\
usage: parallelize run [options] script.py [-- arguments]   a script, in every process (parallelize run --help)
       parallelize doctor [--json]                          what is wrong with this machine, why, how to fix it
       parallelize --version
"""

_INTERRUPTED = 130
_REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says.

    Args:
        arguments: without the program's name; None: this process's own.

    Returns:
        The exit code: 0; 1 for a fault or a failure; 2 for a request that cannot work; a script's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return _REFUSED
    except KeyboardInterrupt:
        return _INTERRUPTED


def _dispatch(words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0
    if name == "--version":
        sys.stdout.write(f"parallelize {__version__}\n")
        return 0
    if name == "doctor":
        return doctor.doctor(rest, os.environ, _show)
    if name == "run":
        return run.run(rest, os.environ)
    raise ConfigError(
        f"parallelize {name}", why="there is no such command", fix=did_you_mean(name, ("doctor", "run", "--version"))
    )


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
