"""Setup of a worker's `__main__` module. A worker runs no script, so the names come from the pickled task.

Pickle looks up a script's functions and classes by name in `__main__`, so `populate` adds them to the worker's
`__main__`. A child process started by spawn or forkserver (mostly a DataLoader worker) usually imports its parent's
script as `__main__`. A worker has no script, so `pickle_main_by_value` sends such objects to its children by value.
"""

from __future__ import annotations

import sys
import types
from multiprocessing import reduction
from typing import Any

import cloudpickle

from parallelize.call.serialization import dumps

__all__ = ["pickle_main_by_value", "populate"]


def populate(function: Any) -> None:
    """Copy a function's globals, and the unpickled classes of the caller's `__main__`, into this process's `__main__`.

    torch.save(model), DataLoader workers and all_gather_object look up functions and classes there.

    Args:
        function: function or class unpickled by value, such as the task's function; `__globals__` holds its globals.
    """
    names = vars(sys.modules["__main__"])
    for name, value in getattr(function, "__globals__", {}).items():
        if not name.startswith("__"):
            names.setdefault(name, value)
    for kind in list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values()):
        if kind.__module__ == "__main__" and "." not in kind.__qualname__:
            names.setdefault(kind.__name__, kind)


def pickle_main_by_value() -> None:
    """Make multiprocessing pickle the functions and classes of `__main__` by value for spawned child processes."""
    module: Any = reduction
    module.dump = _dump


def _dump(obj: object, file: Any, protocol: int | None = None) -> None:
    """Pickle the arguments of a process that is being started; replaces `multiprocessing.reduction.dump`."""
    _Pickler(file, protocol).dump(obj)


class _Pickler(reduction.ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            return _load_in_child, (dumps(obj),)
        return NotImplemented


def _load_in_child(data: bytes) -> Any:
    """Unpickle an object in a child process and populate `__main__`, so that the child can pickle its instances."""
    loaded = cloudpickle.loads(data)
    populate(loaded)
    return loaded
