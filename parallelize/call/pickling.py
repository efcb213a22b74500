"""Pickling of objects for another process of the same run; tensors and large arrays are mapped.

`torch.save` writes a file with `pickler.Pickler`: functions and classes that cannot be imported are
pickled by value, and tied tensors stay tied. The reader maps the file copy-on-write: pages are read
on first access, and each process has private tensors. (In shared memory, all ranks would train the
same tensors.) The file may be deleted while it is mapped. NumPy's arrays travel as tensors over
their memory; `arrays` says how.

    dump    Pickler, by torch.save     object -> FILE.part -> FILE
    load    _Unpickler, by torch.load  FILE   -> object

The words of this room:

    call        what the caller asks for: a function, its arguments, and a layout
    task        a call with what else it reaches, as it is sent to the workers
    reach       a call reaches a variable that its code mentions, and what is pickled with it
    by value    an object that the reader builds anew, from what it consists of
    stateful    an object whose state comes back: a module, an optimizer, a generator
    outcome     what a rank sends back
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from parallelize.call.arrays import Mappings
from parallelize.call.pickle_cases import Reader
from parallelize.call.pickler import Pickler
from parallelize.call.unpicklable import FIX, Part, error_of
from parallelize.errors import ConfigError, LaunchError, ParallelizeError


def dump(
    obj: object,
    file: Path | io.BytesIO,
    *,
    parts: Iterable[Part] = (),
    raises: type[ParallelizeError] = ConfigError,
    fix: str = FIX,
    is_local: bool = False,
) -> None:
    """Pickle `obj` to a file, atomically.

    Args:
        obj: object that cloudpickle can pickle; CUDA tensors are written by value.
        file: path in a folder that only this user can read; or buffer, for another rank of the same
            script, where each class of `__main__` exists.
        parts: those of `obj` that have a name; an error names the one that cannot be pickled.
        raises: class of the exception, which names the variable, item or attribute that cannot be
            pickled.
        fix: how the user fixes that.
        is_local: whether only processes of this machine read it, at once: an np.memmap is sent as
            the path of its file.

    Raises:
        LaunchError: there is no space for the file.
    """
    reader = Reader(
        has_same_main=not isinstance(file, Path),
        maps_arrays=True,
        mappings=Mappings() if is_local else None,
    )
    written = file.with_name(f"{file.name}.part") if isinstance(file, Path) else file
    try:
        _save(obj, written, reader)
    except Exception as exc:  # a user's __reduce__ may raise anything
        if isinstance(written, Path):
            with contextlib.suppress(OSError):
                # torch keeps the file open as long as its error lives.
                os.truncate(written, 0)
            written.unlink(missing_ok=True)
            if getattr(cause_of(exc), "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise full_disk_error(written.parent) from None
        raise error_of(parts, exc, raises=raises, fix=fix) from exc
    if isinstance(file, Path) and isinstance(written, Path):
        written.replace(file)


def _save(obj: object, file: Path | io.BytesIO, reader: Reader) -> None:
    """Write by torch.save; a second time, in another way, if the first one has failed.

    RuntimeError of the first time               second time
    two types of tensors over one memory         arrays are copied into the pickle
    any other, for a file: it may be full        by Python's file, which raises the system's error
    any other, for a buffer                      none
    """
    try:
        _save_by_torch(obj, file, reader)
    except RuntimeError as exc:
        # torch.save refuses memory of which it gets tensors of two types, as of an array and its
        # view.
        if "as different types" in str(exc):
            reader = Reader(has_same_main=reader.has_same_main, mappings=reader.mappings)
        elif not isinstance(file, Path):
            raise
        with _opened(file) as opened:
            _save_by_torch(obj, opened, reader)


def _save_by_torch(obj: object, file: Any, reader: Reader) -> None:
    pickler_class = type("Pickler", (Pickler,), {"reader": reader})
    module: Any = types.SimpleNamespace(Pickler=pickler_class, __name__=__name__)
    # Not torch.save, which in a run asks the store of the ranks: that may be lost by now.
    torch.serialization.save(obj, file, module, pickle.HIGHEST_PROTOCOL)


@contextlib.contextmanager
def _opened(file: Path | io.BytesIO) -> Iterator[Any]:
    """Open a file, or empty a buffer, to write it anew."""
    if isinstance(file, Path):
        with file.open("wb") as opened:
            yield opened
    else:
        file.seek(0)
        file.truncate()
        yield file


def full_disk_error(folder: Path, what: str = "") -> LaunchError:
    """Return the error for a folder whose disk has no space for a call, or for what comes back."""
    return LaunchError(
        f"the disk of {folder} is full{what}",
        why="calls, and what they return, are sent in files in the temporary folder",
        fix="free some space there, or set TMPDIR to a folder on another disk",
    )


def cause_of(exc: BaseException) -> BaseException:
    """Return the system's error, which torch.save replaces by one about positions in the file."""
    if isinstance(exc, RuntimeError) and exc.__context__ is not None:
        return exc.__context__
    return exc


class _Unpickler(pickle.Unpickler):
    """Leaves the classes of this process as they are.

    Another process sends their instances with its state of the class.

    Attributes:
        classes_of_process: those that were sent to others by value; of the class, as torch.load
            makes the unpickler.
    """

    classes_of_process: frozenset[type[Any]] = frozenset()

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle refers to by its name."""
        by_name: Any = super().find_class(module, name)
        if name != "_class_setstate":
            return by_name

        def set_state(loaded_class: type[Any], state: Any) -> Any:
            if loaded_class in self.classes_of_process:
                return loaded_class
            return by_name(loaded_class, state)

        return set_state


def load(source: Path | bytes, *, device: torch.device) -> Any:
    """Unpickle an object; its tensors are private to this process.

    Args:
        source: file or bytes that `dump` wrote in a process of the same run; must be trusted,
            because unpickling runs code.
        device: device for tensors and generators that were not on the CPU.
    """

    def locate(storage: Any, saved_on: str) -> Any:
        return storage if saved_on == "cpu" else storage.to(device=device)

    file = source if isinstance(source, Path) else io.BytesIO(source)
    sent_by_value = frozenset(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)
    unpickler_class = type("Unpickler", (_Unpickler,), {"classes_of_process": sent_by_value})
    module: Any = types.SimpleNamespace(Unpickler=unpickler_class, __name__=__name__)
    with torch.accelerator.device_index(device.index):
        return torch.load(file, locate, module, mmap=file is source, weights_only=False)
