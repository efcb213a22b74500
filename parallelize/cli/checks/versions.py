"""Doctor check: the system, and versions of Python and of the packages that parallelize requires."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cli.findings import Check, Finding, fault, warning
from parallelize.version import __version__

__all__ = ["CHECK", "CHECKED_WITH", "Versions", "gather", "judge"]

CHECKED_WITH = "2.15"  # the newest torch that our tests run with: the environment newest of tox.ini


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Installed and required versions.

    Args:
        python: version of the interpreter.
        own: version of parallelize.
        installed: required package -> its version; None: not installed.
        least: required package -> its minimum version.
        system: value of sys.platform.
    """

    python: str
    own: str
    installed: Mapping[str, str | None]
    least: Mapping[str, str]
    system: str = "linux"


def gather(_environ: Mapping[str, str]) -> Versions:
    """Read versions and requirements from package metadata; a checkout that is not installed has no requirements."""
    declared: list[str] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        declared = importlib.metadata.requires("parallelize") or []
    matches = (re.match(r"([\w.-]+)\s*>=\s*([\d.]+)[^;]*$", line) for line in declared)  # no extras: those have a ";"
    least = {match[1]: match[2] for match in matches if match is not None}
    return Versions(
        python=platform.python_version(),
        own=__version__,
        installed={name: _version(name) for name in least or ("torch", "wrapt", "cloudpickle", "tqdm")},
        least=least,
        system=sys.platform,
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge(facts: Versions) -> Iterator[Finding]:
    """Yield a finding for each package that is missing or too old, and for a torch newer than the tested one."""
    for name, version in facts.installed.items():
        least = facts.least.get(name, "0")
        if version is None or _numbers(version) < _numbers(least):
            yield fault(
                "version-too-old",
                f"{name} {version or 'is not installed'}",
                why=f"parallelize {facts.own} needs {name} {least} or newer",
                fix=f"pip install --upgrade '{name}>={least}'",
            )
    if facts.system != "linux":
        yield warning(
            "system-untried",
            f"system {facts.system}",
            why="only Linux is tested: other systems start processes by spawn, and detect the end of the caller later",
            fix="use Linux in production; if the last line of this table is ok, calls work",
        )
    torch = facts.installed.get("torch") or "0"
    if _numbers(torch)[:2] > _numbers(CHECKED_WITH):
        yield warning(
            "torch-unchecked",
            f"torch {torch}",
            why=f"this package uses private parts of torch, and is tested with torch up to {CHECKED_WITH}",
            fix="update parallelize; if the last line of this table is ok, calls work",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return "2.13.0+cpu" as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _summary(facts: Versions) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts.installed.items())
    return f"parallelize {facts.own}, Python {facts.python}, {packages}"


CHECK = Check("versions", gather, _summary, judge)
