"""What a program has changed in imported modules is the same in the workers, which import these modules anew."""

from __future__ import annotations

import ast
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

SETTINGS = """
    import os
    from types import SimpleNamespace

    lr = fixed = 1
    width = depth = 1
    chosen = None
    rank = int(os.environ.get("RANK", -1))
    table = {"a": 1}
    names = ["a"]
    options = SimpleNamespace(a=1, parts=[1], default=names)

    class Defaults:
        lr = 1

    def set_lr(value):
        global lr
        if value != lr:
            lr = value

    def values():
        return lr, fixed, width, depth, chosen, table, names, options.a, options.parts, Defaults.lr
"""
USER = """
    import os
    from settings import names, options

    stream = None
    is_open = False
    parts = options.parts

    def open_stream():
        global stream, is_open
        stream, is_open = open(os.devnull), True

    def values():
        return names is options.default, names, parts, is_open, stream
"""
SCRIPT = """
    import settings, user
    from parallelize import distributed
    from settings import names, options

    def use():
        import settings as s
        s.fixed = 4

    use()
    settings.set_lr(2)
    for name, value in {"width": 5, "depth": 6, "chosen": {"a": 1}}.items():
        setattr(settings, name, value)
    settings.table["b"] = 2
    names.append("b")
    options.a = 3
    options.parts.append(2)
    settings.Defaults.lr = 7
    user.open_stream()

    @distributed(processes=2)
    def train():
        return settings.values(), user.values(), settings.rank

    if __name__ == "__main__":
        print(train())
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., None]:
    """Return a function that writes modules beside the script."""

    def write(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))

    return write


def test_workers_have_the_programs_values(write: Callable[..., None], run_script: Run) -> None:
    """In every name of an object; one that depends on the rank stays that of the rank; a file is named."""
    write(settings=SETTINGS, user=USER)
    done = run_script(SCRIPT)
    values, users, rank = ast.literal_eval(done.stdout)
    assert values == (2, 4, 5, 6, {"a": 1}, {"a": 1, "b": 2}, ["a", "b"], 3, [1, 2], 7)
    assert users == (True, ["a", "b"], [1, 2], True, None)
    assert rank == 0
    assert "not sent to the workers: user.stream (TextIOWrapper); set it in the function" in done.stderr


@pytest.mark.slow
def test_replaced_functions(write: Callable[..., None], run_script: Run) -> None:
    """A test's monkeypatch is in force; what a decorator has returned on import stays, with its globals."""
    trainer = """
        from tools import load, counted

        def build():
            return "built"

        calls = 0

        @counted
        def count():
            global calls
            calls += 1
            return calls

        def train():
            return build(), load(), _private(), count(), calls

        def _private():
            return "private"
    """
    tools = """
        def counted(function):
            def inner():
                return function()
            return inner

        def load():
            return "loaded"
    """
    test = """
        import trainer
        from parallelize import distributed

        def load():
            return "fake"

        def test_it(monkeypatch):
            monkeypatch.setattr(trainer, "build", lambda: "patched")
            monkeypatch.setattr(trainer, "load", load)
            monkeypatch.setattr(trainer, "_private", load)
            assert distributed(processes=2)(trainer.train)() == ("patched", "fake", "fake", 1, 1)
    """
    write(trainer=trainer, tools=tools, test_patched=test)
    run_script("import pytest, sys\nsys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'test_patched.py']))")


UNUSUAL = """
    import sys
    import types
    from unittest.mock import MagicMock

    class Config:
        def set_lr(self):
            self.lr = 1
            table.clear()

    table = {}
    sys.modules[__name__] = Config()
    sys.modules["blocked"] = None
    sys.modules["replaced"] = MagicMock()
"""
UNSENDABLE = """
    import collections
    import torch

    Point = collections.namedtuple("AnotherName", "x")
    data = torch.zeros(1)

    class Config:
        def __init__(self):
            self.values = {"lr": 1}

        def __getattr__(self, name):
            return self.values[name]

    def make_class():
        class Local:
            x = 1
        return Local

    def load_data():
        global data
        data = torch.zeros(2**25)

    Local, config = make_class(), Config()
    local = Local()

    def values():
        return Local.x, getattr(Point, "extra", None), config.lr, len(data), isinstance(local, Local)
"""


@pytest.mark.slow
def test_what_a_worker_could_not_set_or_read_is_left_out(write: Callable[..., None], run_script: Run) -> None:
    """A class may have no name in its module, data be too large, a module none; an own __getattr__ does not matter."""
    write(unsendable=UNSENDABLE, unusual=UNUSUAL)
    script = """
        import unsendable, unusual
        from parallelize import distributed

        unsendable.Local.x = unsendable.Point.extra = unsendable.config.values["lr"] = 2
        unsendable.load_data()

        @distributed(processes=2)
        def train():
            return unsendable.values()

        if __name__ == "__main__":
            print(train())
    """
    done = run_script(script)
    assert ast.literal_eval(done.stdout) == (1, None, 2, 1, True)


PROCESS = """
    import os
    import random
    import logging
    import types
    from os import environ
    from sys import version_info

    class Lazy(types.ModuleType):
        def __reduce__(self):  # as the module of transformers, which imports its parts when they are used
            return Lazy, ("lazy",)

    lazy = Lazy("lazy")
    lazy.parts = []
    RANK = int(os.environ.get("RANK", -1))
    rng = random.Random(RANK)
    _ready = False
    chosen = log = None

    class Place:
        rank = int(os.environ.get("RANK", -1))

    def choose(value):
        global chosen, log
        if chosen is not None:
            raise RuntimeError("chosen before")
        rank = RANK
        chosen = value
        log = logging.getLogger(f"run {value}")
        lazy.parts.append(value)

    def set_up():
        global _ready
        if not _ready:
            logging.addLevelName(7, "ready")
            _ready = True

    def values():
        set_up()
        is_own = rng.random() == random.Random(RANK).random()
        names = logging.getLevelName(7), log.name, version_info > (3,)
        return *names, RANK, Place.rank, is_own, environ["RANK"], chosen, lazy.parts
"""


@pytest.mark.slow
def test_what_a_process_sets_up_itself_stays_that_of_the_worker(write: Callable[..., None], run_script: Run) -> None:
    """A private flag says that this process is set up; rank, environment, modules and loggers are its own."""
    write(process=PROCESS)
    script = """
        import os
        import process
        from parallelize import distributed

        os.environ["UNUSED"] = "1"
        process.set_up()
        process.choose(3)

        @distributed(processes=2)
        def train():
            return process.values()

        if __name__ == "__main__":
            print(train())
    """
    assert ast.literal_eval(run_script(script).stdout) == ("ready", "run 3", True, 0, 0, True, "0", 3, [])
