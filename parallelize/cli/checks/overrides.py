"""Variables that change what calls do without a word in the code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cli.findings import Check, Finding, fault, warning
from parallelize.config.config import ENV_PREFIX, Config
from parallelize.errors import ConfigError, Fault

__all__ = ["CHECK", "Overrides", "gather", "judge"]

# Name, value (None: any but "0") -> what it costs.
_FOR_DEBUGGING = {
    ("CUDA_LAUNCH_BLOCKING", None): "every kernel is waited for: the GPU stands idle between them",
    ("NCCL_P2P_DISABLE", None): "GPUs reach each other through the host's memory only",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is compared between the ranks before it runs",
}


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Variables of this process.

    Args:
        options: PARALLELIZE_<OPTION> variables and what they say.
        refusals: what is wrong with them.
        debugging: variables that make programs slow, and what they say.
    """

    options: Mapping[str, str]
    refusals: tuple[Fault, ...] = ()
    debugging: Mapping[str, str]


def gather(environ: Mapping[str, str]) -> Overrides:
    """Read the variables as a call would."""
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
    """Variables that a call refuses, that win over the code, that cost time."""
    for each in facts.refusals:
        yield fault("override-refused", each.what, why=each.why, fix=each.fix)
    if facts.options and not facts.refusals:
        yield warning(
            "override-set",
            " ".join(f"{name}={text}" for name, text in facts.options.items()),
            why="every call in this environment does as these say, whatever its code says",
            fix=f"unset {' '.join(facts.options)}, if this is not what you want",
        )
    for (name, value), why in _FOR_DEBUGGING.items():
        said = facts.debugging.get(name, "0").strip()
        if said.upper() == value or (value is None and said != "0"):
            yield warning("debugging-variable", f"{name}={said}", why=why, fix=f"unset {name}")


def _summary(facts: Overrides) -> str:
    return ", ".join([*facts.options, *facts.debugging]) or "no variable changes what calls do"


CHECK = Check("variables", gather, _summary, judge)
