"""Plain values as bytes that are read without running code, whoever has written them.

    8 bytes   length of the text
    text      JSON: the value, and a record for each tensor, array and bytes object in it
    the rest  their bytes, one after the other

None, booleans, numbers and strings stand for themselves in the JSON. Anything else is a list that begins with a tag:
["list", ...], ["set", ...], ["dict", [key, value], ...], ["complex", 1.0, 0.5], ["buffer", number of the record].
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["NotPlain", "decoded", "encoded"]

_LENGTH = struct.Struct("<Q")
_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_MAPPINGS: dict[type, str] = {dict: "dict", Counter: "counter"}
_TYPES_BY_TAG: dict[str, Any] = {tag: kind for kind, tag in (*_SEQUENCES.items(), *_MAPPINGS.items())}
_NUMERIC_ARRAY = re.compile(r"[<>|=][biufc]\d{1,2}")


class NotPlain(Exception):  # noqa: N818 - it is no error of a user
    """A value has a type that is not plain, or bytes are not those of a plain value."""


class _Buffer(NamedTuple):
    """Record of an object whose bytes stand behind the JSON.

    Args:
        kind: "bytes", "tensor", "array" or "scalar", which is one of NumPy.
        dtype: "float32" of a tensor, "<f4" of NumPy.
        shape: the sizes; of bytes, their number.
        is_on_cpu: whether a tensor was on the CPU.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    is_on_cpu: bool


class _Encoder:
    def __init__(self) -> None:
        self.buffers: list[_Buffer] = []
        self.contents: list[bytes] = []
        # The object is kept, so that no other one gets its id.
        self._numbers: dict[int, tuple[int, object]] = {}

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind in _SEQUENCES:
            return [_SEQUENCES[kind], *map(self.encode, value)]
        if kind in _MAPPINGS:
            return [_MAPPINGS[kind], *self._pairs(value)]
        if kind is OrderedDict and vars(value).keys() <= {"_metadata"}:  # a state dict
            return ["ordered", self.encode(vars(value).get("_metadata")), *self._pairs(value)]
        return ["buffer", self._number(value)]

    def _pairs(self, value: Any) -> list[Any]:
        return [[self.encode(key), self.encode(item)] for key, item in value.items()]

    def _number(self, value: object) -> int:
        """Return the number of the object's record, which is one for all places where the object is."""
        if id(value) not in self._numbers:
            buffer, content = _buffer_of(value)
            self._numbers[id(value)] = len(self.buffers), value
            self.buffers.append(buffer)
            self.contents.append(content)
        return self._numbers[id(value)][0]


def encoded(value: Any) -> bytes:
    """Return a plain value as bytes.

    Args:
        value: None, a boolean, a number, a string, bytes, a dense tensor without gradient, a numeric array of NumPy, or
            a list, tuple, set, dict, Counter or state dict of these. Objects of subclasses are not plain.

    Raises:
        NotPlain: it has another type, refers to itself, or is nested too deeply.
    """
    encoder = _Encoder()
    try:
        text = json.dumps([encoder.encode(value), encoder.buffers]).encode()
    except (RecursionError, ValueError) as exc:  # ValueError: an integer of more digits than Python converts
        raise NotPlain(str(exc)) from None
    return b"".join([_LENGTH.pack(len(text)), text, *encoder.contents])


def decoded(content: bytes, *, device: torch.device) -> Any:
    """Return the value of `encoded`.

    Args:
        content: may come from anybody.
        device: gets the tensors that were not on the CPU.

    Raises:
        NotPlain: the bytes are not those of a plain value.
    """
    try:
        (length,) = _LENGTH.unpack_from(content)
        end = _LENGTH.size + length
        value, records = json.loads(content[_LENGTH.size : end])
        objects = []
        for kind, dtype, shape, is_on_cpu in records:
            buffer = _Buffer(str(kind), str(dtype), tuple(shape), is_on_cpu is True)
            size = _size_of(buffer)
            if end + size > len(content):
                raise NotPlain("it ends within a tensor")
            objects.append(_object_of(buffer, content[end : end + size], device))
            end += size
        return _decode(value, objects)
    except (struct.error, ValueError, TypeError, KeyError, IndexError, RecursionError, RuntimeError) as exc:
        raise NotPlain(f"{type(exc).__name__}: {exc}") from None


def _decode(value: Any, objects: list[Any]) -> Any:
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise NotPlain("a JSON object")
        return value
    tag, *items = value
    if tag == "buffer":
        (number,) = items
        return objects[number]
    if tag == "ordered":
        metadata, *pairs = items
        ordered = OrderedDict(_decoded_pairs(pairs, objects))
        if metadata is not None:
            vars(ordered)["_metadata"] = _decode(metadata, objects)
        return ordered
    if tag == "complex":
        return complex(*items)
    kind = _TYPES_BY_TAG[tag]
    if kind in _MAPPINGS:
        return kind(dict(_decoded_pairs(items, objects)))
    return kind([_decode(item, objects) for item in items])


def _decoded_pairs(pairs: list[Any], objects: list[Any]) -> list[tuple[Any, Any]]:
    decoded_pairs = []
    for key, item in pairs:
        decoded_pairs.append((_decode(key, objects), _decode(item, objects)))
    return decoded_pairs


def _buffer_of(value: Any) -> tuple[_Buffer, bytes]:
    """Return the record and the bytes of an object."""
    if type(value) is bytes:
        return _Buffer("bytes", "", (len(value),), is_on_cpu=True), value
    if isinstance(value, np.generic) or type(value) is np.ndarray:
        kind = "scalar" if isinstance(value, np.generic) else "array"
        if not _NUMERIC_ARRAY.fullmatch(value.dtype.str):
            raise NotPlain(f"an array of {value.dtype}")
        return _Buffer(kind, value.dtype.str, value.shape, is_on_cpu=True), value.tobytes()
    if type(value) is not torch.Tensor:
        raise NotPlain(type(value).__name__)
    is_dense = value.layout is torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)
    name = str(value.dtype).removeprefix("torch.")
    if not is_dense or value.requires_grad:
        raise NotPlain(f"a tensor of {name}, {value.layout}, requires_grad={value.requires_grad}")
    values = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _Buffer("tensor", name, tuple(value.shape), value.device.type == "cpu"), content


def _size_of(buffer: _Buffer) -> int:
    """Return the number of bytes of an object."""
    if not all(type(size) is int and size >= 0 for size in buffer.shape):
        raise NotPlain(f"shape {buffer.shape}")
    number = math.prod(buffer.shape)
    if buffer.kind == "bytes":
        return number
    if buffer.kind == "tensor":
        return number * _tensor_dtype(buffer.dtype).itemsize
    if not _NUMERIC_ARRAY.fullmatch(buffer.dtype):
        raise NotPlain(f"an array of {buffer.dtype}")
    return number * np.dtype(buffer.dtype).itemsize


def _object_of(buffer: _Buffer, content: bytes, device: torch.device) -> Any:
    """Return the object of a record; the sizes agree."""
    if buffer.kind == "bytes":
        return content
    if buffer.kind != "tensor":
        array = np.frombuffer(bytearray(content), buffer.dtype).reshape(buffer.shape)
        return array[()] if buffer.kind == "scalar" else array
    dtype = _tensor_dtype(buffer.dtype)
    place = torch.device("cpu") if buffer.is_on_cpu else device
    if not content:
        return torch.empty(buffer.shape, dtype=dtype, device=place)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return flat.view(dtype).reshape(buffer.shape).to(place)


def _tensor_dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    # Quantized tensors have more than bytes.
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):
        raise NotPlain(f"a tensor of {name}")
    return dtype
