"""The command line of `parallelize run`, by the one table of options."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallelize.config.config import Config
from parallelize.config.options import FROM_TEXT, PARSERS
from parallelize.errors import ConfigError, Fault, did_you_mean

__all__ = ["Command", "help_text", "parse"]

_USAGE = """\
usage: parallelize run [options] script.py [-- arguments]        or: -m package.module [-- arguments]

A script that decorates a function is run once, and its calls have these options, whatever its code says.
Any other script is run in every process: parallel_model, shard_loader, all_reduce ... work anywhere in it.
With --num-nodes the same command is run on each node, with MASTER_ADDR and MASTER_PORT set.

"""
_COLUMNS = 110


@dataclass(frozen=True)
class Command:
    """What is to be run.

    Args:
        target: path of a script, or name of a module.
        is_module: which of them.
        arguments: the script's own.
        options: as text, by name.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    options: Mapping[str, str]


def parse(words: Sequence[str]) -> Command:
    """The command that a user means.

    Args:
        words: what follows `parallelize run`: options and the script in any order, then `--` and its arguments.

    Raises:
        ConfigError: every fault of it.
    """
    own, arguments = _halves(words)
    targets: list[tuple[str, bool]] = []
    options: dict[str, str] = {}
    faults: list[Fault] = []
    while own:
        word = own.pop(0)
        name, has_value, value = word.partition("=")
        if not word.startswith("-"):
            targets.append((word, False))
        elif not has_value and (not own or own[0].startswith("--")):
            faults.append(_fault_of_name(name) or Fault(name, "it needs a value", f"write {name} <value>"))
        elif word == "-m":
            targets.append((own.pop(0), True))
        else:
            value = value if has_value else own.pop(0)
            fault = _fault_of_name(name)
            faults += [fault] if fault else []
            options[_option(name)] = value
    # After an option that there is not, what is whose argument cannot be told.
    faults = faults or _target_faults(targets) + _value_faults(options)
    if faults:
        raise ConfigError.of(faults)
    (target, is_module) = targets[0]
    return Command(target, is_module, tuple(arguments), options)


def _halves(words: Sequence[str]) -> tuple[list[str], list[str]]:
    end = list(words).index("--") if "--" in words else len(words)
    return list(words[:end]), list(words[end + 1 :])


def _option(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _fault_of_name(name: str) -> Fault | None:
    option = _option(name)
    if name == "-m" or (name.startswith("--") and option in FROM_TEXT):
        return None
    if option in PARSERS:
        return Fault(name, "its value is a function or an object, which only Python can give", "say it in the script")
    known = did_you_mean(option.replace("_", "-"), (each.replace("_", "-") for each in FROM_TEXT), prefix="--")
    return Fault(name, "there is no such option", f"arguments of the script come after --; {known}")


def _target_faults(targets: Sequence[tuple[str, bool]]) -> list[Fault]:
    if len(targets) == 1:
        return []
    if not targets:
        return [Fault("no script", "there is nothing to run", "write parallelize run script.py, or -m package.module")]
    given = " ".join(target for target, _ in targets)
    return [Fault(given, "one script is run", "write the script's own arguments after --")]


def _value_faults(options: Mapping[str, str]) -> list[Fault]:
    try:
        Config.parse(**{name: FROM_TEXT[name](text.strip()) for name, text in options.items()})
    except ConfigError as error:
        return list(error.faults)
    return []


def help_text() -> str:
    """Usage, and a line for each option in the words of `Config`."""
    described = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)$", inspect.getdoc(Config) or "", re.MULTILINE))
    width = max(map(len, FROM_TEXT)) + 2
    lines = []
    for name in FROM_TEXT:
        said = " ".join(described.get(name, "").split())
        flag = f"  --{name.replace('_', '-'):<{width}}"
        lines.append(textwrap.shorten(said, _COLUMNS - len(flag), placeholder=" ...").join([flag, ""]))
    return _USAGE + "\n".join(lines) + "\n"
