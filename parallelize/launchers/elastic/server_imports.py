"""What a fork server imports for a caller, and whether that is still what the caller would import."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelize.call.reachable import is_a, is_user_code, namespace

__all__ = ["REQUEST", "ServerImports"]

REQUEST = "--parallelize-preload="  # last argument of a fork server, with the descriptor of the file of its request

# Variables that libraries read when they are imported, which the fork server does once for all calls. Not the number of
# threads, which workers set.
_READ_AT_IMPORT = re.compile(
    # Not the folder that importing torch._dynamo sets, as the first optimizer of a process does.
    r"(PY)?TORCH(?!ELASTIC_|INDUCTOR_CACHE_DIR$)|NCCL_|GLOO_|LD_|MKL_|OMP_(?!NUM_THREADS)|KMP_|PARALLELIZE_PRELOAD$"
)
_EXCLUDED = sys.stdlib_module_names | {"torch", "mpi4py"}  # torch is always imported; importing mpi4py starts MPI


@dataclass(frozen=True)
class ServerImports:
    """The imports of a fork server.

    Args:
        settings: environment variables that libraries read when they are imported.
        modules: names of modules that the caller has imported.
        modified: times at which the files of these modules, and the folders of installed packages, were modified.
    """

    settings: Mapping[str, str]
    modules: tuple[str, ...]
    modified: Mapping[str, int | None]

    @classmethod
    def of_caller(cls, environ: Mapping[str, str]) -> ServerImports:
        """Return the imports for a caller with these variables.

        They are the loaded modules of every installed package from which the caller's own modules have imported
        anything. The caller's own modules are left to the workers: they change between calls, as in a notebook.
        """
        packages = {"parallelize"} if environ.get("PARALLELIZE_PRELOAD") == "0" else {"parallelize", *_used_packages()}
        loaded = [name for name in list(sys.modules) if name.partition(".")[0] in packages]
        files = _files(loaded)
        # Installing another version of any package changes its folder of metadata, beside the packages.
        folders = {each for each in sys.path if each.endswith(("site-packages", "dist-packages"))}
        modified = {path: _modified(path) for path in files | folders}
        return cls(_settings(environ), tuple(loaded), modified)

    def are_current(self, environ: Mapping[str, str]) -> bool:
        """Whether a fork server that has made these imports serves a caller with these variables."""
        is_same = self.settings == _settings(environ) and _files(self.modules) <= self.modified.keys()
        return is_same and all(_modified(path) == at for path, at in self.modified.items())

    @contextlib.contextmanager
    def request(self, environ: Mapping[str, str]) -> Iterator[int]:
        """Write the request for a new fork server, with OMP_NUM_THREADS; yield its file descriptor."""
        variables = {name: environ[name] for name in ("OMP_NUM_THREADS",) if name in environ}
        with tempfile.TemporaryFile("w+") as file:
            json.dump({"environ": variables, "modules": self.modules}, file)
            file.seek(0)
            yield file.fileno()


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if _READ_AT_IMPORT.match(name)}


def _files(names: Iterable[str]) -> set[str]:
    """Return the files from which this process has loaded modules, which may be others than before."""
    found = (namespace(sys.modules.get(name)).get("__file__") for name in names)
    return {file for file in found if isinstance(file, str)}


def _used_packages() -> set[str]:
    """Return the names of the packages from which the user's modules, and __main__, have imported anything."""
    users = [module for name, module in list(sys.modules.items()) if is_user_code(name)]
    values = [value for module in users for value in list(namespace(module).values())]
    names: list[Any] = [namespace(value).get("__name__") for value in values if is_a(value, types.ModuleType)]
    names += [value.__module__ for value in values if is_a(value, (type, types.FunctionType))]
    known = {name for name in names if is_a(name, str) and not is_user_code(name)}
    return {name.partition(".")[0] for name in known} - _EXCLUDED


def _modified(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return Path(path).stat().st_mtime_ns
    return None
