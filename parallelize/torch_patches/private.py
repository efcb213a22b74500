"""Private parts of torch: attributes that are replaced for a time, and proofs that torch still works as assumed.

`tests/private_names.py` lists every private name that this package uses. If a name is gone, its
first use raises. But a patch or a hook may also be bypassed: torch still has the name, and no
longer calls it. Where that would train wrongly, a self-test runs once per process, when the
feature is first used.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parallelize.errors import ConfigError

__all__ = ["replace_attribute", "self_test", "unsupported"]


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


def self_test(feature: str, *, instead: str) -> Callable[[Callable[[], bool]], Callable[[], None]]:
    """Make a function that tries out a private part of torch into one that requires that it works.

    It runs once per process, on a thread of its own, where autograd, autocast and torch's modes
    have their default states.

    Args:
        feature: the feature that needs this part, as the user writes it.
        instead: what works without this part.
    """

    def decorate(works: Callable[[], bool]) -> Callable[[], None]:
        @functools.cache
        @functools.wraps(works)
        def require() -> None:
            outcome: list[bool | Exception] = []

            def run() -> None:
                try:
                    outcome.append(works())
                except Exception as error:  # noqa: BLE001  # whatever another torch raises
                    outcome.append(error)

            thread = threading.Thread(target=run, name=f"self-test of {feature}")
            thread.start()
            thread.join()
            if outcome[0] is not True:
                raise unsupported(feature, instead=instead) from (outcome[0] or None)

        return require

    return decorate


def unsupported(feature: str, *, instead: str) -> ConfigError:
    """Build the error for a feature whose private part of torch this release calls differently."""
    return ConfigError(
        f"{feature} with torch {torch.__version__}",
        why="it relies on private parts of torch that this release calls differently, so training would be wrong",
        fix=f"{instead}; or install a torch that README lists as tested, or a newer parallelize",
    )
