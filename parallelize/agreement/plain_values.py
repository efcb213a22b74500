"""Plain values as bytes that are read without running code, whoever has written them.

    8 bytes   length of the text
    text      JSON: [the value, records], with a record for each tensor, array and bytes object
    the rest  the bytes of these objects, in the order of their records

None, booleans, numbers and strings stand for themselves in the JSON. Any other value is a JSON list
that begins with a tag. Objects of JSON are not used, because their keys are strings only.

    ["list", ...]                             a list; tuples, sets and sizes have tags of their own
    ["dict", [key, value], ...]               a dict; a Counter has a tag of its own
    ["ordered", metadata, [key, value], ...]  a state dict: an OrderedDict with versions of modules
    ["complex", 1.0, 0.5]                     a complex number
    ["buffer", number of the record]          a tensor, array or bytes object
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

_LENGTH = struct.Struct("<Q")
_NUMERIC_ARRAY = re.compile(r"[<>|=][biufc]\d{1,2}")

_TAGS_OF_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_TAGS_OF_MAPPINGS: dict[type, str] = {
    dict: "dict",
    Counter: "counter",
}
_SEQUENCES_BY_TAG: dict[str, Any] = {tag: type_ for type_, tag in _TAGS_OF_SEQUENCES.items()}
_MAPPINGS_BY_TAG: dict[str, Any] = {tag: type_ for type_, tag in _TAGS_OF_MAPPINGS.items()}


class NotPlain(Exception):  # noqa: N818 - it is no error of a user
    """A value is not plain, so that it has no bytes; or bytes are not those of a plain value."""


class _Record(NamedTuple):
    """What the JSON says of an object whose bytes stand behind the JSON.

    Args:
        type_name: "bytes", "tensor", "array" or "scalar"; the last two are of NumPy.
        dtype: torch's name for a tensor, such as "float32"; NumPy's for an array or scalar, such as
            "<f4"; "" for bytes.
        shape: the sizes; for bytes, a tuple of their number.
        is_on_cpu: whether a tensor was on the CPU. The reader puts any other one on its own device.
    """

    type_name: str
    dtype: str
    shape: tuple[int, ...]
    is_on_cpu: bool


class _Encoder:
    """Makes JSON of a value, and collects the objects whose bytes stand behind the JSON.

    Attributes:
        records: a record for each of these objects.
        contents: the bytes of each object, in the same order.
    """

    def __init__(self) -> None:
        self.records: list[_Record] = []
        self.contents: list[bytes] = []
        self._numbers_by_id: dict[int, int] = {}
        # A new object could get the id of an object that was freed.
        self._kept: list[object] = []

    def encode(self, value: Any) -> Any:
        """Return what stands for a value in the JSON; called again for each part of the value.

        It compares types exactly: an object of a subclass may have more than its items.

        Raises:
            NotPlain: the value, or a part of it, is not plain.
        """
        type_ = type(value)
        if value is None or type_ in {bool, int, float, str}:
            return value
        if type_ is complex:
            return ["complex", value.real, value.imag]
        if type_ in _TAGS_OF_SEQUENCES:
            return [_TAGS_OF_SEQUENCES[type_], *map(self.encode, value)]
        if type_ in _TAGS_OF_MAPPINGS:
            return [_TAGS_OF_MAPPINGS[type_], *self._encoded_pairs(value)]
        if type_ is OrderedDict and vars(value).keys() <= {"_metadata"}:
            # A state dict, which has its metadata as an attribute.
            metadata = self.encode(vars(value).get("_metadata"))
            return ["ordered", metadata, *self._encoded_pairs(value)]
        return ["buffer", self._number_of(value)]

    def _encoded_pairs(self, value: Any) -> list[Any]:
        """Return the items of a mapping as lists of a key and a value."""
        return [[self.encode(key), self.encode(item)] for key, item in value.items()]

    def _number_of(self, value: object) -> int:
        """Return the number of an object's record.

        An object in several places of the value has one record: its bytes are sent once, and the
        reader gets one object.
        """
        if id(value) not in self._numbers_by_id:
            record, content = _record_of(value)
            self._numbers_by_id[id(value)] = len(self.records)
            self._kept.append(value)
            self.records.append(record)
            self.contents.append(content)
        return self._numbers_by_id[id(value)]


def encoded(value: Any) -> bytes:
    """Return a plain value as bytes.

    Args:
        value: None, a boolean, a number, a string, bytes, a dense tensor without gradient, a
            numeric array of NumPy, or a list, tuple, set, dict, Counter or state dict of these.
            Objects of subclasses are not plain.

    Raises:
        NotPlain: it has another type, refers to itself, or is nested too deeply.
    """
    encoder = _Encoder()
    try:
        text = json.dumps([encoder.encode(value), encoder.records]).encode()
    except (RecursionError, ValueError) as exc:
        # A ValueError is of an integer with more digits than Python converts to text.
        raise NotPlain(str(exc)) from None
    return b"".join([_LENGTH.pack(len(text)), text, *encoder.contents])


def decoded(content: bytes, *, device: torch.device) -> Any:
    """Return the value that `encoded` has made into bytes.

    Args:
        content: the bytes, which may come from anybody.
        device: where tensors are put that were not on the CPU.

    Raises:
        NotPlain: the bytes are not those of a plain value.
    """
    try:
        return _value_of_bytes(content, device)
    # What struct, json, torch and NumPy raise, and the code below, for bytes of another kind.
    except (
        struct.error,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        RecursionError,
        RuntimeError,
        OverflowError,
    ) as exc:
        raise NotPlain(f"{type(exc).__name__}: {exc}") from None


def _value_of_bytes(content: bytes, device: torch.device) -> Any:
    """Return the value of `encoded`; bytes that are no plain value raise errors of many types."""
    (length,) = _LENGTH.unpack_from(content)
    position = _LENGTH.size + length
    value, records = json.loads(content[_LENGTH.size : position])
    objects = []
    for type_name, dtype, shape, is_on_cpu in records:
        record = _Record(str(type_name), str(dtype), tuple(shape), is_on_cpu is True)
        end = position + _size_of(record)
        if end > len(content):
            raise NotPlain("it ends within a tensor")
        objects.append(_object_of(record, content[position:end], device))
        position = end
    return _value_of(value, objects)


def _value_of(encoded_value: Any, objects: list[Any]) -> Any:
    """Return the value for which a part of the JSON stands; called again for each of its items.

    Args:
        encoded_value: the part of the JSON.
        objects: the tensors, arrays and bytes objects, by the numbers of their records.
    """
    if isinstance(encoded_value, dict):
        raise NotPlain("a JSON object")
    if not isinstance(encoded_value, list):
        return encoded_value
    tag, *items = encoded_value
    if tag == "buffer":
        (number,) = items
        return objects[number]
    if tag == "complex":
        return complex(*items)
    if tag == "ordered":
        return _state_dict(items, objects)
    if tag in _MAPPINGS_BY_TAG:
        # A Counter that is made of pairs would count the pairs.
        return _MAPPINGS_BY_TAG[tag](dict(_decoded_pairs(items, objects)))
    # Any other tag raises a KeyError.
    return _SEQUENCES_BY_TAG[tag]([_value_of(item, objects) for item in items])


def _state_dict(items: list[Any], objects: list[Any]) -> OrderedDict[Any, Any]:
    """Return a state dict, with an attribute for the versions of modules.

    Without this attribute, `load_state_dict` would take the state for one of old modules.

    Args:
        items: the metadata, or None, and the items of the state dict.
        objects: as for `_value_of`.
    """
    encoded_metadata, *pairs = items
    state_dict = OrderedDict(_decoded_pairs(pairs, objects))
    if encoded_metadata is not None:
        vars(state_dict)["_metadata"] = _value_of(encoded_metadata, objects)
    return state_dict


def _decoded_pairs(pairs: list[Any], objects: list[Any]) -> list[tuple[Any, Any]]:
    """Return the items of a mapping, from their lists of a key and a value."""
    decoded_pairs = []
    for key, item in pairs:
        decoded_pairs.append((_value_of(key, objects), _value_of(item, objects)))
    return decoded_pairs


def _record_of(value: Any) -> tuple[_Record, bytes]:
    """Return the record and the bytes of an object.

    Raises:
        NotPlain: the object is more than bytes, a dtype and a shape.
    """
    if type(value) is bytes:
        return _Record("bytes", "", (len(value),), is_on_cpu=True), value
    if isinstance(value, np.generic):
        return _record_of_array("scalar", value)
    if type(value) is np.ndarray:
        return _record_of_array("array", value)
    if type(value) is torch.Tensor:
        return _record_of_tensor(value)
    raise NotPlain(type(value).__name__)


def _record_of_array(type_name: str, value: Any) -> tuple[_Record, bytes]:
    """Return the record and the bytes of an array or scalar of NumPy.

    Only numbers and booleans are plain: an array of objects could only be sent as a pickle.
    """
    if not _NUMERIC_ARRAY.fullmatch(value.dtype.str):
        raise NotPlain(f"an array of {value.dtype}")
    return _Record(type_name, value.dtype.str, value.shape, is_on_cpu=True), value.tobytes()


def _record_of_tensor(value: torch.Tensor) -> tuple[_Record, bytes]:
    """Return the record and the bytes of a tensor, which may be on any device.

    A record has no field for the scale of a quantized tensor, for the sizes in a nested tensor, or
    for `requires_grad`. A meta tensor has no bytes. Such tensors are not plain.
    """
    is_beyond_record = value.is_quantized or value.is_nested or value.is_meta
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout is not torch.strided or is_beyond_record or value.requires_grad:
        raise NotPlain(f"a tensor of {dtype}, {value.layout}, requires_grad={value.requires_grad}")
    # Conjugated and negated tensors may have the bytes of the original, and a flag.
    values = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    is_on_cpu = value.device.type == "cpu"
    return _Record("tensor", dtype, tuple(value.shape), is_on_cpu), content


def _size_of(record: _Record) -> int:
    """Return the number of bytes of an object.

    Raises:
        NotPlain: the record, which may come from anybody, is of no such object.
    """
    for size in record.shape:
        if type(size) is not int or size < 0:
            raise NotPlain(f"shape {record.shape}")
    elements = math.prod(record.shape)
    if record.type_name == "bytes":
        return elements
    if record.type_name == "tensor":
        return elements * _tensor_dtype(record.dtype).itemsize
    if not _NUMERIC_ARRAY.fullmatch(record.dtype):
        raise NotPlain(f"an array of {record.dtype}")
    return elements * np.dtype(record.dtype).itemsize


def _object_of(record: _Record, content: bytes, device: torch.device) -> Any:
    """Return the object of a record.

    Args:
        record: the record.
        content: the bytes of the object; their number is `_size_of(record)`.
        device: where a tensor is put that was not on the CPU.
    """
    if record.type_name == "bytes":
        return content
    if record.type_name == "tensor":
        device_of_tensor = torch.device("cpu") if record.is_on_cpu else device
        return _tensor_of(record, content, device_of_tensor)
    # An array over the bytes object itself could not be written to.
    array = np.frombuffer(bytearray(content), record.dtype).reshape(record.shape)
    return array[()] if record.type_name == "scalar" else array


def _tensor_of(record: _Record, content: bytes, device: torch.device) -> torch.Tensor:
    """Return the tensor of a record, on a device."""
    dtype = _tensor_dtype(record.dtype)
    # torch.frombuffer refuses an empty buffer.
    if not content:
        return torch.empty(record.shape, dtype=dtype, device=device)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return flat.view(dtype).reshape(record.shape).to(device)


def _tensor_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        NotPlain: the name, which may come from anybody, is of no dtype of plain tensors.
    """
    dtype = vars(torch).get(name)
    # "quint8" and the like are of quantized tensors, which have a scale besides their bytes.
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):
        raise NotPlain(f"a tensor of {name}")
    return dtype
