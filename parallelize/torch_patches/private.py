"""Replaces attributes of torch for a time, and builds the error for a torch that is too different.

`tests/private_names.py` lists every private name of torch that this package uses. A name that a new
torch does not have raises an error at its first use. If a new torch has a name and no longer calls
it, the tests fail; in a run, the comparison of the ranks at the end of a block finds the fault.
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

    If other code has replaced the attribute in between, its replacement stays: it may call `value`,
    so that `value` has to work after the context, too.
    """
    # An attribute of a base class is hidden by one of `owner`, which is deleted at the end.
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
    """Build the error for a feature that does not work with the installed release of torch.

    Args:
        feature: the feature, to stand before "with torch" and the version.
        instead: what the user can do.
    """
    return ConfigError(
        f"{feature} with torch {torch.__version__}",
        why="it relies on private parts of torch that this release calls differently, so training "
        "would be wrong",
        fix=f"{instead}; or install a torch that README lists as tested, or a newer parallelize",
    )
