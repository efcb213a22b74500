"""From a name to the plug-in in the file (or folder) of that name: the directory is the list."""

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

_CONTRACTS: dict[Kind, type] = {"backends": Backend, "launchers": Launcher, "precision": Precision}

# A plug-in module says which class it offers under this name; a file of the folder without it is no plug-in.
_OFFERED = "PLUGIN"


def names(kind: Kind) -> tuple[str, ...]:
    """Sorted names of every plug-in of a kind; this imports all of our own.

    Args:
        kind: the folder, and the entry point group `parallelize.<kind>` in which other distributions announce theirs.
    """
    own = (name for name in _modules(kind) if _own(kind, name) is not None)
    return tuple(sorted({*own, *_foreign(kind)}))


@overload
def get(kind: Literal["backends"], name: str) -> type[Backend]: ...
@overload
def get(kind: Literal["launchers"], name: str) -> type[Launcher]: ...
@overload
def get(kind: Literal["precision"], name: str) -> type[Precision]: ...
def get(kind: Kind, name: str) -> type[Any]:
    """The class that the plug-in of that name offers.

    Only that plug-in is imported: asking for "ddp" does not load fsdp. One of ours wins over another distribution's.

    Raises:
        ConfigError: there is none of that name; or another distribution announces it, and it cannot be imported or is
            no plug-in of this kind.
    """
    found = find(kind, name)
    if found is None:
        raise ConfigError(
            f"{name!r} among the {kind}", why="there is no plug-in of that name", fix=did_you_mean(name, names(kind))
        )
    return found


def find(kind: Kind, name: str) -> type[Any] | None:
    """As `get`, but None if there is no plug-in of that name."""
    own = _own(kind, name)
    if own is not None:
        return own
    point = _foreign(kind).get(name)
    return None if point is None else _load(kind, point)


def _modules(kind: Kind) -> dict[str, str]:
    """Name -> the module that may offer a plug-in: a file, or `plugin.py` in a folder of files."""
    package = importlib.import_module(f"parallelize.{kind}")
    return {
        module.name: f"{package.__name__}.{module.name}{'.plugin' if module.ispkg else ''}"
        for module in pkgutil.iter_modules(package.__path__)
    }


def _own(kind: Kind, name: str) -> type[Any] | None:
    module = _modules(kind).get(name)
    if module is None or importlib.util.find_spec(module) is None:
        return None
    return getattr(importlib.import_module(module), _OFFERED, None)


def _foreign(kind: Kind) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"parallelize.{kind}")}


def _load(kind: Kind, point: EntryPoint) -> type[Any]:
    contract = _CONTRACTS[kind]
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"plug-in {point.name!r} ({point.value}) cannot be imported: {error}",
            why=f"an installed distribution announces it as one of the {kind}",
            fix="update or remove that distribution",
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, contract)):
        raise ConfigError(
            f"plug-in {point.name!r} ({point.value}) is {loaded!r}",
            why=f"an entry point of parallelize.{kind} names a class derived from parallelize.{contract.__name__}",
            fix="update or remove the distribution that announces it",
        )
    return loaded
