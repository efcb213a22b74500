"""Registry of plug-ins: a table of those of this package, and the entry points of other distributions."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, overload

from parallelize.errors import ConfigError, did_you_mean
from parallelize.plugins.base import Backend, Launcher, Precision

__all__ = ["BUILTIN", "Kind", "find", "get", "names"]

Kind = Literal["backends", "launchers", "precision"]

BUILTIN: Mapping[Kind, Mapping[str, str]] = {
    "backends": {
        "balanced": "balanced.plugin:BalancedBackend",
        "ddp": "ddp:DDPBackend",
        "ddp2": "ddp2:DDP2Backend",
        "dp": "dp:DPBackend",
        "fsdp": "fsdp.plugin:FSDPBackend",
    },
    "launchers": {
        "local": "local.plugin:LocalLauncher",
        "ray": "ray:RayLauncher",
        "slurm": "slurm.plugin:SlurmLauncher",
    },
    "precision": {"apex": "apex:ApexPrecision", "native": "native:NativePrecision"},
}
"""Kind, which is a folder of this package -> name of a plug-in -> its module and class."""

_BASE_CLASSES: dict[Kind, type] = {"backends": Backend, "launchers": Launcher, "precision": Precision}


def names(kind: Kind) -> tuple[str, ...]:
    """Return the sorted names of all plug-ins of a kind; imports none.

    Args:
        kind: other distributions declare theirs in the entry point group `parallelize.<kind>`.
    """
    return tuple(sorted(_entry_points(kind)))


@overload
def get(kind: Literal["backends"], name: str) -> type[Backend]: ...
@overload
def get(kind: Literal["launchers"], name: str) -> type[Launcher]: ...
@overload
def get(kind: Literal["precision"], name: str) -> type[Precision]: ...
def get(kind: Kind, name: str) -> type[Any]:
    """Return the class of a plug-in by name; no other plug-in is imported.

    A built-in plug-in takes precedence over a plug-in of the same name from another distribution.

    Raises:
        ConfigError: no plug-in has this name, or another distribution's plug-in of this name cannot be imported or has
            the wrong base class.
    """
    found = find(kind, name)
    if found is None:
        raise ConfigError(
            f"plug-in {name!r} in {kind}", why="no plug-in has this name", fix=did_you_mean(name, names(kind))
        )
    return found


def find(kind: Kind, name: str) -> type[Any] | None:
    """Return the class of a plug-in, like `get`, but None instead of an error if no plug-in has this name."""
    point = _entry_points(kind).get(name)
    return None if point is None else _load(kind, point)


def _entry_points(kind: Kind) -> dict[str, EntryPoint]:
    group = f"parallelize.{kind}"
    builtin = {name: EntryPoint(name, f"{group}.{value}", group) for name, value in BUILTIN[kind].items()}
    return {**{point.name: point for point in entry_points(group=group)}, **builtin}


def _load(kind: Kind, point: EntryPoint) -> type[Any]:
    base = _BASE_CLASSES[kind]
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"plug-in {point.name!r} ({point.value}) cannot be imported: {error}",
            why=f"an installed distribution declares it in the entry point group parallelize.{kind}",
            fix="update or remove that distribution",
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ConfigError(
            f"plug-in {point.name!r} ({point.value}) is {loaded!r}",
            why=f"an entry point of parallelize.{kind} must be a subclass of {base.__module__}.{base.__name__}",
            fix="update or remove the distribution that declares it",
        )
    return loaded
