"""Parser of the command line of `parallelize run`, whose options come from the table in config.options."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallelize.config.config import Config
from parallelize.config.options import FROM_TEXT, PARSERS
from parallelize.decorator import distributed
from parallelize.errors import ConfigError, Fault, did_you_mean

__all__ = ["Command", "help_text", "parse"]

_USAGE = """\
usage: parallelize run [options] script.py [-- arguments]        or: -m package.module [-- arguments]

A script that decorates a function runs once; these options override those in its code.
Any other script runs in every process: parallel_model, shard_loader, all_reduce ... work anywhere in it.
With --num-nodes, run the same command on each node, with MASTER_ADDR and MASTER_PORT set.
Example: parallelize run --gpus auto --processes 2 --amp bf16 train.py -- --epochs 3

"""
_COLUMNS = 119


@dataclass(frozen=True)
class Command:
    """A parsed command line.

    Args:
        target: path of a script, or name of a module.
        is_module: whether `target` is the name of a module.
        arguments: the arguments of the script.
        options: option name -> its value as text.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    options: Mapping[str, str]


def parse(command_line: Sequence[str]) -> Command:
    """Parse the command line of `parallelize run`.

    Args:
        command_line: the words after `parallelize run`: options and the script in any order, then `--` and the
            arguments of the script.

    Raises:
        ConfigError: the command line is invalid; the error lists every fault.
    """
    words, arguments = _split_at_separator(command_line)
    targets: list[tuple[str, bool]] = []
    options: dict[str, str] = {}
    faults: list[Fault] = []
    while words:
        word = words.pop(0)
        name, has_value, value = word.partition("=")
        if not word.startswith("-"):
            targets.append((word, False))
        elif not has_value and (not words or words[0].startswith("--")):
            faults.append(_name_fault(name) or Fault(name, "it needs a value", f"write {name} <value>"))
        elif word == "-m":
            targets.append((words.pop(0), True))
        else:
            value = value if has_value else words.pop(0)
            fault = _name_fault(name)
            faults += [fault] if fault else []
            options[_option_name(name)] = value
    # After an unknown option, the next word could be its value or the script: further faults would mislead.
    faults = faults or _target_faults(targets) + _value_faults(options)
    if faults:
        raise ConfigError.of(faults)
    (target, is_module) = targets[0]
    return Command(target, is_module, tuple(arguments), options)


def _split_at_separator(command_line: Sequence[str]) -> tuple[list[str], list[str]]:
    end = list(command_line).index("--") if "--" in command_line else len(command_line)
    return list(command_line[:end]), list(command_line[end + 1 :])


def _option_name(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _name_fault(name: str) -> Fault | None:
    option = _option_name(name)
    if name == "-m" or (name.startswith("--") and option in FROM_TEXT):
        return None
    if option in PARSERS:
        return Fault(name, "its value is a function or an object, which text cannot express", "set it in the script")
    known = did_you_mean(option.replace("_", "-"), (each.replace("_", "-") for each in FROM_TEXT), prefix="--")
    return Fault(name, "no such option", f"arguments of the script come after --; {known}")


def _target_faults(targets: Sequence[tuple[str, bool]]) -> list[Fault]:
    if len(targets) == 1:
        return []
    if not targets:
        return [Fault("no script", "nothing to run", "write parallelize run script.py, or -m package.module")]
    given = " ".join(target for target, _ in targets)
    return [Fault(given, "only one script can be run", "write the script's own arguments after --")]


def _value_faults(options: Mapping[str, str]) -> list[Fault]:
    try:
        Config.parse(**{name: FROM_TEXT[name](text.strip()) for name, text in options.items()})
    except ConfigError as error:
        return list(error.faults)
    return []


def help_text() -> str:
    """Return the usage, and a line for each option, taken from the docstring of `distributed`."""
    documented = inspect.getdoc(distributed) or ""
    found = re.findall(r"^ +- (\w+) \(.+, (\S+)\): (.+(?:\n {10}.+)*)$", documented, re.MULTILINE)
    width = max(map(len, FROM_TEXT)) + 2
    lines = []
    for name, default, text in found:
        flag = f"  --{name.replace('_', '-'):<{width}}"
        description = " ".join(text.partition("; ")[0].rstrip(".").split())
        description += f" ({default})" if default != "None" else ""
        if name in FROM_TEXT:
            lines.append(flag + textwrap.shorten(description, _COLUMNS - len(flag), placeholder=" ..."))
    return _USAGE + "\n".join(lines) + "\n"
