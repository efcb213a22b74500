"""Registry of plug-ins: a table of those of this package, and the entry points of other distributions."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from parallelize.errors import ConfigError
from parallelize.plugins.base import Backend, Launcher, Precision

Kind = Literal["backends", "launchers", "precision"]

BUILTIN: Mapping[Kind, Mapping[str, str]] = {
    "backends": {
        "auto": "auto.plugin:AutoBackend",
        "balanced": "balanced.plugin:BalancedBackend",
        "ddp": "ddp:DDPBackend",
        "ddp2": "ddp:DDP2Backend",
        "dp": "dp:DPBackend",
        "fsdp": "fsdp.plugin:FSDPBackend",
    },
    "launchers": {
        "local": "local.launcher:LocalLauncher",
        "ray": "ray:RayLauncher",
        "slurm": "slurm.launcher:SlurmLauncher",
        "ssh": "ssh:SSHLauncher",
    },
    "precision": {"apex": "apex:ApexPrecision", "native": "native:NativePrecision"},
}
"""Kind, which is a folder of this package -> name of a plug-in -> its module and class."""

_BASE_CLASSES: dict[Kind, type] = {
    "backends": Backend,
    "launchers": Launcher,
    "precision": Precision,
}


def names(kind: Kind) -> tuple[str, ...]:
    """Return the sorted names of all plug-ins of a kind; imports none.

    Args:
        kind: other distributions declare theirs in the entry point group `parallelize.<kind>`.
    """
    return tuple(sorted({*BUILTIN[kind], *entry_points(group=f"parallelize.{kind}").names}))


def find(kind: Kind, name: str) -> Any:
    """Return the class of a plug-in by name, None if no plug-in has it; no other plug-in is imported.

    A built-in plug-in takes precedence over a plug-in of the same name from another distribution.

    Raises:
        ConfigError: another distribution's plug-in of this name cannot be imported or has the wrong base class.
    """
    group, base = f"parallelize.{kind}", _BASE_CLASSES[kind]
    if name in BUILTIN[kind]:
        return EntryPoint(name, f"{group}.{BUILTIN[kind][name]}", group).load()
    for point in entry_points(group=group, name=name):
        what = f"plug-in {name!r} ({point.value})"
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{what} cannot be imported: {error}",
                why=f"an installed distribution declares it in the entry point group {group}",
                fix="update or remove that distribution",
            ) from error
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            raise ConfigError(
                f"{what} is {loaded!r}",
                why=f"an entry point of {group} must be a subclass of {base.__module__}.{base.__name__}",
                fix="update or remove the distribution that declares it",
            )
        return loaded
    return None
