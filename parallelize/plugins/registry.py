"""Registry of plug-ins: finds built-in plug-ins by file name, and those of other distributions by entry point."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, overload

from parallelize.errors import ConfigError, did_you_mean
from parallelize.plugins.base import Backend, Launcher, Precision

__all__ = ["Kind", "find", "get", "names"]

Kind = Literal["backends", "launchers", "precision"]

_BASE_CLASSES: dict[Kind, type] = {"backends": Backend, "launchers": Launcher, "precision": Precision}

# Module attribute that holds a plug-in's class; the registry ignores files without this attribute.
_PLUGIN_ATTRIBUTE = "PLUGIN"


def names(kind: Kind) -> tuple[str, ...]:
    """Return the sorted names of all plug-ins of a kind; imports every built-in one.

    Args:
        kind: folder of built-in plug-ins; other distributions declare theirs in entry point group `parallelize.<kind>`.
    """
    builtin = (name for name in _modules(kind) if _builtin(kind, name) is not None)
    return tuple(sorted({*builtin, *_entry_points(kind)}))


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
    builtin = _builtin(kind, name)
    if builtin is not None:
        return builtin
    point = _entry_points(kind).get(name)
    return None if point is None else _load(kind, point)


def _modules(kind: Kind) -> dict[str, str]:
    """Return plug-in name -> module that may define it: a file of the folder, or `plugin.py` in a subfolder."""
    package = importlib.import_module(f"parallelize.{kind}")
    return {
        module.name: f"{package.__name__}.{module.name}{'.plugin' if module.ispkg else ''}"
        for module in pkgutil.iter_modules(package.__path__)
    }


def _builtin(kind: Kind, name: str) -> type[Any] | None:
    module = _modules(kind).get(name)
    if module is None or importlib.util.find_spec(module) is None:
        return None
    return getattr(importlib.import_module(module), _PLUGIN_ATTRIBUTE, None)


def _entry_points(kind: Kind) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"parallelize.{kind}")}


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
