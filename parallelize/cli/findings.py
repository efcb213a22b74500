"""What a check of the doctor finds: facts, gathered once, then judged by a function that looks at nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from parallelize.errors import Fault

__all__ = ["Check", "Finding", "Result", "fault", "warning"]

F = TypeVar("F")
Status = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Args:
        id: its name, for programs; it stays when the words change.
        severity: "fault": calls will fail; "warning": they work, but worse or otherwise than one may think.
        fault: what, why, fix.
    """

    id: str
    severity: Literal["warning", "fault"]
    fault: Fault


def warning(name: str, what: str, *, why: str, fix: str) -> Finding:
    """A finding with which calls still work."""
    return Finding(name, "warning", Fault(what, why, fix))


def fault(name: str, what: str, *, why: str, fix: str) -> Finding:
    """A finding with which calls fail."""
    return Finding(name, "fault", Fault(what, why, fix))


@dataclass(frozen=True)
class Result:
    """What one check has come to.

    Args:
        name: the check's.
        summary: what there is, on one line.
        findings: what is wrong with it; none: all is well.
        facts: what was judged, as plain values.
    """

    name: str
    summary: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, Any]

    @property
    def status(self) -> Status:
        """The worst of its findings."""
        severities = {finding.severity for finding in self.findings}
        return "fault" if "fault" in severities else "warning" if severities else "ok"


@dataclass(frozen=True)
class Check(Generic[F]):
    """One row of the doctor's table.

    Args:
        name: as it is shown.
        gather: the facts, from this process's variables and machine.
        summary: the facts on one line.
        judge: what is wrong with the facts; pure.
    """

    name: str
    gather: Callable[[Mapping[str, str]], F]
    summary: Callable[[F], str]
    judge: Callable[[F], Iterator[Finding]]

    def run(self, environ: Mapping[str, str]) -> Result:
        """Gather and judge; a check that cannot be made is a finding too, and the others go on."""
        try:
            facts: Any = self.gather(environ)
            return Result(self.name, self.summary(facts), tuple(self.judge(facts)), dataclasses.asdict(facts))
        except Exception as error:  # noqa: BLE001 - whatever a strange machine does to one check, it is told, not hidden
            found = fault(
                "check-failed",
                f"the check {self.name!r} ended with {type(error).__name__}: {error}",
                why="this machine differs from all on which it was tried",
                fix="report it with the output of: parallelize doctor --json",
            )
            return Result(self.name, "could not be checked", (found,), {})
