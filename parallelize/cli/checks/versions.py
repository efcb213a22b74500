"""Versions of Python and of the packages that this one stands on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cli.findings import Check, Finding, fault, warning
from parallelize.version import __version__

__all__ = ["CHECK", "CHECKED_WITH", "Versions", "gather", "judge"]

CHECKED_WITH = "2.13"  # the torch whose agent starts the workers in our own tests; .ci/constraints.txt pins it


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What is installed.

    Args:
        python: the interpreter's version.
        own: this package's.
        installed: version of each package that this one needs; None: it is not installed.
        least: the oldest that this package admits, by name.
        has_numpy: whether NumPy is there: torch does not ask for it, and complains in every process without it.
    """

    python: str
    own: str
    installed: Mapping[str, str | None]
    least: Mapping[str, str]
    has_numpy: bool = True


def gather(_environ: Mapping[str, str]) -> Versions:
    """Read from the metadata of what is installed; a checkout that was never installed declares nothing."""
    declared: list[str] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        declared = importlib.metadata.requires("parallelize") or []
    read = (re.match(r"([\w.-]+)\s*>=\s*([\d.]+)[^;]*$", line) for line in declared)  # no extras: those have a ";"
    least = {found[1]: found[2] for found in read if found is not None}
    return Versions(
        python=platform.python_version(),
        own=__version__,
        installed={name: _version(name) for name in least or ("torch", "wrapt", "cloudpickle", "tqdm")},
        least=least,
        has_numpy=importlib.util.find_spec("numpy") is not None,
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge(facts: Versions) -> Iterator[Finding]:
    """Packages that are absent or too old, and a torch that nobody has tried."""
    for name, version in facts.installed.items():
        least = facts.least.get(name, "0")
        if version is None or _numbers(version) < _numbers(least):
            yield fault(
                "version-too-old",
                f"{name} {version or 'is not installed'}",
                why=f"parallelize {facts.own} needs {name} {least} or newer",
                fix=f"pip install --upgrade '{name}>={least}'",
            )
    if not facts.has_numpy:
        yield warning(
            "no-numpy",
            "NumPy is not installed",
            why="torch says so in every process, and arrays of a dataset cannot become tensors",
            fix="pip install numpy",
        )
    torch = facts.installed.get("torch") or "0"
    if _numbers(torch)[:2] > _numbers(CHECKED_WITH):
        yield warning(
            "torch-unchecked",
            f"torch {torch}",
            why=f"its launch agent is no stable interface, and releases after {CHECKED_WITH} were not tried",
            fix="update parallelize; if the last line of this table is ok, calls work",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _summary(facts: Versions) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts.installed.items())
    return f"parallelize {facts.own}, Python {facts.python}, {packages}"


CHECK = Check("versions", gather, _summary, judge)
