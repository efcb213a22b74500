"""Annotations of functions that are sent: since Python 3.14, reading them evaluates them.

A name that only type checkers import, below `if TYPE_CHECKING`, is no error in an annotation of
Python 3.14 until somebody reads the annotation. cloudpickle does, for each function that it sends
by value (`_function_getstate`), and inspect.signature does. Without this file, such functions could
not be called.

Source: https://peps.python.org/pep-0749/
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FunctionType

if sys.version_info >= (3, 14):
    import annotationlib


@contextlib.contextmanager
def readable_annotations(item: object) -> Iterator[None]:
    """Let annotations be read that cannot be evaluated, as texts, in the context.

    They are those that a function has under `from __future__ import annotations`.

    Args:
        item: a function; nothing is done for other objects, and before Python 3.14.
    """
    if sys.version_info >= (3, 14):
        if isinstance(item, FunctionType) and not _can_be_evaluated(item):
            evaluate = item.__annotate__
            texts = annotationlib.get_annotations(item, format=annotationlib.Format.STRING)
            item.__annotations__ = texts
            try:
                yield
            finally:
                # It also forgets the texts.
                item.__annotate__ = evaluate
            return
    yield


def _can_be_evaluated(function: FunctionType) -> bool:
    try:
        _ = function.__annotations__
    except Exception:  # noqa: BLE001 - an annotation is any expression of the user
        return False
    return True
