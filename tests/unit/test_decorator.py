"""A decorated function keeps the function's metadata, and only its calls change."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallelize
from parallelize import ConfigError, DDPBackend, distributed
from parallelize.config.options import Options


@distributed(processes=1, timeout=5)
def train(epochs: int, *, lr: float = 0.1) -> tuple[int, float]:
    """Train a model."""
    return epochs, lr


class Trainer:
    @distributed(processes=1)
    def fit(self, x: int) -> tuple[Trainer, int]:
        """Fit."""
        return self, x


def test_it_looks_like_the_function() -> None:
    """Name, docstring, module, signature and source are those of the function."""
    plain = train.__wrapped__
    assert (train.__name__, train.__qualname__, train.__doc__) == ("train", "train", "Train a model.")
    assert train.__module__ == __name__
    assert inspect.signature(train) == inspect.signature(plain)
    assert inspect.unwrap(train) is plain
    assert inspect.getsource(train).startswith("@distributed")
    assert list(inspect.signature(Trainer.fit).parameters) == ["self", "x"]
    assert list(inspect.signature(Trainer().fit).parameters) == ["x"]
    assert train.__wrapped__(2, lr=1.0) == (2, 1.0)


def test_one_process_runs_here_and_cleans_up() -> None:
    """A call with one process has a process group of size 1 until it ends, and copies neither arguments nor values."""
    seen = {}
    here = object()

    @distributed(processes=1)
    def look(thing: object) -> object:
        seen.update(pid=os.getpid(), size=dist.get_world_size(), world=parallelize.world_size())
        return thing

    environ = dict(os.environ)
    assert look(here) is here
    assert look.all_ranks(here) == [here]
    assert seen == {"pid": os.getpid(), "size": 1, "world": 1}
    assert not dist.is_initialized()
    assert dict(os.environ) == environ


def test_methods_are_bound() -> None:
    """A decorated method is bound to its instance or class, also through `options` and `all_ranks`."""
    trainer = Trainer()
    assert trainer.fit(3) == (trainer, 3)
    assert Trainer.fit(trainer, 4) == (trainer, 4)
    assert trainer.fit.options(timeout=3)(5) == (trainer, 5)
    assert trainer.fit.all_ranks(6) == [(trainer, 6)]


def test_options_leave_the_original_alone() -> None:
    """`options` returns a function with its own Config."""
    other = train.options(timeout=9, seed=3)
    assert "9 s" in other.explain()
    assert "5 s" in train.explain()
    assert other(1) == train(1) == (1, 0.1)
    with pytest.raises(ConfigError, match="did you mean 'timeout'"):
        train.options(timeuot=3)


def test_wrong_options_are_refused_where_they_are_written() -> None:
    """All faults are raised at decoration, in one error."""
    with pytest.raises(ConfigError, match="2 faults"):
        distributed(backend="dpp", processes=0)


def test_without_parentheses() -> None:
    """A function is decorated without options; anything else is refused by what it is."""

    @distributed
    def add(x: int, y: int = 1) -> int:
        return x + y

    assert isinstance(add, parallelize.decorator.DistributedFunction)
    assert add.options(processes=1)(2) == 3


NAMELESS: dict[object, str] = {
    2: "@distributed(processes=2) or @distributed(gpus=2)",
    "ddp": "@distributed(backend='ddp')",
    "auto": "@distributed(gpus='auto') or @distributed(backend='auto')",
    "slurm": "@distributed(launcher='slurm')",
    "bf16": "@distributed(amp='bf16')",
    (0, 2): "@distributed(gpus=(0, 2))",
    DDPBackend(): "@distributed(backend=DDPBackend(",
    "much": "@distributed(name=value), above a function (def)",
    3.5: "@distributed(name=value), above a function (def)",
}


@pytest.mark.parametrize("value", NAMELESS, ids=str)
def test_an_option_without_its_name_is_told_the_name(value: object) -> None:
    """The names of all options that take the value, as they are written."""
    with pytest.raises(ConfigError, match=re.escape(f"@distributed({value!r:.80})")) as caught:
        distributed(value)
    assert caught.value.faults[0].fix.startswith(f"write {NAMELESS[value]}")
    with pytest.raises(ConfigError):
        distributed(value, timeout=5)


def test_what_decorated_functions_have_is_listed() -> None:
    """For completion, beside the function's own attributes."""
    assert {"options", "all_ranks", "explain", "compare", "submit", "__name__"} <= set(dir(train))


