"""Private parts of torch: attributes that are replaced for a time.

`tests/private_names.py` lists every private name that this package uses. If a name is gone, its
first use raises. A torch that has the name, and no longer calls it, is found by the tests, and in a
run by the comparison of the ranks at the end of a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from parallelize.errors import ConfigError


@contextlib.contextmanager
def replace_attribute(owner: object, name: str, value: Any) -> Iterator[None]:
    """Replace `owner.name` by `value` inside the context, and restore the original at its end.

    If other code has patched the attribute meanwhile, that patch stays: it may call `value`.
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


def unsupported(feature: str, *, instead: str) -> ConfigError:
    """Build the error for a feature whose private part of torch this release calls differently."""
    return ConfigError(
        f"{feature} with torch {torch.__version__}",
        why="it relies on private parts of torch that this release calls differently, so training "
        "would be wrong",
        fix=f"{instead}; or install a torch that README lists as tested, or a newer parallelize",
    )
