"""NumPy arrays of a call: what they weigh, and how large ones reach another process without copies.

    array in memory   a tensor over its elements, which torch.save writes beside the pickle
    memmap of a file  the path of the file, for a reader on this machine

The reader maps both copy-on-write or as the memmap was opened: a page costs memory in a process
only after that process has written to it.

    elements  the memory of an array, in one dimension and in the order in which it lies there
    root      the memmap that has opened a file; views and slices of it lie in the root's memory
    mapping   a range of addresses of this process that is a part of a file
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import mmap
import os
import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parallelize.call.reachable import is_a
from parallelize.errors import LaunchError

# A smaller array is a part of the pickle: a record of its own would take longer than its copy.
_MIN_BYTES = 2**15
_PICKLING = ("__reduce__", "__reduce_ex__", "__setstate__")
_Array = np.ndarray[Any, Any]
_Memmap = np.memmap[Any, Any]
_Reduced = tuple[Any, ...]


def bytes_of(item: Any) -> int:
    """Return the bytes that pickling an object would copy from its own memory, without reading it.

    0: the object has no memory of its own, only parts.
    """
    if is_a(item, torch.Tensor) and item.layout is torch.sparse_coo:
        return item._values().nbytes  # nbytes of such a tensor raises
    if issubclass(type(item), (torch.Tensor, np.ndarray)):
        return int(item.nbytes)
    if torch.is_storage(item):
        return int(item.nbytes())
    if is_a(item, str):
        return len(item)
    # bytes, bytearray, array.array, buffers of pyarrow. A class may raise anything.
    with contextlib.suppress(Exception), memoryview(item) as view:
        return view.nbytes
    return 0


def has_plain_elements(item: object) -> bool:
    """Whether an object is an array without references to objects, and pickled as NumPy does."""
    if not is_a(item, np.ndarray) or item.dtype.hasobject:
        return False
    array_type = type(item)
    is_numpys = all(getattr(array_type, name) is getattr(np.ndarray, name) for name in _PICKLING)
    return is_numpys and array_type not in copyreg.dispatch_table


# Arrays in memory


@dataclass(frozen=True)
class _Layout:
    """How an array lies in a memory.

    Attributes:
        array_type: its class.
        dtype: type of the elements.
        shape: elements by axis.
        strides: bytes from an element to the next one, by axis.
        is_writable: whether it may be written to.
        offset: bytes from the start of the memory to the first element.
    """

    array_type: type[_Array]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_writable: bool
    offset: int = 0


def _array_in(layout: _Layout, memory: Any) -> Any:
    """Return an array in the memory of a tensor or of a memmap."""
    array: Any = np.ndarray.__new__(
        layout.array_type,
        layout.shape,
        layout.dtype,
        memory.numpy() if is_a(memory, torch.Tensor) else memory,
        layout.offset,
        layout.strides,
    )
    if is_a(array, np.memmap):
        array.__array_finalize__(memory)  # tells a view its file and mode
    array.flags.writeable = layout.is_writable
    return array


def reduce_array(array: _Array) -> _Reduced | None:
    """Return how a large array is pickled: by a tensor over its elements; None: as NumPy does.

    The reader gets what NumPy's pickles give: the order of the axes if the array has no gaps, else
    rows; read-only if the array is a plain one without gaps that is read-only.
    """
    if array.nbytes < _MIN_BYTES or not has_plain_elements(array):
        return None
    plain = np.ndarray.view(array, np.ndarray)
    axes = sorted(range(plain.ndim), key=plain.strides.__getitem__, reverse=True)
    packed = plain.transpose(axes)
    has_gaps = not packed.flags.c_contiguous
    if has_gaps:
        plain = packed = np.ascontiguousarray(plain)
    is_writable = plain.flags.writeable or type(array) is not np.ndarray
    layout = _Layout(type(array), plain.dtype, plain.shape, plain.strides, is_writable)
    return _array_in, (layout, _tensor_over(packed.reshape(-1)))


def _tensor_over(elements: _Array) -> torch.Tensor:
    """Return a tensor that has its elements in the memory of a one-dimensional array."""
    # torch.from_numpy warns about read-only memory, once in a process: the user's own warning of
    # that would be lost. The tensor is only read.
    interface = dict(elements.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    writable = np.asarray(types.SimpleNamespace(__array_interface__=interface, owner=elements))
    # torch.save refuses memory of which it has tensors of two types. So an array has the type that
    # a tensor of the user's over the same memory has.
    with contextlib.suppress(TypeError, ValueError):  # torch has no such type
        return torch.from_numpy(writable)
    return torch.from_numpy(writable.view(np.uint8))


# Memmaps of files


@dataclass
class _Mapping:
    """One mapping of /proc/self/smaps.

    Attributes:
        start: first address.
        end: address after the last one.
        inode: number of the file when it was mapped.
        path: path that the file has now; with " (deleted)" if it has none.
        private_kb: KiB of pages that were written here and did not reach the file.
    """

    start: int
    end: int
    inode: int
    path: str
    private_kb: int = 0


# start-end permissions offset device inode path
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+) *(.*)")


class Mappings:
    """The files that this process has mapped, as Linux shows them when they are first asked for."""

    def has_file(self, root: _Memmap) -> bool:
        """Whether the file of a memmap, opened by its path once more, has the memmap's elements.

        Not if it was deleted or replaced, may no longer be opened in this mode, or if a memmap of
        mode "c" was written to: its pages are private to this process.
        """
        if root.filename is None:
            return False
        path = os.path.realpath(root.filename)
        mode = os.R_OK if root.mode in ("r", "c") else os.R_OK | os.W_OK
        if not os.access(path, mode):
            return False
        # Not the device: on btrfs and overlayfs, Linux shows another one here than in stat.
        inode = Path(path).stat().st_ino
        start = _address(root)
        end = start + root.nbytes
        for mapping in self._all:  # Linux divides and merges what a program has mapped
            if mapping.end <= start or mapping.start >= end:
                continue
            if (mapping.path, mapping.inode) != (path, inode):
                return False
            if root.mode == "c" and mapping.private_kb:
                return False
        return True

    @functools.cached_property
    def _all(self) -> list[_Mapping]:
        mappings = list[_Mapping]()
        for line in Path("/proc/self/smaps").read_text(errors="surrogateescape").splitlines():
            if header := _HEADER.match(line):
                start, end, inode, path = header.groups()
                mappings.append(_Mapping(int(start, 16), int(end, 16), int(inode), path))
            elif line.startswith(("Anonymous:", "Swap:")):
                mappings[-1].private_kb += int(line.split()[1])
        return mappings


def _address(array: _Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def is_in_file(array: _Array) -> bool:
    """Whether what is written to an array reaches a file, which other processes have, too."""
    root = _root_of(array)
    return root is not None and root.mode != "c"


def _root_of(array: _Array) -> _Memmap | None:
    """Return the memmap that has opened the file of an array; None: the array has no file."""
    owner: Any = array
    while is_a(owner, np.ndarray):
        if type(owner) is np.memmap and is_a(owner.base, mmap.mmap):
            return owner
        owner = owner.base
    return None


def reduce_memmap(array: Any, mappings: Mappings) -> _Reduced | None:
    """Return how an array of a file is pickled for this machine: by its path; None: by value.

    Views are pickled as such: those of one memmap are views of one memmap in the reader, too.
    """
    root: Any = _root_of(array)
    is_plain = type(array) in (np.memmap, np.ndarray) and not array.dtype.hasobject
    if root is None or array.nbytes == 0 or not is_plain or not mappings.has_file(root):
        return None
    if array is root:
        end = root.offset + root.nbytes
        options = {
            "dtype": root.dtype,
            "mode": root.mode.replace("w+", "r+"),  # "w+" would empty the file
            "offset": root.offset,
            "shape": root.shape,
            "order": "C" if root.flags.c_contiguous else "F",
        }
        return _open_memmap, (root.filename, Path(root.filename).stat().st_ino, end, options)
    offset = _address(array) - _address(root)
    is_writable = array.flags.writeable
    layout = _Layout(type(array), array.dtype, array.shape, array.strides, is_writable, offset)
    return _array_in, (layout, root)


def _open_memmap(path: Any, inode: int, end: int, options: dict[str, Any]) -> Any:
    """Map a file once more, of which the elements end at a byte.

    Raises:
        LaunchError: the file has been replaced or truncated since the call began.
    """
    status = Path(path).stat()
    # np.memmap would make a shorter file longer, and fill it with zeros.
    if status.st_ino != inode or status.st_size < end:
        raise LaunchError(
            f"the file of a memmap has changed: {path}",
            why="it was replaced or truncated between the call and the start of its workers",
            fix="write the new file elsewhere, or open the memmap in the function",
        )
    return np.memmap(path, **options)
