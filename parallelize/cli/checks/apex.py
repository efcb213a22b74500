"""Doctor check: which apex package is installed: NVIDIA's with apex.amp, NVIDIA's without it, or PyPI's."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cli.findings import Check, Finding, warning

__all__ = ["CHECK", "Apex", "gather", "judge"]

_FIX = "use amp_engine='native', which has the same levels; or build an Apex from before 2025 from its sources"


@dataclass(frozen=True, kw_only=True)
class Apex:
    """The module that `import apex` finds.

    Args:
        place: file of the module; None: apex is not installed.
        has_amp: whether amp_engine="apex" can use it.
        is_nvidia: whether it has modules of NVIDIA's Apex.
        error: why it cannot be imported; None: it can.
    """

    place: str | None = None
    has_amp: bool = False
    is_nvidia: bool = False
    error: str | None = None


def gather(_environ: Mapping[str, str]) -> Apex:
    """Import apex, if it is installed."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Apex()
    place = spec.origin or "?"
    try:
        module = importlib.import_module("apex")
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything
        return Apex(place=place, error=f"{type(error).__name__}: {error}")
    nvidia_modules = ("normalization", "optimizers", "parallel", "contrib")
    is_nvidia = any(importlib.util.find_spec(f"apex.{name}") is not None for name in nvidia_modules)
    return Apex(place=place, has_amp=hasattr(module, "amp"), is_nvidia=is_nvidia)


def judge(facts: Apex) -> Iterator[Finding]:
    """Yield a warning for an apex that amp_engine="apex" cannot use."""
    if facts.place is None or facts.has_amp:
        return
    if facts.error is not None:
        name, why = "apex-broken", f"it cannot be imported: {facts.error}"
    elif facts.is_nvidia:
        name, why = "apex-without-amp", "NVIDIA removed apex.amp in 2025"
    else:
        name, why = "apex-unrelated", "PyPI's package named apex is not NVIDIA's"
    yield warning(name, f"amp_engine='apex' does not work with {facts.place}", why=why, fix=_FIX)


def _summary(facts: Apex) -> str:
    return "not installed; only amp_engine='apex' needs it" if facts.place is None else facts.place


CHECK = Check("apex", gather, _summary, judge)
