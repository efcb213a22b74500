"""Objects survive dump and load, functions by name or value; tensors are private; what cannot be pickled is named."""

from __future__ import annotations

import enum
import functools
import io
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from parallelize import distributed
from parallelize.call.pickling import dump, load
from parallelize.call.unpicklable import Part
from parallelize.errors import ConfigError


def round_trip(obj: object, folder: Path) -> object:
    dump(obj, folder / "file")
    loaded = load(folder / "file", device=torch.device("cpu"))
    (folder / "file").unlink()
    return loaded


def test_tensors_outlive_the_file_and_are_private(tmp_path: Path) -> None:
    """Two readers of one file do not see each other's writes, also after the file is deleted; devices are kept."""
    dump([torch.zeros(1000), torch.empty(3, device="meta")], tmp_path / "file")
    (one, meta), (other, _) = (load(tmp_path / "file", device=torch.device("cpu")) for _ in range(2))
    (tmp_path / "file").unlink()
    one += 1
    assert one.sum() == 1000
    assert other.sum() == 0
    assert (one.device.type, meta.device.type) == ("cpu", "meta")


@pytest.mark.parametrize(
    "item",
    [
        *(torch.backends, torch.backends.cudnn, torch.backends.mkldnn, torch.backends.opt_einsum),
        *(torch.ops, torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.classes, torch.jit),
        *(torch.utils.deterministic, torch.compiler.config),
    ],
    ids=str,
)
def test_modules_of_every_class_are_pickled_by_name(item: object, tmp_path: Path) -> None:
    """Module objects that torch replaces by others, modules without a file, and operators are the process's own."""
    assert round_trip(item, tmp_path) is item


def test_a_module_that_no_import_finds_is_refused(tmp_path: Path) -> None:
    """A module of a class of its own is pickled by its name only."""
    with pytest.raises(ConfigError, match="the call cannot be pickled"):
        round_trip(type("Module", (ModuleType,), {})("nowhere"), tmp_path)


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
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_keep_type_text_and_attributes(error: BaseException, tmp_path: Path) -> None:
    """Whatever arguments their __init__ takes; a pickling method of their class is used."""
    loaded = round_trip(error, tmp_path)
    assert type(loaded) is type(error)
    assert (str(loaded), loaded.args, vars(loaded)) == (str(error), error.args, vars(error))


class Delegating:
    """Reads attributes from a dictionary, as configurations do: without it, __getattr__ calls itself."""

    def __init__(self) -> None:
        self.values = {"hint": self}

    def __getattr__(self, name: str) -> Any:
        if name not in self.values:
            raise AttributeError(name)
        return self.values[name]


def test_objects_that_hold_themselves(tmp_path: Path) -> None:
    """An exception, and an object whose __getattr__ needs its attributes, which are set without asking it."""
    error = SaysMoreError(1, hint="h")
    error.hint = error
    for each in (error, Delegating()):
        loaded: Any = round_trip(each, tmp_path)
        assert loaded.hint is loaded


def plain() -> int:
    return 1


@distributed()
def decorated() -> int:
    return 2


@distributed()
@functools.lru_cache
def twice_wrapped() -> int:
    return 3


class Home:
    @distributed()
    def method(self) -> int:
        return 4


@pytest.mark.parametrize(
    "function",
    [
        plain,
        decorated.__wrapped__,
        twice_wrapped.__wrapped__,
        twice_wrapped.__wrapped__.__wrapped__,
        Home.method.__wrapped__,
        math.sqrt,
        torch.nn.functional.relu,
    ],
)
def test_a_named_function_is_pickled_by_name(function: Callable[..., Any], tmp_path: Path) -> None:
    """The name leads to the same function, below its decorators."""
    assert round_trip(function, tmp_path) is function


def shadowed() -> int:
    return 1


first_shadowed = shadowed


def shadowed() -> int:
    return 2


@pytest.mark.parametrize("function", [lambda: 1, functools.partial(plain), first_shadowed])
def test_a_function_without_a_name_is_pickled_by_value(function: Callable[..., Any], tmp_path: Path) -> None:
    """It has no name, or its name refers to another object."""
    loaded: Any = round_trip(function, tmp_path)
    assert loaded is not function
    assert loaded() == 1


Color = enum.Enum("Color", ["RED"])


def test_enumerations(tmp_path: Path) -> None:
    """By name or by value; until Python 3.11 their class has a __getattr__."""
    assert round_trip(Color.RED, tmp_path) is Color.RED
    own = enum.Enum("Own", ["A", "B"])
    loaded: Any = round_trip([own, own.B], tmp_path)
    assert loaded[1] is loaded[0].B


def test_functions_keep_their_file_and_lines(tmp_path: Path) -> None:
    """Those of a script are pickled by value; tracebacks and hang reports show the lines of its file."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def outer():\n    return lambda: 1 / 0", "script.py", "exec"), namespace)
    dump(namespace["outer"], tmp_path / "value")
    inner = load(tmp_path / "value", device=torch.device("cpu"))()
    with pytest.raises(ZeroDivisionError) as caught:
        inner()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno) == ("script.py", 2)


def closure_over(thing: object) -> object:
    def function() -> object:
        return thing

    return function


class Holder:
    def __init__(self, thing: object) -> None:
        self.thing = thing

    def method(self) -> None: ...


GENERATOR = (number for number in range(3))


def test_the_object_of_a_method_is_named(tmp_path: Path) -> None:
    """Other objects are named in tests/worlds/test_launch_anywhere.py; no file is left."""
    method = Holder(GENERATOR).method
    with pytest.raises(ConfigError, match=r"self of call\.thing cannot be pickled"):
        dump(method, tmp_path / "file", parts=[Part("fine", 1), Part("call", method)])
    assert list(tmp_path.iterdir()) == []


def test_private_parts_of_libraries_are_not_named(tmp_path: Path) -> None:
    """The user knows the public attributes of a library's object, but no variable of its functions."""
    operator = torch.library.custom_op("tests::clone", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor")
    model = torch.nn.Sequential(torch.nn.Identity())
    model[0].numbers = GENERATOR
    for thing, name in [(operator, "the variable 'thing'"), (model, "the variable 'thing'.0.numbers")]:
        with pytest.raises(ConfigError, match=f"{name} cannot be pickled"):
            dump(closure_over(thing), tmp_path / "file", parts=[Part("call", closure_over(thing))])


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    """cloudpickle would pickle a copy of its content."""
    with (tmp_path / "data").open("w") as file, pytest.raises(ConfigError, match="an open file"):
        dump(file, tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot pickle"):
        dump(io.BufferedReader(io.BytesIO()), tmp_path / "file")
