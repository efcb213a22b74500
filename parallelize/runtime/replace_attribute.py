"""Temporary replacement of an attribute of a module or class: a monkey patch with its removal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["replace_attribute"]


@contextlib.contextmanager
def replace_attribute(owner: object, name: str, value: Any) -> Iterator[None]:
    """Replace `owner.name` by `value` inside the context, and restore the original attribute at its end.

    If other code has patched the attribute meanwhile, that patch stays, because it may wrap and call `value`.
    """
    is_inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if getattr(owner, name) is value:
            if is_inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
