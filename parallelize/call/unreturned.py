"""Changes that a call made to objects which the caller has, too, and which do not come back from the workers."""

from __future__ import annotations

import math
import random
import sys
import types
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from parallelize.call.module_sync import signature, tensor_fingerprint, tensor_ids
from parallelize.call.reachable import is_a, is_user_code, members, walk

__all__ = ["UnreturnedChanges", "describe"]

_DATA = (Dataset, Sampler, DataLoader)  # what they count or cache is not the result of a training
_CONTAINERS = (list, dict, set, deque)
_MAX_SHOWN = 5


class UnreturnedChanges:
    """Names variables, attributes and containers that a call changed, from lengths and identities; no deep comparison.

    Names with a leading underscore, datasets, samplers and loaders are left out.

    Args:
        roots: name -> the function, and its arguments.
        returned: modules, optimizers and schedulers that come back.
    """

    def __init__(self, roots: Mapping[str, object], *, returned: Sequence[Any]) -> None:
        self._returned = returned
        reached = list(walk(roots, skips=_DATA))
        self._items = [(name, item) for name, item in reached if not _is_private(name) and _is_watched(item)]
        self._before = self._contents()
        models = [*_imported_models(), *((name, item) for name, item in reached if is_a(item, nn.Module))]
        self._models = {id(each): (name, each) for name, each in models}

    def names(self) -> list[str]:
        """Return the names of what has changed since this object was created, sorted."""
        found = set()
        for (name, item), before, after in zip(self._items, self._before, self._contents(), strict=True):
            changed = {key for key, token in after.items() if before.get(key) != token}
            if is_a(item, _CONTAINERS):
                found.update([name] if changed else [])
            else:
                found |= changed
        return sorted(found)

    def unreturned_models(self, trained: Sequence[nn.Module]) -> tuple[list[str], list[str]]:
        """Return the names of trained models that were there before the call, and the signatures of others.

        Args:
            trained: the models that entered a block; those that come back are left out.
        """
        known = tensor_ids(self._returned)
        lost = [each for each in trained if not tensor_ids([each]) & known]
        names = [self._models[id(each)][0] for each in lost if id(each) in self._models]
        return names, [signature(each) for each in lost if id(each) not in self._models]

    def _contents(self) -> list[dict[str, object]]:
        """Return the parts of each object by name, as tokens that differ if a part has changed."""
        known = tensor_ids(self._returned)
        return [_content(name, item, known) for name, item in self._items]


def _content(name: str, item: Any, known: set[int]) -> dict[str, object]:
    try:
        if is_a(item, _CONTAINERS):
            found = {"the length": len(item), **members("", item)}
        else:
            found = {key: value for key, value in members(name, item).items() if _is_data(key, value)}
        return {key: _token(value, known) for key, value in found.items()}
    except Exception:  # noqa: BLE001 - a user's object may raise anything when it is read or compared
        return {}


def describe(names: Sequence[str]) -> list[str]:
    """Return the warning that names what does not come back; none if there are no names."""
    if not names:
        return []
    shown = ", ".join(names[:_MAX_SHOWN]) + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
    why = "only modules, optimizers and schedulers that the caller had before the call come back"
    verb = "does" if len(names) == 1 else "do"
    return [f"{shown} changed in the workers and {verb} not come back: {why}; return the rest from the function"]


def _is_private(name: str) -> bool:
    return "._" in name or name.startswith("_")


def _is_watched(item: Any) -> bool:
    if is_a(item, (*_DATA, LRScheduler)):
        return False
    kind = item if is_a(item, (types.FunctionType, type)) else type(item)
    return is_a(item, _CONTAINERS) or is_user_code(kind.__module__)


def _is_data(name: str, value: object) -> bool:
    is_code = is_a(value, (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType))
    return not (is_code or _is_private(name) or name.endswith(".training"))


def _token(value: object, known: set[int]) -> object:
    """Return the value itself if it is immutable, as a number, a path or a device is, else its identity."""
    kind: Any = type(value)
    if isinstance(value, torch.Tensor):
        return id(value), None if id(value) in known else tensor_fingerprint(value)
    if isinstance(value, (torch.Generator, random.Random)):
        return value.get_state().tolist() if isinstance(value, torch.Generator) else value.getstate()
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    is_value = kind.__hash__ is not None and kind.__eq__ is not object.__eq__ and not is_user_code(kind.__module__)
    return (kind, value) if is_value else (kind, id(value))


def _imported_models() -> list[tuple[str, nn.Module]]:
    """Return the models that the user's imported modules hold, by name."""
    modules = {name: module for name, module in list(sys.modules.items()) if is_user_code(name) and name != "__main__"}
    roots = {f"{name}.{key}": value for name, module in modules.items() for key, value in list(vars(module).items())}
    for name, value in list(roots.items()):
        if is_a(value, type) and is_user_code(value.__module__):
            roots.update({f"{name.rpartition('.')[0]}.{key}": data for key, data in members("", value).items()})
    return [(name, item) for name, item in walk(roots, follows_code=False) if is_a(item, nn.Module)]
