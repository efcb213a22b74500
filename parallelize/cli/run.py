"""`parallelize run`: runs a script on all devices, with options from the command line."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from parallelize.call.traceback_folding import in_users_code
from parallelize.cli.arguments import Command, help_text, parse
from parallelize.cli.run_script import run_script
from parallelize.config.config import ENV_PREFIX
from parallelize.decorator import distributed
from parallelize.errors import ConfigError, LaunchError, ParallelizeError, WorkerError

__all__ = ["run", "uses_decorator"]

_IMPORTED_FROM = ("parallelize", "parallelize.decorator")
# Option -> the option that it excludes, whose environment variable it overrides.
_MUTUALLY_EXCLUSIVE = {"gpus": "processes", "processes": "gpus"}


def run(arguments: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Run a script.

    A script that uses @distributed starts its own processes: it replaces this process (exec), with the options in
    environment variables. Any other script runs in each of the processes that the options ask for.

    Args:
        arguments: the words after `parallelize run`.
        environ: environment variables of this process; the options are added as PARALLELIZE_<OPTION>.

    Returns:
        The exit code: that of the script, 1 after an exception, 128 plus the signal's number after a signal.

    Raises:
        ConfigError: the request is invalid; nothing was started.
    """
    own_words = list(arguments)[: list(arguments).index("--")] if "--" in arguments else list(arguments)
    if not own_words or set(own_words) & {"-h", "--help"}:
        sys.stdout.write(help_text())
        return 0
    command = parse(arguments)
    source = _source(command)
    for name in command.options:
        environ.pop(_variable(_MUTUALLY_EXCLUSIVE.get(name, name)), None)
    environ.update({_variable(name): text for name, text in command.options.items()})
    if source is not None and uses_decorator(source):
        return _exec_script(command, environ)
    return _run_in_every_process(command)


def _variable(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper()}"


def _source(command: Command) -> bytes | None:
    """Return the source of the script or module; None for a folder, an archive or an extension module.

    Raises:
        ConfigError: the script or module does not exist.
    """
    if not command.is_module:
        path = Path(command.target)
        if not path.exists():
            raise ConfigError(f"parallelize run {path}", why=f"no such file in {Path.cwd()}", fix="check the path")
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
            why="no such module, or a package without __main__",
            fix="check its name, and that it can be imported from this folder",
        )
    return Path(spec.origin).read_bytes() if spec.has_location and spec.origin and spec.origin.endswith(".py") else None


def uses_decorator(source: str | bytes) -> bool:
    """Return whether a script uses `distributed` under any name; imported modules are not inspected.

    Return True also if the source does not parse: the interpreter then runs the script and reports the error.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return True
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {f"{each.asname or each.name}.distributed" for each in node.names if each.name == "parallelize"}
        elif isinstance(node, ast.ImportFrom) and f"{'.' * node.level}{node.module}" in _IMPORTED_FROM:
            names |= {each.asname or "distributed" for each in node.names if each.name in ("distributed", "*")}
    read = (each for each in nodes if isinstance(each, (ast.Name, ast.Attribute)) and isinstance(each.ctx, ast.Load))
    return any(ast.unparse(each) in names for each in read)


def _exec_script(command: Command, environ: MutableMapping[str, str]) -> int:
    """Replace this process by `python script.py`, with the interpreter options of this one."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does; no public name
    target = ["-m", command.target] if command.is_module else [command.target]
    sys.stdout.flush()
    python = [sys.executable, *flags, *target, *command.arguments]
    os.execve(sys.executable, python, dict(environ))  # noqa: S606 - needs no shell


def _run_in_every_process(command: Command) -> int:
    try:
        distributed()(run_script)(command.target, command.arguments, is_module=command.is_module)
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        if in_users_code(error.__traceback__) is None:
            raise
        return _exit_code(error)
    except BaseException as error:  # noqa: BLE001 - printed as Python would, or raised again
        return _report_failure(error)
    return 0


def _exit_code(error: SystemExit) -> int:
    if isinstance(error.code, str):
        sys.stderr.write(f"{error.code}\n")
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _report_failure(error: BaseException) -> int:
    """Print the script's exception as Python would, and return the exit code; re-raise errors of this package."""
    notes = getattr(error, "__notes__", [])
    in_script = in_users_code(error.__traceback__)
    if in_script is not None or not (notes or isinstance(error, ParallelizeError)):  # the script ran in this process
        traceback.print_exception(type(error), error, in_script)
        return 1
    if isinstance(error, WorkerError) and error.exitcode is not None:
        is_exit = error.faults[0].why.startswith("SystemExit")
        message = f"{error.faults[0].what}: {error.faults[0].why}" if is_exit else "\n".join([str(error), *notes])
        sys.stderr.write(f"{message}\n")
        return error.exitcode if error.exitcode > 0 else 128 - error.exitcode
    if notes:  # the rank and traceback of a worker's exception
        shown = "".join(traceback.format_exception_only(type(error), error))
        sys.stderr.write("\n".join([shown.rstrip(), *(note for note in notes if note not in shown), ""]))
        return 1
    if isinstance(error, LaunchError):
        sys.stderr.write(f"{error}\n")
        return 1
    raise error
