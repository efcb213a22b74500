"""Registry of plug-ins: a table of those of this package, and the entry points of others.

    names("backends")          the names of all plug-ins of a family, for messages; imports none
    find("backends", "ddp")    the class of one plug-in; imports its module, and no other

A plug-in of another distribution is an entry point of the group "parallelize.<family>". It may not
replace one of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from parallelize.errors import ConfigError
from parallelize.plugins.base import Backend, Launcher, Precision

Family = Literal["backends", "launchers", "precision"]
"""What a plug-in is. Its modules lie in the folder of this name."""

# Family -> name of a plug-in -> its module in the folder, and its class.
BUILTIN: Mapping[Family, Mapping[str, str]] = {
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

BASE_CLASSES: Mapping[Family, type] = {
    "backends": Backend,
    "launchers": Launcher,
    "precision": Precision,
}


def names(family: Family) -> tuple[str, ...]:
    """Return the sorted names of all plug-ins of a family."""
    installed = entry_points(group=f"parallelize.{family}")
    return tuple(sorted({*BUILTIN[family], *installed.names}))


def find(family: Family, name: str) -> Any:
    """Return the class of a plug-in; None: no plug-in has this name.

    Raises:
        ConfigError: the plug-in of another distribution cannot be imported, or its base class is
            not that of the family.
    """
    group = f"parallelize.{family}"
    if name in BUILTIN[family]:
        return EntryPoint(name, f"{group}.{BUILTIN[family][name]}", group).load()
    for entry_point in entry_points(group=group, name=name):
        return _load(entry_point, BASE_CLASSES[family])
    return None


def _load(entry_point: EntryPoint, base: type) -> type:
    """Return the class of another distribution's plug-in, which has to be a subclass of `base`."""
    origin = f"plug-in {entry_point.name!r} ({entry_point.value})"
    try:
        plugin = entry_point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{origin} cannot be imported: {error}",
            why="an installed distribution declares it in the entry point group "
            f"{entry_point.group}",
            fix="update or remove that distribution",
        ) from error
    if isinstance(plugin, type) and issubclass(plugin, base):
        return plugin
    raise ConfigError(
        f"{origin} is {plugin!r}",
        why=f"an entry point of {entry_point.group} must be a subclass of "
        f"{base.__module__}.{base.__name__}",
        fix="update or remove the distribution that declares it",
    )
