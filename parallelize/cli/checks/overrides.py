"""Doctor check: environment variables that override options in the code, or slow programs down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cli.findings import Check, Finding, fault, warning
from parallelize.config.config import ENV_PREFIX, Config
from parallelize.errors import ConfigError, Fault

__all__ = ["CHECK", "Overrides", "gather", "judge"]

# (Name, value) -> why the variable slows programs down; value None: any value but "0".
_FOR_DEBUGGING = {
    ("CUDA_LAUNCH_BLOCKING", None): "every kernel launch blocks: the GPU is idle between kernels",
    ("NCCL_P2P_DISABLE", None): "GPUs communicate through host memory only",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "ranks compare every collective before it runs",
}


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Environment variables of this process that change calls.

    Args:
        options: PARALLELIZE_<OPTION> variables and their values.
        refusals: faults in these variables.
        debugging: variables for debugging, which slow programs down, and their values.
    """

    options: Mapping[str, str]
    refusals: tuple[Fault, ...] = ()
    debugging: Mapping[str, str]


def gather(environ: Mapping[str, str]) -> Overrides:
    """Parse the environment variables as a call does."""
    refusals: tuple[Fault, ...] = ()
    try:
        Config.parse().merged(environ)
    except ConfigError as error:
        refusals = error.faults
    return Overrides(
        options={name: text for name, text in sorted(environ.items()) if name.startswith(ENV_PREFIX) and text.strip()},
        refusals=refusals,
        debugging={name: environ[name] for name, _ in _FOR_DEBUGGING if environ.get(name, "").strip()},
    )


def judge(facts: Overrides) -> Iterator[Finding]:
    """Yield findings for variables that a call refuses, that override the code, or that slow programs down."""
    for each in facts.refusals:
        yield fault("override-refused", each.what, why=each.why, fix=each.fix)
    if facts.options and not facts.refusals:
        yield warning(
            "override-set",
            " ".join(f"{name}={text}" for name, text in facts.options.items()),
            why="these override the options in the code, for every call in this environment",
            fix=f"unset {' '.join(facts.options)}, unless this is intended",
        )
    for (name, value), why in _FOR_DEBUGGING.items():
        value_set = facts.debugging.get(name, "0").strip()
        if value_set.upper() == value or (value is None and value_set != "0"):
            yield warning("debugging-variable", f"{name}={value_set}", why=why, fix=f"unset {name}")


def _summary(facts: Overrides) -> str:
    return ", ".join([*facts.options, *facts.debugging]) or "no variable changes calls"


CHECK = Check("variables", gather, _summary, judge)
