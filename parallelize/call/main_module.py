"""The `__main__` of a worker, which ran no script: what it holds came with the task.

Pickle finds what a script defines by its name in `__main__`. So a worker's gets those names (`fill`), and what the
worker starts by spawn or forkserver (workers of a DataLoader, mostly) gets the things themselves: such a child imports
the script that its parent's `__main__` was, and here there is none.
"""

from __future__ import annotations

import sys
import types
from multiprocessing import reduction
from typing import Any

import cloudpickle

__all__ = ["fill", "share"]


def fill(function: Any) -> None:
    """Give this process's `__main__` what the caller's had, as far as it came along.

    torch.save(model), DataLoader workers and all_gather_object all rely on it.

    Args:
        function: the task's; whatever its globals hold is in `__main__` afterwards.
    """
    names = vars(sys.modules["__main__"])
    for name, value in getattr(function, "__globals__", {}).items():
        if not name.startswith("__"):
            names.setdefault(name, value)
    for kind in list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values()):
        if kind.__module__ == "__main__" and "." not in kind.__qualname__:
            names.setdefault(kind.__name__, kind)


def share() -> None:
    """Send what processes started from now on need of `__main__` by value; forked ones have it anyway."""
    module: Any = reduction
    module.dump = _dump


def _dump(obj: object, file: Any, protocol: int | None = None) -> None:
    """Stands for multiprocessing.reduction.dump, which writes what a process is started with."""
    _Pickler(file, protocol).dump(obj)


class _Pickler(reduction.ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            return _received, (cloudpickle.dumps(obj),)
        return NotImplemented


def _received(data: bytes) -> Any:
    """In the child: the thing; what it makes of `__main__`'s classes can go back to the worker."""
    found = cloudpickle.loads(data)
    fill(found)
    return found