def test_a_call_of_several_processes_in_a_block_of_one_is_refused() -> None:
    """It would run in the caller alone; a call of one process runs there."""
    model = torch.nn.Linear(1, 1)
    with parallelize.parallel_model(model, backend="ddp"):
        assert train(1) == (1, 0.1)
        with pytest.raises(ConfigError, match=r"train, for 2 processes, in a parallel_model block"):
            train.options(processes=2)(1)


def test_a_partial_is_explained() -> None:
    """`explain` shows the name of the function that a functools.partial wraps."""
    partial = distributed(processes=2)(functools.partial(train.__wrapped__, 3))
    assert partial.explain().startswith("train would run as\n")


async def coroutine() -> None: ...


async def async_generator() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (coroutine, "an async function"),
        (async_generator, "an async function"),
        (generator, "a generator function"),
        (functools.partial(generator), "a generator function"),
        (staticmethod(generator), "a generator function"),
        (Trainer, "a class"),
    ],
)
def test_only_plain_functions_are_decorated(function: object, kind: str) -> None:
    """An object that is not a plain function is refused at decoration; the error has its kind and the fix."""
    with pytest.raises(ConfigError, match=f"@distributed on {kind}(.|\n)*plain function"):
        distributed()(function)


def test_it_pickles_by_name_like_a_function() -> None:
    """A function is pickled by name if the name resolves to it; a closure cannot be pickled."""
    assert pickle.loads(pickle.dumps(train)) is train
    assert pickle.loads(pickle.dumps(Trainer.fit)).__wrapped__ is Trainer.fit.__wrapped__
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(distributed(processes=1)(lambda: 1))


def test_pools_of_processes_call_functions_of_a_script(tmp_path: Path) -> None:
    """A function of __main__ is pickled by name, too, except by cloudpickle, whose readers have another __main__."""
    script = tmp_path / "script.py"
    script.write_text(
        "import cloudpickle, multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from parallelize import distributed\n\n"
        "@distributed(processes=1)\ndef square(x):\n    return x**2\n\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn'):\n"
        "        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:\n"
        "            print(list(pool.map(square, [2, 3])))\n"
        "    print(b'_make_function' in cloudpickle.dumps(square))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == "[4, 9]\n[4, 9]\nTrue\n", done.stderr


def test_an_exception_in_this_process_is_unchanged() -> None:
    """An exception of a call in the calling process has its own traceback and no notes."""
    with pytest.raises(ZeroDivisionError) as caught:
        distributed(processes=1)(lambda: 1 / 0)()
    assert not hasattr(caught.value, "__notes__")
    assert not dist.is_initialized()


def test_a_call_inside_a_call_is_part_of_it() -> None:
    """A decorated function called in another one runs in the same processes, regardless of its own options."""
    inner = distributed(processes=7)(dist.get_world_size)
    outer = distributed(processes=1)(lambda: (inner(), inner.all_ranks()))
    assert outer() == (1, [1])


def test_grad_mode_is_the_callers() -> None:
    """A call in the calling process runs in the caller's grad mode, which is thread-local."""
    with torch.no_grad():
        assert not distributed(processes=1)(torch.is_grad_enabled)()


@pytest.mark.parametrize(("name", "notes"), [("module", 1), ("modul", 0)])
def test_ddps_attribute_module_is_explained(name: str, notes: int) -> None:
    """Code that was written for DistributedDataParallel reads it; another missing attribute has no note."""
    read = distributed(processes=1)(lambda: getattr(torch.nn.Linear(1, 1), name))
    with pytest.raises(AttributeError) as caught:
        read()
    assert [*getattr(caught.value, "__notes__", [])] == [
        "a model in parallel_model is not wrapped: write model instead of model.module"
    ][:notes]


def test_help_lists_every_option() -> None:
    """With its types, and its default."""
    documented = re.findall(r"- (\w+) \(.+, \S+\):", inspect.getdoc(distributed) or "")
    assert documented == [*Options.__annotations__]
