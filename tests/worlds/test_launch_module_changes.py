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
    rank = int(os.environ.get("RANK", -1))
    table = {"a": 1}
    names = ["a"]
    options = SimpleNamespace(a=1)

    class Defaults:
        lr = 1

    def set_lr(value):
        global lr
        if value != lr:
            lr = value

    def values():
        return lr, fixed, width, depth, table, names, options.a, Defaults.lr
"""
USER = """
    import os
    from settings import names, options

    stream = None
    is_open = False

    def open_stream():
        global stream, is_open
        stream, is_open = open(os.devnull), True

    def values():
        return names, options.a, is_open, stream
"""
SCRIPT = """
    import functools
    import torch
    import torch.nn.functional as F
    import settings, user
    from parallelize import distributed
    from settings import names, options

    def use():
        import settings as s
        s.fixed = 4

    use()
    settings.set_lr(2)
    for name, value in {"width": 5, "depth": 6}.items():
        setattr(settings, name, value)
    settings.table["b"] = 2
    names.append("b")
    options.a = 3
    settings.Defaults.lr = 7
    user.open_stream()
    F.gelu = lambda x: x * 0

    @distributed(processes=2)
    def train():
        return settings.values(), user.values(), settings.rank, F.gelu(torch.ones(1)).item(), torch.load.keywords

    if __name__ == "__main__":
        torch.load = functools.partial(torch.load, weights_only=True)
        print(train())
"""


def test_workers_have_the_programs_values(tmp_path: Path, run_script: Run) -> None:
    """They do, in every module that has imported the value; one that depends on the rank stays that of the rank."""
    for name, text in {"settings": SETTINGS, "user": USER}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    values, users, rank, gelu, keywords = ast.literal_eval(run_script(SCRIPT).stdout)
    containers = {"a": 1, "b": 2}, ["a", "b"], 3
    assert values == (2, 4, 5, 6, *containers, 7)
    # A file cannot be sent, so `is_open`, which is set with it, is not sent either.
    assert users == (*containers[1:], False, None)
    assert (rank, gelu, keywords) == (0, 0.0, {"weights_only": True})


CONFIG = """
    import os

    class Config:
        lr = 0.0
        patience = -1
        layers = [1]
        connection = None
        is_connected = False
        rank = int(os.environ.get("RANK", -1))

        @classmethod
        def update(cls, **values):
            for name, value in values.items():
                setattr(cls, name, value)

        @classmethod
        def connect(cls):
            cls.connection = open(os.devnull)
            cls.is_connected = True

    def values():
        return Config.lr, Config.patience, Config.layers, Config.is_connected, Config.rank
"""


@pytest.mark.slow
@pytest.mark.parametrize("update", ["Config.update(**new)", "for name in new: setattr(Config, name, new[name])"])
def test_workers_have_attributes_of_classes(tmp_path: Path, run_script: Run, update: str) -> None:
    """A class method sets them, or a loop in the script; what another method opens is left to each process."""
    (tmp_path / "config.py").write_text(textwrap.dedent(CONFIG))
    script = f"""
        import config
        from config import Config
        from parallelize import distributed

        @distributed(processes=2)
        def train():
            return config.values()

        if __name__ == "__main__":
            new = dict(lr=0.5, patience=3, layers=[2, 3])
            {update}
            Config.connect()
            print(train())
    """
    assert run_script(script).stdout == "(0.5, 3, [2, 3], False, 0)\n"


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


@pytest.mark.slow
def test_members_of_sys_modules_that_are_no_modules_are_left_out(tmp_path: Path, run_script: Run) -> None:
    """None prevents an import; a module may replace itself by an object."""
    (tmp_path / "unusual.py").write_text(textwrap.dedent(UNUSUAL))
    script = """
        import unusual
        from parallelize import distributed

        @distributed(processes=2)
        def train():
            return "trained"

        if __name__ == "__main__":
            table = []
            table.append(1)
            print(train())
    """
    assert run_script(script).stdout == "trained\n"


UNSENDABLE = """
    import collections
    import torch

    Point = collections.namedtuple("AnotherName", "x")
    data = None

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

    def values():
        return Local.x, getattr(Point, "extra", None), config.lr, data
"""


@pytest.mark.slow
def test_what_a_worker_could_not_set_or_unpickle_is_left_out(tmp_path: Path, run_script: Run) -> None:
    """A class may have no name in its module, an object may be unable to unpickle, and data is too large."""
    (tmp_path / "unsendable.py").write_text(textwrap.dedent(UNSENDABLE))
    script = """
        import unsendable
        from parallelize import distributed

        unsendable.Local.x = unsendable.Point.extra = unsendable.config.values["lr"] = 2
        unsendable.load_data()

        @distributed(processes=2)
        def train():
            return unsendable.values()

        if __name__ == "__main__":
            print(train())
    """
    assert ast.literal_eval(run_script(script).stdout) == (1, None, 1, None)


PROCESS = """
    import os
    import random
    import logging
    from os import environ

    RANK = int(os.environ.get("RANK", -1))
    rng = random.Random(RANK)
    _ready = False
    chosen = None

    def set_rank(rank):
        global RANK
        RANK = rank

    def choose(value):
        global chosen
        if chosen is not None:
            raise RuntimeError("chosen before")
        chosen = value

    def set_up():
        global _ready
        if not _ready:
            logging.addLevelName(7, "ready")
            _ready = True

    def reset():
        global _ready
        _ready = False
        rng.seed(RANK)

    def values():
        set_up()
        return logging.getLevelName(7), RANK, rng.random() == random.Random(RANK).random(), environ["RANK"], chosen
"""


@pytest.mark.slow
def test_what_a_process_sets_up_itself_stays_that_of_the_worker(tmp_path: Path, run_script: Run) -> None:
    """A flag says that this process has set something up, and a worker has its own rank and environment variables."""
    (tmp_path / "process.py").write_text(textwrap.dedent(PROCESS))
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
    assert ast.literal_eval(run_script(script).stdout) == ("ready", 0, True, "0", 3)
