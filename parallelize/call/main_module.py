"""The `__main__` of a worker, which runs no script: its functions and classes come from the call.

Spawned children of a worker, such as those of a DataLoader, get them from the worker.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import types
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import cloudpickle

from parallelize.call.pickler import Pickler


def populate_main(function: Any) -> None:
    """Copy a function's globals, and unpickled classes of the caller's `__main__`, into `__main__`.

    torch.save(model), DataLoader workers and all_gather_object look them up there.

    Args:
        function: function or class unpickled by value, such as the task's function.
    """
    names = vars(sys.modules["__main__"])
    for name, value in getattr(function, "__globals__", {}).items():
        if not name.startswith("__"):
            names.setdefault(name, value)
    for main_class in list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values()):
        if main_class.__module__ == "__main__" and "." not in main_class.__qualname__:
            names.setdefault(main_class.__name__, main_class)


def pickle_main_by_value(folder: Path) -> None:
    """Let this process send functions and classes of `__main__` to the children that it spawns.

    Each is written to a file once, by value. This begins with the first child that is spawned:
    children that are forked have them.

    Args:
        folder: gets the files.
    """
    module: Any = reduction
    dump_unchanged = module.dump
    owner = os.getpid()
    # The object is kept, so that no other one gets its id.
    files_by_id: dict[int, tuple[Path, object]] = {}

    def reduce(_pickler: object, obj: Any) -> Any:
        is_code = isinstance(obj, (type, types.FunctionType))
        if not is_code or obj.__module__ != "__main__" or os.getpid() != owner:
            return NotImplemented
        if id(obj) not in files_by_id:
            buffer = io.BytesIO()
            Pickler(buffer).dump(obj)
            path = folder / f"main.{owner}.{len(files_by_id)}"
            path.write_bytes(buffer.getvalue())
            files_by_id[id(obj)] = path, obj
        return _load_in_child, (str(files_by_id[id(obj)][0]),)

    def dump_for_child(*args: Any) -> None:
        module.ForkingPickler.reducer_override = reduce
        dump_unchanged(*args)

    module.dump = dump_for_child


@functools.cache
def _load_in_child(path: str) -> Any:
    """Unpickle an object in a child process, and let the child pickle its instances."""
    loaded = cloudpickle.loads(Path(path).read_bytes())
    populate_main(loaded)
    return loaded
