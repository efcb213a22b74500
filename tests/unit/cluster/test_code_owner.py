"""Whose code a file, a module or a frame is: one answer for warnings, hang reports, tracebacks and calls."""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
from types import FrameType, ModuleType

import cloudpickle
import numpy as np
import pytest
import torch

import parallelize.cluster.world
from parallelize.cluster.code_owner import CodeOwner, is_user_frame, owner_of_file, owner_of_frame, owner_of_module

USER, PARALLELIZE, TORCH, PYTHON, INSTALLED = CodeOwner


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/home/ann/train.py", USER),
        ("/home/ann/site-packages-of-ours/train.py", USER),
        ("/home/ann/lib/python3.11/train.py", USER),
        ("train.py", USER),
        ("<stdin>", USER),
        ("<ipython-input-3-4f>", USER),
        (parallelize.cluster.world.__file__, PARALLELIZE),
        (torch.nn.functional.__file__, TORCH),
        (threading.__file__, PYTHON),
        (collections.__file__, PYTHON),
        ("<frozen importlib._bootstrap>", PYTHON),
        (np.__file__, INSTALLED),
        (cloudpickle.__file__, INSTALLED),
        ("/opt/another-venv/lib/python3.12/site-packages/lib/data.py", INSTALLED),
        ("/usr/lib/python3/dist-packages/yaml/loader.py", INSTALLED),
        ("/home/ann/.local/lib/python3.11/site-packages/wandb/run.py", INSTALLED),
    ],
)
def test_the_folder_of_a_file_decides(path: str, owner: CodeOwner) -> None:
    """A folder of packages belongs to the packages of any environment, and no other folder whose name begins so."""
    assert owner_of_file(path) is owner


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("__main__", USER),
        (__name__, USER),
        ("a_module_that_is_not_imported", USER),
        ("parallelize.cluster.world", PARALLELIZE),
        ("torch.nn", TORCH),
        ("torch._C._nn", TORCH),
        ("sys", PYTHON),
        ("builtins", PYTHON),
        ("threading", PYTHON),
        (None, PYTHON),
        ("numpy.random", INSTALLED),
    ],
)
def test_the_file_of_a_module_decides(name: str | None, owner: CodeOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled modules have the owner of their package, and built-in functions, without a module, are Python's."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert owner_of_module(name) is owner


def test_a_users_module_may_have_the_name_of_one_of_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's folder comes first on sys.path, and Python has many modules: profile, trace, code."""
    module = ModuleType("trace")
    module.__file__ = "/home/ann/trace.py"
    monkeypatch.setitem(sys.modules, "trace", module)
    assert owner_of_module("trace") is USER


class Lazy(ModuleType):
    def __getattribute__(self, name: str) -> object:
        raise ImportError(f"{name} is not installed")


def test_a_lazy_module_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at an attribute of it would import it, which may fail."""
    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    assert owner_of_module("lazy_module") is USER


@dataclasses.dataclass
class Caller:
    frame: FrameType = dataclasses.field(default_factory=lambda: sys._getframe(1))


def test_code_without_a_file_belongs_to_the_module_that_it_runs_in() -> None:
    """Such as the __init__ of a dataclass: Python has made it from a text."""
    frame = Caller().frame
    assert frame.f_code.co_filename == "<string>"
    assert is_user_frame(frame)
    variables = {"__name__": "parallelize.cluster.world", "sys": sys}
    exec("frame = sys._getframe()", variables)
    assert owner_of_frame(variables["frame"]) is PARALLELIZE  # type: ignore[arg-type]  # exec has set it
    assert is_user_frame(sys._getframe())
