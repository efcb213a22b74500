"""Whether a saved state may take the place of an object's own state, by the types of its entries.

torch's `load_state_dict` of optimizers, schedulers and scalers takes almost any state, and fails in
a later step. A file may be damaged or forged, so that its entries are compared before.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch


def unlike_entries(own_state: Any, saved_state: Any) -> list[str]:
    """Return the entries of a saved state that have other types than those of an object's state.

    Lists must be there: an object of torch takes them out. A number may be missing, as in a state
    of another version of torch; then the object keeps its own.
    """
    if not isinstance(saved_state, Mapping):
        return [f"its state is a {type(saved_state).__name__}"]
    if not isinstance(own_state, Mapping):
        return []
    missing = []
    unlike = []
    for name, own_value in own_state.items():
        if name not in saved_state:
            if _is_row(own_value):
                missing.append(f"{name} is missing")
        elif not _may_replace(own_value, saved_state[name]):
            unlike.append(
                f"{name} is {reprlib.repr(saved_state[name])}, "
                f"where the object has {reprlib.repr(own_value)}"
            )
    return missing + unlike


def _may_replace(own_value: Any, saved_value: Any) -> bool:
    """Return whether a saved value may take the place of an object's value, by their types."""
    if own_value is None:
        return True
    if isinstance(own_value, bool):
        return saved_value is None or isinstance(saved_value, bool)
    if isinstance(own_value, str):
        return isinstance(saved_value, str)
    if _is_number(own_value):
        return _is_number(saved_value)
    if isinstance(own_value, Mapping):
        return isinstance(saved_value, Mapping)
    if _is_row(own_value):
        return _may_replace_row(own_value, saved_value)
    return True


def _may_replace_row(own_row: Any, saved_row: Any) -> bool:
    if not _is_row(saved_row):
        return False
    # A list, such as that of base_lrs, may be longer. A tuple, such as betas, may not.
    if isinstance(own_row, tuple) and len(own_row) != len(saved_row):
        return False
    if not own_row:
        return True
    return all(_may_replace(own_row[0], item) for item in saved_row)


def _is_row(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def layout_of(value: Any) -> str:
    """Return how a tensor holds its values, as text; "" for what is no tensor.

    The values of a tensor can be copied into any tensor of equal layout and shape.
    """
    if not isinstance(value, torch.Tensor):
        return ""
    words = [str(value.layout)]
    if value.is_complex():
        words.append("complex")
    if value.is_quantized:
        words.append("quantized")
    return " ".join(words)


def shapes_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape of each tensor in a state dict, by name; None for what is no tensor."""
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def are_versions(versions: Any) -> bool:
    """Return whether these are version numbers of modules, which torch compares with others."""
    if not isinstance(versions, Mapping):
        return False
    for entry in versions.values():
        if not isinstance(entry, Mapping):
            return False
        if not isinstance(entry.get("version"), (int, type(None))):
            return False
    return True


def is_optimizer_state(state: Any) -> bool:
    """Return whether a state has the form of an optimizer's: entries by the names in its groups."""
    groups = state.get("param_groups")
    entries = state.get("state")
    if not isinstance(groups, list) or not isinstance(entries, Mapping):
        return False
    names: list[Any] = []
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            return False
        names += group["params"]
    if not all(isinstance(name, (int, str)) for name in names):
        return False
    if len(set(names)) < len(names):
        return False
    return all(isinstance(entries.get(name, {}), Mapping) for name in names)


def kinds_of_entries(entries: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
    """Return the names in an optimizer's entry of a parameter, and whether they are tensors."""
    kinds = []
    for name, value in entries.items():
        kinds.append((str(name), isinstance(value, torch.Tensor)))
    return tuple(sorted(kinds))


def fits_parameter(value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a value is a number, or a tensor with a number for each of a parameter's."""
    if not isinstance(value, torch.Tensor):
        return True
    if value.layout is not torch.strided:
        return False
    return value.numel() == 1 or value.shape == parameter.shape
