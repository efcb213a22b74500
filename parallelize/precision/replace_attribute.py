"""An attribute of somebody else's module or class, replaced while a block lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["replaced"]


@contextlib.contextmanager
def replaced(owner: object, name: str, value: Any) -> Iterator[None]:
    """Make `owner.name` be `value`; what was there comes back at the end, be it the owner's own or inherited.

    Somebody who has replaced `value` in the meantime keeps it: taking that away would break what is not ours.
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
