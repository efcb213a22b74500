"""`parallelize doctor`: checks whether calls will work on this machine, and prints how to fix problems."""

from __future__ import annotations

import dataclasses
import json
import platform
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parallelize.cli.checks import accelerators, cluster, limits, memory, network, overrides, ports, smoke, versions
from parallelize.cli.findings import Check, Result
from parallelize.errors import ConfigError
from parallelize.version import __version__

__all__ = ["CHECKS", "HELP", "doctor", "document", "table"]

HELP = """\
usage: parallelize doctor [--json]

Checks this machine and its environment, and runs an all_reduce of two ranks: what is wrong, why, how to fix it.
Exit code 1 if there is a fault, 0 if there are only warnings or none.

  --json   the results as JSON: {schema, version, host, status, checks: [{name, status, summary, findings, facts}]}
"""

# Basic checks come first; the last check runs two ranks, as a call does.
CHECKS: tuple[Check[Any], ...] = (
    versions.CHECK,
    accelerators.CHECK,
    network.CHECK,
    ports.CHECK,
    memory.CHECK,
    limits.CHECK,
    cluster.CHECK,
    overrides.CHECK,
    smoke.CHECK,
)

_SCHEMA = 1
_WIDTH = 118


def doctor(arguments: Sequence[str], environ: Mapping[str, str], write: Callable[[str], object]) -> int:
    """Run every check and write the results.

    Args:
        arguments: the words after `parallelize doctor`.
        environ: environment variables of this process.
        write: function that prints text.

    Returns:
        The exit code: 1 if there is a fault, else 0.

    Raises:
        ConfigError: an argument is unknown.
    """
    if set(arguments) & {"-h", "--help"}:
        write(HELP)
        return 0
    unknown = [each for each in arguments if each != "--json"]
    if unknown:
        raise ConfigError(
            f"parallelize doctor {' '.join(unknown)}", why="no such option", fix="use --json, the only option"
        )
    results: list[Result] = []
    for check in CHECKS:
        results.append(check.run(environ))
        if not arguments:
            write(table(results[-1:]))
    write(json.dumps(document(results), indent=2, default=str) + "\n" if arguments else _totals(results))
    return int(_worst(results) == "fault")


def table(results: Sequence[Result]) -> str:
    """Return results as text: one line per check, with what, why and fix of each finding below it."""
    name_width = max(len(check.name) for check in CHECKS)
    margin = len("warning") + 2
    text = ""
    for result in results:
        line = f"{result.status:<{margin}}{result.name:<{name_width}}  "
        text += _wrap(line + result.summary, indent=len(line))
        for finding in result.findings:
            fault = finding.fault
            for label, sentence in (("", fault.what), ("why: ", fault.why), ("fix: ", fault.fix)):
                text += _wrap(f"{'':<{margin}}{label}{sentence}", indent=margin + len(label))
    return text


def _wrap(line: str, *, indent: int) -> str:
    margin = " " * indent
    text = textwrap.fill(line, _WIDTH, subsequent_indent=margin, break_on_hyphens=False, break_long_words=False)
    return f"{text}\n"


def document(results: Sequence[Result]) -> dict[str, Any]:
    """Return results as plain values for JSON; `schema` is incremented if a field is removed or changes its meaning.

    `facts` has the data that each check judged, for bug reports; its fields may change with any version.
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
                    {"id": finding.id, "severity": finding.severity, **dataclasses.asdict(finding.fault)}
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


def _totals(results: Sequence[Result]) -> str:
    severities = [finding.severity for result in results for finding in result.findings]
    counts = [f"{n} {kind}{'s' * (n > 1)}" for kind in ("fault", "warning") if (n := severities.count(kind))]
    return f"{' and '.join(counts) or 'no problems found'}\n"
