"""Errors that name what cannot be pickled: an argument, a variable, an attribute, an item."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from parallelize.call.pickler import Trial
from parallelize.call.reachable import CONTAINERS, is_a, variables_of
from parallelize.cluster.code_owner import is_user_module
from parallelize.errors import ConfigError, ParallelizeError, error_text

FIX = "create it inside the function, or pass the values it is built from (a path, a size, a seed)"
_FIX_OF_CLASS = "a class is sent with what it has: make the object in __init__, or where it is used"
_FIX_OF_NOTEBOOK = (
    "a line with ! or % is the notebook's own: write subprocess.run(...) in the function"
)


@dataclass(frozen=True)
class Part:
    """A part of what is pickled.

    Args:
        name: what errors call it.
        value: the part.
        prefix: what the names of its own parts begin with; "": its name.
        fix: what the user can do if it cannot be pickled; "": what is said of the whole.
    """

    name: str
    value: object
    prefix: str = ""
    fix: str = ""


def error_of(
    parts: Iterable[Part],
    reason: Exception,
    *,
    raises: type[ParallelizeError] = ConfigError,
    fix: str = FIX,
) -> ParallelizeError:
    """Return the error for something that cannot be pickled, by the name of its innermost part.

    Args:
        parts: the parts of it that have names.
        reason: why it cannot be pickled.
        raises: class of the error.
        fix: how the user fixes it, if the part has no fix of its own.
    """
    name = "the call"
    for part, reason_of_part in _unpicklable_parts(parts):
        name = part.name
        reason = reason_of_part
        fix = part.fix or fix
    if "get_ipython" in name:
        fix = _FIX_OF_NOTEBOOK
    text = error_text(reason).strip().partition("\n")[0] or "no reason given"
    return raises(f"{name} cannot be pickled", why=f"{type(reason).__name__}: {text}", fix=fix)


def _unpicklable_parts(parts: Iterable[Part]) -> Iterator[tuple[Part, Exception]]:
    """Yield a part that cannot be pickled, and why; then one of its own parts; to the innermost."""
    ids_of_wholes: set[int] = set()
    while True:
        culprit = None
        with contextlib.suppress(Exception):  # of an attribute or a key that is read
            culprit = _first_unpicklable(parts, ids_of_wholes)
        if culprit is None:
            return
        yield culprit
        part, _ = culprit
        ids_of_wholes.add(id(part.value))
        parts = _parts_of(part)


def _first_unpicklable(
    parts: Iterable[Part], ids_of_wholes: set[int]
) -> tuple[Part, Exception] | None:
    """Return the first part that cannot be pickled, and why; None: all of them can.

    Args:
        parts: the parts.
        ids_of_wholes: of what contains the parts: a part may refer to it.
    """
    for part in parts:
        if id(part.value) in ids_of_wholes:
            continue
        error = Trial(part.value).error
        if error is not None:
            return part, error
    return None


def _parts_of(part: Part) -> Iterator[Part]:
    """Yield what an object refers to, but not what is private to a library."""
    whole: Any = part.value
    prefix = part.prefix or part.name
    if is_a(whole, types.MethodType):
        yield Part(f"self of {prefix}", whole.__self__)
    elif is_a(whole, CONTAINERS):
        items = dict.items(whole) if is_a(whole, dict) else enumerate(whole)
        for key, value in items:
            yield Part(f"{prefix}[{key!r}]", value)
    elif is_a(whole, types.FunctionType):
        yield from _variables_of_function(whole)
    elif is_a(whole, type):
        yield from _attributes_of_class(whole)
    else:
        yield from _attributes_of(whole, prefix)


def _variables_of_function(function: types.FunctionType) -> Iterator[Part]:
    """Yield the variables of a function's closure and module, if the user has written it."""
    if not is_user_module(function.__module__):
        return
    module = sys.modules.get(function.__module__)
    for owner, name, value in variables_of(function):
        if owner in (None, module):
            yield Part(f"the variable {name!r}", value)


def _attributes_of_class(owner: type[Any]) -> Iterator[Part]:
    """Yield the attributes of a user's class, with a fix of their own: they can be no arguments."""
    if not is_user_module(owner.__module__):
        return
    for name, value in list(vars(owner).items()):
        if name in ("__dict__", "__weakref__"):
            continue
        shown = f"the attribute {name!r} of class {owner.__qualname__!r}"
        yield Part(shown, value, fix=_FIX_OF_CLASS)


def _attributes_of(instance: Any, prefix: str) -> Iterator[Part]:
    """Yield the attributes of an object, the modules of a model by their names, and its class."""
    instance_type = type(instance)
    is_users = is_user_module(instance_type.__module__)
    attributes = {**vars(instance), **vars(instance).get("_modules", {})}
    for name, value in attributes.items():
        if is_users or not name.startswith("_"):
            yield Part(f"{prefix}.{name}", value)
    yield Part(f"class {instance_type.__qualname__!r}", instance_type)
