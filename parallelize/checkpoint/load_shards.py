"""The values of a checkpoint's divided tensors, in the form in which the things that get them are divided."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint.file_format import Checkpoint, damaged
from parallelize.checkpoint.shard_files import read_pieces
from parallelize.checkpoint.shard_index import is_divided
from parallelize.checkpoint.state_dicts import VALUE, State
from parallelize.runtime.containers import leaves, map_leaves

__all__ = ["filled"]


def filled(path: Path, checkpoint: Checkpoint, things: Mapping[str, Any], states: Mapping[str, State]) -> Checkpoint:
    """The same with values: of what goes into parts this rank's, of the rest all; nothing of what nobody gets.

    No collective: each rank reads the blocks that it needs of.

    Raises:
        ParallelizeError: parts are damaged.
    """
    pieces = checkpoint.pieces
    assert pieces is not None
    places = [each for each in leaves(checkpoint.states()) if is_divided(each)]
    key_of = dict(zip(map(id, places), pieces.keys, strict=True))
    entries = {name: each for name, each in checkpoint.entries.items() if name in states or (each.kind == VALUE)}
    homes: dict[int, Any] = {}
    for name, state in states.items():
        homes |= {id(value): home for value, home in state.homes(things[name], entries[name].state)}
    targets: dict[str, torch.Tensor] = {}
    for each in leaves([entry.state for entry in entries.values()]):
        if is_divided(each):
            targets.setdefault(key_of[id(each)], _empty(each, homes.get(id(each))))
    folder = path / pieces.folder if path.is_dir() else path.parent / pieces.folder
    try:
        read_pieces(folder, {key: pieces.of_key.get(key, ()) for key in targets}, targets)
    except (OSError, ValueError) as exc:
        raise damaged(path, str(exc)) from exc

    def value(leaf: Any) -> Any:
        return targets[key_of[id(leaf)]] if is_divided(leaf) else leaf

    with_values = {
        name: dataclasses.replace(each, state=map_leaves(value, each.state)) for name, each in entries.items()
    }
    return dataclasses.replace(checkpoint, entries=with_values)


def _empty(place: torch.Tensor, home: Any) -> torch.Tensor:
    if home is None:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.empty_like(home.detach(), dtype=place.dtype)
