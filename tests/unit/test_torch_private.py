"""tests/private_names.py lists exactly the private names that the package uses, and all of them exist."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

import architecture
import pytest
import torch
from private_names import NCCL_ONLY, PRIVATE_NAMES, SINCE
from torch.torch_version import TorchVersion

import parallelize

PACKAGE = architecture.read("parallelize")
PATHS = [f"{owner}.{name}" for owner, names in PRIVATE_NAMES.items() for name in names]
LISTED = {part for path in PATHS for part in path.split(".") if part.startswith("_")}
LISTED |= {path.rpartition(".")[2] for path in PATHS}
# The names that the installed torch is too old for,
NEWER = {path for path, since in SINCE.items() if TorchVersion(torch.__version__) < since}
# Those that this build of it lacks.
NEWER |= set() if torch.distributed.is_nccl_available() else NCCL_ONLY

# Documented by Python in spite of the underscore.
DOCUMENTED = {"_exit", "_fields", "_getframe", "_current_frames", "_replace"}
# Attributes of graph nodes: https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors. The tests of
# gradients/target_counts.py and agreement/coupling_rules.py fail if a loss does not have one any more.
DOCUMENTED |= {"_saved_other", "_saved_reduction", "_saved_self", "_saved_total_weight"}
DOCUMENTED |= {"_saved_dim", "_saved_dim0", "_saved_dim1", "_saved_dims", "_saved_exponent", "_saved_keepdim"}
DOCUMENTED |= {"_saved_ord", "_saved_p"}
# Attributes of other libraries' samplers and datasets.
OTHERS = {"_distributed", "_num_replicas", "_unique_rank_world"}
IDENTIFIER = re.compile(r"_[a-zA-Z]\w*")
LIBRARIES = ("torch", "multiprocessing", "cloudpickle", "wrapt")


def defined(tree: ast.Module) -> set[str]:
    """Names that a module defines: functions, classes, variables, parameters, attributes of self, and keys."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            found.add(str(node.value.value))  # NAME = "_a_key_of_ours"
    return found


def used(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Private attributes, imports, and names in strings: with their lines, and whether they are strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and IDENTIFIER.fullmatch(node.attr):
            yield node.attr, node.lineno, False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and IDENTIFIER.fullmatch(node.value):
            yield node.value, node.lineno, True
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                for part in (f"{module}.{alias.name}" if module else alias.name).split("."):
                    if IDENTIFIER.fullmatch(part):
                        yield part, node.lineno, False


def imported(tree: ast.Module) -> set[str]:
    """Paths of the files that a module imports, or imports names from."""
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {f"{module.replace('.', '/')}.py" for module in modules}


def unlisted(sources: architecture.Sources, listed: set[str]) -> list[str]:
    """Private names that are not listed, and that neither the file that uses them nor one that it imports defines."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    own = {path: defined(tree) for path, tree in trees.items()}
    everywhere = set().union(*own.values())
    found = []
    for path, tree in trees.items():
        near = own[path].union(*(own.get(each, set()) for each in imported(tree)))
        found += [
            f"{path}:{line} {name}"
            for name, line, is_string in used(tree)
            if name not in listed | DOCUMENTED | OTHERS | (everywhere if is_string else near)
        ]
    return found


def overridden() -> set[str]:
    """Collect private names of the libraries' classes that their subclasses in the package override or use."""
    found = set()
    for module in pkgutil.walk_packages(parallelize.__path__, "parallelize."):
        if module.name.endswith((".__main__", ".preload")):
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and kind.__module__ == module.name:
                found |= _of_bases(kind)
    return found


def _of_bases(kind: type) -> set[str]:
    bases = [base for base in kind.__mro__[1:] if base.__module__.partition(".")[0] in LIBRARIES]
    if not bases:
        return set()
    lines, first = inspect.findsource(kind)  # getsource would follow the __wrapped__ of a proxy's class
    source = "".join(inspect.getblock(lines[first:]))
    mine = set(re.findall(r"(?:self\.|cls\.|def )(_[a-zA-Z]\w*)", source))
    theirs = {name for base in bases for name in vars(base)}
    for base in bases:
        try:
            theirs |= set(re.findall(r"self\.(_[a-zA-Z]\w*)", inspect.getsource(base)))
        except (OSError, TypeError):  # defined in C
            continue
    return mine & theirs


def exists(path: str) -> bool:
    """Whether the installed libraries have a name: as a module, an attribute, or a word of its owner's source."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            owner = importlib.import_module(".".join(parts[:end]))
            break
    else:
        return False
    try:
        *middle, last = parts[end:] or [""]
        for part in middle:
            owner = getattr(owner, part)
        return hasattr(owner, last) or not last or re.search(rf"\b{last}\b", inspect.getsource(owner)) is not None
    except (AttributeError, OSError, TypeError):  # OSError, TypeError: an owner that is defined in C
        return False


def test_every_private_name_is_listed() -> None:
    """Every private name that a file uses is the package's own or in the list."""
    assert unlisted(PACKAGE, LISTED) == []


def test_what_subclasses_override_is_listed() -> None:
    """Subclasses of the libraries' classes override and use only listed private names of theirs."""
    assert overridden() - LISTED == set()


@pytest.mark.parametrize(
    "source",
    [
        "tensor._secret",
        "getattr(tensor, '_secret')",
        "import torch._secret",
        "from torch import _secret",
        "from torch._secret import public",
        "model.__dict__['_secret'] = 1",
        "from parallelize.b import c; tensor._secret",
    ],
)
def test_an_unlisted_name_is_reported(source: str) -> None:
    """Each way to use a private name is detected."""
    assert unlisted({"parallelize/a.py": source}, LISTED) == ["parallelize/a.py:1 _secret"]


def test_an_overriding_class_is_reported() -> None:
    """A private method of torch that a subclass overrides is detected."""

    class Replica(torch.nn.parallel.DistributedDataParallel):
        def _pre_forward(self) -> None: ...

    assert _of_bases(Replica) == {"_pre_forward"}


@pytest.mark.parametrize("path", [path for path in PATHS if not path.startswith("apex.") and path not in NEWER])
def test_a_listed_name_exists(path: str) -> None:
    """The installed libraries have every listed name."""
    assert exists(path)


def test_a_missing_name_is_reported() -> None:
    """The check above fails for a name that no library has."""
    assert not exists("torch.Tensor._secret_of_nobody")
    assert not exists("torch.secret.name")


@pytest.mark.parametrize("path", PATHS)
def test_a_listed_name_is_used(path: str) -> None:
    """The list has no name that the package no longer uses, and each has a purpose and a consequence."""
    owner, _, name = path.rpartition(".")
    assert any(re.search(rf"(?<!\w){name}\b", text) for text in PACKAGE.values())
    assert all(PRIVATE_NAMES[owner][name])


def test_since_names_listed_paths() -> None:
    """Releases are given for listed names only."""
    assert set(PATHS) >= SINCE.keys()
