"""The record that `save` writes beside the states, and its check before anything is loaded.

    format        number of the form of the record
    torch         version that has written the file
    world_size    number of processes
    rng           for each rank: states of its generators by name; "data": its datasets' by loader
    objects       for each state: its kind, the class of the object, and what must fit
    shards        in a folder: the name of the folder of shards, its index, and checksums of items

A file may be forged, or a later program may have changed it. What is read here has the types that
`load` relies on, so that it does not fail after it has changed the first object.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelize.checkpoint.state_handler import ObjectKind
from parallelize.errors import ConfigError

RECORD = "_parallelize"
"""Key of the record in a file, beside the names of the states."""

FORMAT = 2


def check_record(path: Path, record: Any, states: Mapping[Any, Any]) -> None:
    """Raise a ConfigError for a record that `save` does not write.

    Args:
        path: the path of the file, for messages.
        record: what was read; {} in a file of another program.
        states: the states in the file, by name.
    """
    if not _is_mapping(record):
        raise not_of_save(path, f"it is a {type(record).__name__}")
    written_format = record.get("format", FORMAT)
    if type(written_format) is not int or written_format != FORMAT:
        raise ConfigError(
            f"{path} has format {reprlib.repr(written_format)}, this version reads {FORMAT}",
            why="another version of parallelize has written it",
            fix=f"update parallelize, or remove the key '{RECORD}' from it: the rest is a "
            "dictionary of states",
        )
    if type(record.get("torch", "")) is not str:
        raise not_of_save(path, "torch= is not the number of a version")
    world_size = record.get("world_size", 0)
    if type(world_size) is not int or world_size < 0:
        fault = f"world_size={reprlib.repr(world_size)} is not a number of processes"
        raise not_of_save(path, fault)
    _check_random_states(path, record.get("rng", ()))
    if record.get("objects") is not None:
        _check_objects(path, record["objects"], states)


def _check_random_states(path: Path, states_of_ranks: Any) -> None:
    if not isinstance(states_of_ranks, (list, tuple)):
        raise not_of_save(path, f"rng= is a {type(states_of_ranks).__name__}, not a list")
    for rank, states in enumerate(states_of_ranks):
        if not _is_mapping(states) or not _is_mapping(states.get("data", {})):
            raise not_of_save(path, f"rng[{rank}] does not hold states by name")


def _check_objects(path: Path, objects: Any, states: Mapping[Any, Any]) -> None:
    if not _is_mapping(objects):
        raise not_of_save(path, f"objects= is a {type(objects).__name__}, not a dictionary")
    for name in states:
        if name not in objects:
            raise not_of_save(path, f"objects= does not name the state {name!r:.80}")
    for name, details in objects.items():
        if not _is_mapping(details) or not _is_kind(details.get("kind")):
            raise not_of_save(path, f"objects[{name!r:.80}] is not of a kind that save() writes")
        for key, detail in details.items():
            if not _is_detail(key, detail):
                fault = f"objects[{name!r:.80}][{key!r}] is a {type(detail).__name__}"
                raise not_of_save(path, fault)


def _is_kind(kind: Any) -> bool:
    return type(kind) is str and kind in list(ObjectKind)


def _is_detail(key: str, detail: Any) -> bool:
    """Return whether a fact about an object is a text, a shape, or the state of a precision."""
    if key == "precision":
        return _is_mapping(detail)
    if isinstance(detail, list):
        return all(type(length) is int for length in detail)
    return type(detail) is str


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(type(key) is str for key in value)


def not_of_save(path: Path, why: str) -> ConfigError:
    """Return the error for a checkpoint that this library has not written, or not so."""
    return ConfigError(
        f"{path} is damaged, or save() has not written it",
        why=f"in its record, {why}",
        fix=f"load another checkpoint; or, to take the states alone, remove the key '{RECORD}'",
    )
