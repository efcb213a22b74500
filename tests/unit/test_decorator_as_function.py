"""Whatever takes a function takes a decorated one: type hints, copies, dispatch, and libraries for command lines."""

from __future__ import annotations

import copy
import functools
import inspect
import pydoc
import typing
from collections.abc import Callable
from typing import Any

import pytest

from parallelize import distributed, world_size


def plain(rate: float = 0.1, name: str = "x") -> tuple[float, str, int]:
    """Train."""
    return rate, name, world_size()


train = distributed(processes=2)(plain)


def dispatch(function: Callable[..., Any]) -> object:
    @functools.singledispatch
    def base(_: object) -> str:
        return "base"

    base.register(function)
    return base.registry.keys()


def wrap(function: Callable[..., Any]) -> object:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper.__name__, wrapper.__doc__, wrapper.__annotations__, inspect.signature(wrapper)


USES: dict[str, Callable[[Callable[..., Any]], object]] = {
    "annotations": lambda function: function.__annotations__,
    "get_annotations": lambda function: inspect.get_annotations(function, eval_str=True),
    "get_type_hints": typing.get_type_hints,
    "getfullargspec": inspect.getfullargspec,
    "signature": lambda function: inspect.signature(function, eval_str=True),
    "help": lambda function: pydoc.plain(pydoc.render_doc(function)),
    "isfunction": inspect.isfunction,
    "isroutine": inspect.isroutine,
    "wraps": wrap,
    "singledispatch": dispatch,
    "copy": lambda function: copy.copy(function) is function,
    "deepcopy": lambda function: copy.deepcopy({"fit": function})["fit"] is function,
}


@pytest.mark.parametrize("use", USES)
def test_it_is_used_as_a_function(use: str) -> None:
    """The decorated function gives what the plain one gives."""
    assert USES[use](train) == USES[use](plain)


class Trainer:
    @distributed(processes=1)
    def fit(self, rate: float) -> float:
        return rate


def test_hints_of_a_method() -> None:
    """A method has its own, bound or not."""
    hints = {"rate": float, "return": float}
    assert typing.get_type_hints(Trainer.fit) == typing.get_type_hints(Trainer().fit) == hints
    assert copy.copy(Trainer.fit) == Trainer.fit


def test_a_hint_of_a_name_that_does_not_exist_is_the_users_own_error() -> None:
    """The names are looked up where the function was written."""

    @distributed(processes=1)
    def later(x: Missing) -> None:  # noqa: F821 - it does not exist
        del x

    with pytest.raises(NameError, match="Missing"):
        typing.get_type_hints(later)


def by_typer(module: Any) -> object:
    from typer.testing import CliRunner

    app = module.Typer()
    app.command()(train)
    return CliRunner().invoke(app, ["--rate", "0.5"], standalone_mode=False).return_value


def by_click(module: Any) -> object:
    command = module.command()(module.option("--rate", type=float)(distributed(processes=2)(plain)))
    return command.main(["--rate", "0.5"], standalone_mode=False)


def by_cyclopts(module: Any) -> object:
    app = module.App()
    app.default(train)
    return app(["--rate", "0.5"], result_action="return_value")


# Each turns the text "0.5" into a number, by the function's hints, and calls the function.
LIBRARIES: dict[str, Callable[[Any], object]] = {
    "beartype": lambda module: module.beartype(train)(0.5),
    "click": by_click,
    "cyclopts": by_cyclopts,
    "fire": lambda module: module.Fire(train, ["--rate=0.5"]),
    "jsonargparse": lambda module: module.auto_cli(train, args=["--rate=0.5"]),
    "pydantic": lambda module: module.validate_call(train)(rate="0.5"),
    "typer": by_typer,
    "tyro": lambda module: module.cli(train, args=["--rate", "0.5"]),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_call_it(name: str) -> None:
    """In two processes, with the values that the annotations ask for."""
    module = pytest.importorskip(name, reason=f"{name} is not installed")
    assert LIBRARIES[name](module) == (0.5, "x", 2)
