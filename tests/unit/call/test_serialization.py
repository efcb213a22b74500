"""What is packed is unpacked equal, mapped privately; what cannot be packed is named."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
import torch

from parallelize.call.serialization import pack, unpack
from parallelize.errors import ConfigError

CPU = torch.device("cpu")


def there_and_back(obj: object, folder: Path) -> object:
    pack(obj, folder / "file", parts={})
    back = unpack(folder / "file", device=CPU)
    (folder / "file").unlink()
    return back


def test_tensors_outlive_the_file_and_are_private(tmp_path: Path) -> None:
    """Two readers of one file write without the other noticing, also after it is deleted."""
    pack(torch.zeros(1000), tmp_path / "file", parts={})
    one, other = (unpack(tmp_path / "file", device=CPU) for _ in range(2))
    (tmp_path / "file").unlink()
    one += 1
    assert one.sum() == 1000
    assert other.sum() == 0


class SaysMoreError(Exception):
    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint


class DictError(KeyError):
    def __init__(self) -> None:
        super().__init__("fixed")


class DiskError(OSError):
    def __init__(self, path: str, *, size: int) -> None:
        super().__init__(28, "disk full", path)
        self.size = size


class SlotsError(ValueError):
    __slots__ = ()


@pytest.mark.parametrize(
    "error",
    [
        SaysMoreError(3, hint="h"),
        DictError(),
        SlotsError("a", 2),
        OSError(2, "gone", "file"),
        DiskError("/scratch", size=7),
        ImportError("no such", name="a", path="b"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        SystemExit(4),
        ConfigError("what", why="why", fix="fix"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_keep_type_text_and_attributes(error: BaseException, tmp_path: Path) -> None:
    """Whatever their __init__ takes; their own way of pickling, if they have one, is used."""
    back = there_and_back(error, tmp_path)
    assert type(back) is type(error)
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))


def test_an_exception_that_holds_itself(tmp_path: Path) -> None:
    """A circle through an attribute is one afterwards."""
    error = SaysMoreError(1, hint="h")
    error.hint = error  # type: ignore[assignment]  # a circle
    back = there_and_back(error, tmp_path)
    assert back.hint is back


def test_tensors_go_where_they_are_told(tmp_path: Path) -> None:
    """Tensors of the CPU stay there; those without data stay without."""
    back = there_and_back([torch.ones(1), torch.empty(3, device="meta")], tmp_path)
    assert [tensor.device.type for tensor in back] == ["cpu", "meta"]


def closing_over(thing: object) -> object:
    def function() -> object:
        return thing

    return function


class Holder:
    def __init__(self, thing: object) -> None:
        self.thing = thing

    def method(self) -> None: ...


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (closing_over(threading.Lock()), "the variable 'thing'"),
        (closing_over(closing_over({"a": [threading.Lock()]})), "the variable 'thing'['a'][0]"),
        (Holder(threading.Lock()), "call.thing"),
        (Holder(threading.Lock()).method, "self of call.thing"),
        (threading.Lock(), "call"),
        ({"net": Holder(threading.Lock())}, "call['net'].thing"),
    ],
)
def test_the_innermost_name_is_given(part: object, name: str, tmp_path: Path) -> None:
    """The variable, attribute or item that cannot travel is named, as its user knows it; no file is left."""
    with pytest.raises(ConfigError) as caught:
        pack(part, tmp_path / "file", parts={"fine": 1, "call": part})
    assert caught.value.faults[0].what == f"{name} cannot travel to another process"
    assert "lock" in caught.value.faults[0].why
    assert list(tmp_path.iterdir()) == []


def test_a_circle_around_what_cannot_travel(tmp_path: Path) -> None:
    """The search for the culprit ends."""
    circle: list[object] = []
    circle += [circle, threading.Lock()]
    with pytest.raises(ConfigError, match=r"call\[1\] cannot travel"):
        pack(circle, tmp_path / "file", parts={"call": circle})


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    """A copy of what a file holds now is not the file."""
    with (tmp_path / "data").open("w") as file, pytest.raises(ConfigError, match="an open file"):
        pack(file, tmp_path / "file", parts={})
    with pytest.raises(ConfigError, match="cannot pickle"):
        pack(io.BufferedReader(io.BytesIO()), tmp_path / "file", parts={})
