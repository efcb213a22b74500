"""`parallelize doctor`: whether calls will work on this machine, and what to do where they will not."""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parallelize.cli.checks import (
    accelerators,
    apex,
    cluster,
    collectives,
    limits,
    memory,
    network,
    overrides,
    ports,
    process_start,
    smoke,
    versions,
)
from parallelize.cli.findings import Check, Result
from parallelize.errors import ConfigError
from parallelize.version import __version__

__all__ = ["CHECKS", "HELP", "doctor", "document", "table"]

HELP = """\
usage: parallelize doctor [--json]

Looks at this machine and environment, and lets two ranks reduce something: what is wrong, why, how to fix it.
Exit code 1 if anything is at fault, 0 if all is well or only worth a warning.

  --json   the same for programs: {schema, version, host, status, checks: [{name, status, summary, findings, facts}]}
"""

# The order in which a person would look; the last one does what calls do.
CHECKS: tuple[Check[Any], ...] = (
    versions.CHECK,
    accelerators.CHECK,
    collectives.CHECK,
    network.CHECK,
    ports.CHECK,
    memory.CHECK,
    limits.CHECK,
    process_start.CHECK,
    cluster.CHECK,
    apex.CHECK,
    overrides.CHECK,
    smoke.CHECK,
)

_SCHEMA = 1
_WIDTH = 118


def doctor(arguments: Sequence[str], environ: Mapping[str, str], write: Callable[[str], object]) -> int:
    """Run every check and tell what they found.

    Args:
        arguments: of the command.
        environ: variables of this process.
        write: takes text for the user.

    Returns:
        The exit code.

    Raises:
        ConfigError: an argument that there is not.
    """
    if set(arguments) & {"-h", "--help"}:
        write(HELP)
        return 0
    strange = [each for each in arguments if each != "--json"]
    if strange:
        raise ConfigError(
            f"parallelize doctor {' '.join(strange)}", why="it takes no such argument", fix="its only one is --json"
        )
    results: list[Result] = []
    for check in CHECKS:
        results.append(check.run(environ))
        if not arguments:
            write(table(results[-1:]))
    write(json.dumps(document(results), indent=2, default=str) + "\n" if arguments else _verdict(results))
    return int(_worst(results) == "fault")


def table(results: Sequence[Result]) -> str:
    """Results for a person: a line for each, what, why and fix of each finding below it."""
    name_width = max(len(check.name) for check in CHECKS)
    margin = len("warning") + 2
    text = ""
    for result in results:
        line = f"{result.status:<{margin}}{result.name:<{name_width}}  "
        text += _wrapped(line + result.summary, indent=len(line))
        for finding in result.findings:
            for word, said in (("", finding.fault.what), ("why: ", finding.fault.why), ("fix: ", finding.fault.fix)):
                text += _wrapped(f"{'':<{margin}}{word}{said}", indent=margin + len(word))
    return text


def _wrapped(line: str, *, indent: int) -> str:
    return (
        textwrap.fill(line, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
        + "\n"
    )


def document(results: Sequence[Result]) -> dict[str, Any]:
    """Results for a program; `schema` counts up when a field changes its meaning or goes.

    `facts` is what each check looked at, for reports of bugs: its fields may change with any version.
    """
    return {
        "schema": _SCHEMA,
        "version": __version__,
        "host": platform.node(),
        "status": _worst(results),
        "checks": [
            {
                "name": result.name,
                "status": result.status,
                "summary": result.summary,
                "findings": [
                    {
                        "id": finding.id,
                        "severity": finding.severity,
                        "what": finding.fault.what,
                        "why": finding.fault.why,
                        "fix": finding.fault.fix,
                    }
                    for finding in result.findings
                ],
                "facts": dict(result.facts),
            }
            for result in results
        ],
    }


def _worst(results: Sequence[Result]) -> str:
    found = {result.status for result in results}
    return next(status for status in ("fault", "warning", "ok") if status in found)


def _verdict(results: Sequence[Result]) -> str:
    severities = [finding.severity for result in results for finding in result.findings]
    counted = [f"{n} {kind}{'s' * (n > 1)}" for kind in ("fault", "warning") if (n := severities.count(kind))]
    return f"{' and '.join(counted) or 'all is well'}\n"
