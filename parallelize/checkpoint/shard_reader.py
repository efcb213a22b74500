"""Reads folders of shards, of `shards.write_folder` and of other programs.

Each rank reads the stored chunks that overlap its own shards, and no rank waits for another. The
checksum of each item is verified. An item is of this save if its checksum is that in the main file.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from parallelize.checkpoint import files
from parallelize.checkpoint.safe_types import dtensor_behind
from parallelize.checkpoint.shard_index import (
    INDEX,
    is_tensor,
    key_by_tensor,
    placeholder,
    read_index,
    require_plain_name,
)
from parallelize.checkpoint.state_handler import clone_tensor
from parallelize.errors import ConfigError
from parallelize.run.containers import map_leaves

_LIGHTNING = "meta.pt"
"""What Lightning saves beside the shards."""


def read_folder(path: Path, readers: files.Readers) -> files.Checkpoint:
    """Read and verify the main file of a folder, or the index in a folder of another program.

    The shards are read by the checkpoint's `fill`.

    Args:
        path: the folder.
        readers: the ranks that verify the main file together.
    """
    main_file = path / files.MAIN_FILE
    if main_file.exists():
        checkpoint = files.read(main_file, readers)
        with files.reading(main_file):
            shards = _Shards.of_record(path, checkpoint.record["shards"])
    else:
        with files.reading(path / INDEX):
            shards = _Shards(path, read_index((path / INDEX).read_bytes()), {})
            checkpoint = files.Checkpoint(shards.states_of_other_program(), record={})
    with files.reading(main_file):
        keys = key_by_tensor(checkpoint.states)

    def fill(part: Any, target_by_id: Mapping[int, Any]) -> Any:
        return shards.fill(part, keys, target_by_id)

    return dataclasses.replace(checkpoint, fill=fill, is_mapped=False)


@dataclasses.dataclass(frozen=True)
class _Shards:
    """Stored tensors, which take the place of meta tensors in the states.

    Args:
        folder: the folder with the files.
        index: the index of the folder.
        checksums: name of a file -> offset of an item -> checksum; {}: the main file has none.
    """

    folder: Path
    index: Any
    checksums: Mapping[str, Mapping[int, str]]

    @classmethod
    def of_record(cls, path: Path, record: Any) -> _Shards:
        """Return the shards that the record in a main file names.

        Raises:
            Exception: of any class: the record is damaged or forged.
        """
        folder = path / require_plain_name(record["folder"])
        index = read_index(record["index"])
        # Earlier versions wrote no checksums.
        checksums = record.get("checksums", {})
        for checksum_by_offset in dict(checksums).values():
            if not isinstance(checksum_by_offset, dict):
                raise TypeError("the checksums of its shards are not by file and offset")
        return cls(folder, index, checksums)

    def states_of_other_program(self) -> dict[str, Any]:
        """Return the states in a folder without a main file, with meta tensors for tensors."""
        value_by_key = {}
        for key, stored in self.index.state_dict_metadata.items():
            if is_tensor(stored):
                value_by_key[key] = placeholder(stored.size, stored.properties.dtype)
            else:
                items = [item for part, item in self.index.storage_data.items() if part.fqn == key]
                value_by_key[key] = self._read_item(items[0])
        place_by_key = self.index.planner_data
        if not place_by_key:
            place_by_key = {key: (key,) for key in value_by_key}
        # torch makes a list as long as its largest number says, however few items there are.
        for key, place in place_by_key.items():
            for part in place:
                if type(part) is int and not 0 <= part < len(place_by_key):
                    raise ValueError(f"{key} is at {place}, beyond the items of the index")
        states = unflatten_state_dict(value_by_key, place_by_key)
        if (self.folder / _LIGHTNING).is_file():
            states.update(files.read(self.folder / _LIGHTNING).states)
        return states

    def fill(self, part: Any, keys: Mapping[int, str], target_by_id: Mapping[int, Any]) -> Any:
        """Return a part of the states, in memory, with stored tensors for the meta tensors.

        Args:
            part: of the states.
            keys: id of a meta tensor in the states -> its key in the index.
            target_by_id: id of a meta tensor -> the DTensor whose shard of this rank takes its
                place.
        """
        tensor_by_key: dict[str, Any] = {}

        def fill_leaf(leaf: Any) -> Any:
            key = keys.get(id(leaf))
            if key is None:
                # A tensor in a tuple is in the main file, which is memory-mapped.
                return clone_tensor(leaf)
            if key not in tensor_by_key:
                like = leaf
                if id(leaf) in target_by_id:
                    like = dtensor_behind(target_by_id[id(leaf)]).detach()
                # On the CPU: a device may have no memory for a second copy of its shards.
                empty = torch.empty_like(like, dtype=leaf.dtype, device="cpu")
                tensor_by_key[key] = empty
            return tensor_by_key[key]

        filled = map_leaves(fill_leaf, part, once=True)
        with files.reading(self.folder):
            self._read_into(tensor_by_key)
        return filled

    def _read_into(self, tensor_by_key: dict[str, Any]) -> None:
        """Copy what is stored into tensors, which may be this rank's shards of DTensors."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensor_by_key, self.index)

        def read_overlap(overlap: Any) -> None:
            values = self._read_item(self.index.storage_data[overlap.storage_index])
            starts = overlap.storage_offsets
            for dim, (start, length) in enumerate(zip(starts, overlap.lengths, strict=True)):
                values = values.narrow(dim, start, length)
            planner.resolve_tensor(overlap).detach().copy_(values)

        # Overlaps have no number in common, so that threads may copy them at the same time.
        files.call_in_threads(read_overlap, planner.create_local_plan().items)

    def _read_item(self, item: Any) -> Any:
        """Return a stored chunk or value after verifying its checksum.

        Args:
            item: a value of `storage_data` in the index: a file, an offset and a length.
        """
        path = self.folder / item.relative_path
        with files.reading(path):
            with path.open("rb") as file:
                file.seek(item.offset)
                content = io.BytesIO(file.read(item.length))
            checksum = files.zip_checksum(content)
            if self.checksums and checksum != self.checksums[path.name][item.offset]:
                main_file = self.folder.parent / files.MAIN_FILE
                raise ConfigError(
                    f"{path} is damaged, or a file of another save",
                    why=f"what it holds at byte {item.offset} has another checksum than "
                    f"{main_file} says: the tensors would be of two saves",
                    fix="copy the folder as a whole from where it was saved, or load another "
                    "checkpoint",
                )
            content.seek(0)
            return torch.load(content, map_location="cpu", weights_only=True)
