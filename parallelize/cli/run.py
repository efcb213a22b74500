"""`parallelize run`: a script on all devices, with options from the command line."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from parallelize.cli.arguments import Command, help_text, parse
from parallelize.cli.run_script import program, trace_of_script
from parallelize.cli.uses_decorator import starts_itself
from parallelize.config.config import ENV_PREFIX
from parallelize.decorator import distributed
from parallelize.errors import ConfigError, LaunchError, WorkerError

__all__ = ["run"]

# What gives way to an option of the command line that excludes it.
_EXCLUDED = {"gpus": "processes", "processes": "gpus"}


def run(words: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Run a script.

    A script that decorates functions is left to start its own processes: it replaces this program, with the options in
    its variables. Any other runs in every process that the options mean.

    Args:
        words: what follows `parallelize run`.
        environ: variables of this process; the options are added as PARALLELIZE_<OPTION>.

    Returns:
        The exit code: the script's own, 1 after an exception, 128 and the signal's number after a signal.

    Raises:
        ConfigError: a request that cannot work; nothing has been started.
    """
    own = list(words)[: list(words).index("--")] if "--" in words else list(words)
    if not own or set(own) & {"-h", "--help"}:
        sys.stdout.write(help_text())
        return 0
    command = parse(words)
    source = _source(command)
    for name in command.options:
        environ.pop(_variable(_EXCLUDED.get(name, name)), None)
    environ.update({_variable(name): text for name, text in command.options.items()})
    if source is not None and starts_itself(source):
        return _replaced_by(command, environ)
    return _in_every_process(command)


def _variable(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper()}"


def _source(command: Command) -> bytes | None:
    """What will be run, unread by Python; None: it is no source.

    Raises:
        ConfigError: there is nothing of that name.
    """
    if not command.is_module:
        path = Path(command.target)
        if not path.exists():
            raise ConfigError(
                f"parallelize run {path}", why=f"there is no such file in {Path.cwd()}", fix="check the path"
            )
        return path.read_bytes() if path.is_file() and path.suffix in ("", ".py", ".pyw") else None
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(command.target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{command.target}.__main__")
    if spec is None:
        raise ConfigError(
            f"parallelize run -m {command.target}",
            why="there is no such module, or it is a package without __main__",
            fix="check its name, and that it can be imported from here",
        )
    return Path(spec.origin).read_bytes() if spec.has_location and spec.origin and spec.origin.endswith(".py") else None


def _replaced_by(command: Command, environ: MutableMapping[str, str]) -> int:
    """Become `python script.py`."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does; no public name
    target = ["-m", command.target] if command.is_module else [command.target]
    sys.stdout.flush()
    python = [sys.executable, *flags, *target, *command.arguments]
    os.execve(sys.executable, python, dict(environ))  # noqa: S606 - no shell is wanted


def _in_every_process(command: Command) -> int:
    try:
        distributed()(program)(command.target, command.arguments, is_module=command.is_module)
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        if trace_of_script(error) is None:
            raise
        return _exit_code(error)
    except BaseException as error:  # noqa: BLE001 - it is told as Python would, or raised again
        return _failure(error)
    return 0


def _exit_code(error: SystemExit) -> int:
    if isinstance(error.code, str):
        sys.stderr.write(f"{error.code}\n")
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _failure(error: BaseException) -> int:
    """Tell what a script has raised, as it would without us; what we have raised goes on to the caller."""
    notes = getattr(error, "__notes__", [])
    trace = trace_of_script(error)
    if trace is not None:  # in this very process
        traceback.print_exception(type(error), error, trace)
        return 1
    if isinstance(error, WorkerError) and error.exitcode is not None:
        is_exit = error.faults[0].why.startswith("SystemExit")
        said = f"{error.faults[0].what}: {error.faults[0].why}" if is_exit else "\n".join([str(error), *notes])
        sys.stderr.write(f"{said}\n")
        return error.exitcode if error.exitcode > 0 else 128 - error.exitcode
    if notes:  # of a worker's: where it was raised, and its traceback there
        sys.stderr.write("\n".join([*notes, ""]))
        return 1
    if isinstance(error, LaunchError):
        sys.stderr.write(f"{error}\n")
        return 1
    raise error
