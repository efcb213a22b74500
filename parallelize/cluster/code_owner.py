"""Whose code runs: the user's, this package's, torch's, Python's own, or an installed package's.

    warnings, hang reports   name the innermost line of the user's code
    tracebacks               leave out this package, and what runs underneath it
    calls                    send what the user's modules have set, and names in the user's code

All of them ask here, so that they agree. The folder of a file decides. Code without a file, such as
the `__init__` of a dataclass or a cell of a notebook, belongs to the module that it runs in.
"""

from __future__ import annotations

import enum
import functools
import os
import sys
import sysconfig
from pathlib import Path, PurePath
from types import FrameType

import torch

_PACKAGE = __name__.partition(".")[0]
_PACKAGE_FOLDER = str(Path(__file__).parents[1]) + os.sep
_TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
# Whatever environment it belongs to: PYTHONPATH may lead to the packages of another one.
_FOLDERS_OF_PACKAGES = frozenset({"site-packages", "dist-packages"})


class CodeOwner(enum.Enum):
    """Who has written some code."""

    USER = "the program, and modules that are not installed"
    PARALLELIZE = "this package"
    TORCH = "torch"
    PYTHON = "the interpreter and its standard library"
    INSTALLED = "another installed package"


@functools.cache
def owner_of_file(path: str) -> CodeOwner:
    """Return whose code a file is; the user's if it is no file, such as "<stdin>".

    Args:
        path: the path of the file, as tracebacks and code objects have it.
    """
    if path.startswith(_PACKAGE_FOLDER):
        return CodeOwner.PARALLELIZE
    if path.startswith(_TORCH_FOLDER):
        return CodeOwner.TORCH
    if path.startswith("<frozen "):
        return CodeOwner.PYTHON
    # Before the standard library, whose folder may contain that of the installed packages.
    if not _FOLDERS_OF_PACKAGES.isdisjoint(PurePath(path).parts):
        return CodeOwner.INSTALLED
    if path.startswith(_folders("stdlib", "platstdlib")):
        return CodeOwner.PYTHON
    if path.startswith(_folders("purelib", "platlib")):
        return CodeOwner.INSTALLED
    return CodeOwner.USER


def _folders(*names: str) -> tuple[str, ...]:
    """Return folders of this installation of Python, by their names in sysconfig."""
    return tuple(sysconfig.get_path(name) + os.sep for name in names)


def owner_of_frame(frame: FrameType) -> CodeOwner:
    """Return whose code runs in a frame.

    Code without a file and a module is the user's: a text that `exec` runs with variables of its
    own.
    """
    path = frame.f_code.co_filename
    if not path.startswith("<") or path.startswith("<frozen "):
        return owner_of_file(path)
    # Without a module, "<string>" stands for its name, which no module has.
    return owner_of_module(frame.f_globals.get("__name__", path))


def owner_of_module(name: object) -> CodeOwner:
    """Return whose code the module with this name is.

    Args:
        name: the name; built-in functions have None as the name of their module, which is Python's.
    """
    if not isinstance(name, str) or not name:
        return CodeOwner.PYTHON
    package = name.partition(".")[0]
    # A module in compiled code, such as torch._C._nn, may have no file of its own.
    path = _file_of_module(name) or _file_of_module(package)
    if path:
        return owner_of_file(path)
    if package in sys.stdlib_module_names:
        return CodeOwner.PYTHON
    if package == _PACKAGE:
        return CodeOwner.PARALLELIZE
    return CodeOwner.USER


def is_user_module(name: object) -> bool:
    """Whether the module with this name is the user's code."""
    return owner_of_module(name) is CodeOwner.USER


def is_user_frame(frame: FrameType) -> bool:
    """Whether the user's code runs in a frame."""
    return owner_of_frame(frame) is CodeOwner.USER


def _file_of_module(name: str) -> str:
    """Return the path of the file of an imported module; "": it has none."""
    module = sys.modules.get(name)
    try:
        # getattr would import a lazy module, which may fail.
        path = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:
        return ""
    return path if isinstance(path, str) else ""
