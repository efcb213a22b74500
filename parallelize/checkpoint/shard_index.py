"""The index of a folder of shards, which torch.distributed.checkpoint (DCP) writes as a pickle.

    Metadata
      state_dict_metadata    key of a tensor -> its size and dtype, and its chunks
                             key of a value  -> nothing
      storage_data           MetadataIndex of a chunk or value -> file, offset and length: an item
      planner_data           key -> where the value is in nested states, such as ("model", "bias")

The pickle is read without running code from it.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from typing_extensions import override

from parallelize.errors import ConfigError
from parallelize.run.containers import is_entangled

INDEX = ".metadata"
"""Name of the file with the index."""

_MODULES = (
    "torch",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
_CLASSES = (
    "Size",
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_StorageInfo",
    "_MEM_FORMAT_ENCODING",
)
"""What an index consists of, beside torch's dtypes."""


class _IndexUnpickler(pickle.Unpickler):
    """Calls nothing but DCP's dataclasses and torch's sizes."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.serialization":
            # In place of torch's function from the name of a layout, which is not used here.
            return str
        # Python 3.13 names a module in pathlib. The path is that of the folder when it was written.
        if module.partition(".")[0] == "pathlib":
            return PurePath
        if (module, name) == ("builtins", "getattr"):
            # Some releases of Python pickle torch's memory formats, members of an enum, by it.
            return operator.getitem
        found_class: Any = None
        if module in _MODULES and "." not in name:
            found_class = super().find_class(module, name)
        if name in _CLASSES or isinstance(found_class, torch.dtype):
            return found_class
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def read_index(content: bytes) -> Any:
    """Return an index whose files lie in its folder, and whose chunks make up each tensor.

    Raises:
        ValueError: the index is another one.
        UnpicklingError: reading it would call something else.
    """
    index = _IndexUnpickler(io.BytesIO(content)).load()
    for item in index.storage_data.values():
        require_plain_name(item.relative_path)
    for key, stored in index.state_dict_metadata.items():
        if not is_tensor(stored):
            continue
        # Otherwise the rest of the tensor would be uninitialized.
        stored_numbers = sum(chunk.sizes.numel() for chunk in stored.chunks)
        if stored_numbers != stored.size.numel():
            raise ValueError(f"its shards do not cover all of {key}")
    return index


def is_tensor(stored: Any) -> bool:
    """Return whether an entry of `state_dict_metadata` is of a tensor."""
    return hasattr(stored, "chunks")


def require_plain_name(name: Any) -> str:
    """Return the name of a file or folder; raise a ValueError if it is a path, or no text."""
    if type(name) is not str or Path(name).name != name:
        raise ValueError(f"{name!r} is not a plain file or folder name")
    return name


def placeholder(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the meta tensor that stands for a tensor in the shards."""
    return torch.empty(shape, dtype=dtype, device="meta")


def key_by_tensor(states: Mapping[str, Any]) -> dict[int, str]:
    """Return DCP's key of each tensor in nested states, by its id; one in a tuple has no key."""
    if is_entangled(states):
        raise ConfigError(
            "a folder of lists that are in each other, many times over",
            why="torch.distributed.checkpoint writes a list once for each place that it is in",
            fix="save them with sharded=False, or as separate flat lists",
        )
    value_by_key, _ = flatten_state_dict(dict(states))
    keys = {}
    for key, value in value_by_key.items():
        if isinstance(value, torch.Tensor):
            keys[id(value)] = key
    return keys
