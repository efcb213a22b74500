"""Checks of `parallelize doctor`: each gathers facts once, and a pure function judges the facts."""

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
    """One problem that a check found.

    Args:
        id: name of the problem for programs, which stays when the message changes.
        severity: "fault": calls will fail; "warning": calls work, but slower or differently than expected.
        fault: the message: what, why and fix.
    """

    id: str
    severity: Literal["warning", "fault"]
    fault: Fault


def warning(name: str, what: str, *, why: str, fix: str) -> Finding:
    """Build a finding for a problem with which calls still work."""
    return Finding(name, "warning", Fault(what, why, fix))


def fault(name: str, what: str, *, why: str, fix: str) -> Finding:
    """Build a finding for a problem with which calls fail."""
    return Finding(name, "fault", Fault(what, why, fix))


@dataclass(frozen=True)
class Result:
    """The result of one check.

    Args:
        name: name of the check.
        summary: the facts on one line.
        findings: the problems found; may be empty.
        facts: the judged facts, as plain values.
    """

    name: str
    summary: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, Any]

    @property
    def status(self) -> Status:
        """The worst severity of the findings, or "ok"."""
        severities = {finding.severity for finding in self.findings}
        return "fault" if "fault" in severities else "warning" if severities else "ok"


@dataclass(frozen=True)
class Check(Generic[F]):
    """One check of the doctor.

    Args:
        name: name that is printed.
        gather: function that returns the facts, from the environment variables and this machine.
        summary: function that returns the facts on one line.
        judge: pure function that yields the problems in the facts.
    """

    name: str
    gather: Callable[[Mapping[str, str]], F]
    summary: Callable[[F], str]
    judge: Callable[[F], Iterator[Finding]]

    def run(self, environ: Mapping[str, str]) -> Result:
        """Gather and judge the facts; return an exception as a finding, so that the other checks still run."""
        try:
            facts: Any = self.gather(environ)
            return Result(self.name, self.summary(facts), tuple(self.judge(facts)), dataclasses.asdict(facts))
        except Exception as error:  # noqa: BLE001 - an unforeseen error of one check is reported as a finding
            failed = fault(
                "check-failed",
                f"the check {self.name!r} ended with {type(error).__name__}: {error}",
                why="the check does not support something on this machine",
                fix="report it with the output of: parallelize doctor --json",
            )
            return Result(self.name, "could not be checked", (failed,), {})
