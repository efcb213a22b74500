"""Every kind of function can be called from every kind of program."""

from __future__ import annotations

import functools
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallelize import ConfigError, distributed

pytestmark = pytest.mark.slow

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# A script without `if __name__`: it has a model, a dataset, constants, and a loader with workers.
EVERYTHING = """
import io, os, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from parallelize import distributed

print("top level")
SCALE = 3

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(index * SCALE)

class Net(torch.nn.Linear):
    def double(self):
        return 2 * self.weight.item()

class Trainer:
    def __init__(self):
        self.steps = 5
    @distributed(processes=2)
    def fit(self, extra):
        return self.steps + extra

@distributed(processes=2)
def train(net, *, flag):
    assert flag
    seen = [None, None]
    dist.all_gather_object(seen, net)                       # pickles a class of __main__
    torch.save(net, io.BytesIO())
    loaded = [batch.tolist() for batch in DataLoader(Numbers(), batch_size=4, num_workers=2)]
    assert sys.argv[1:] == ["--lr", "0.1"], sys.argv
    return type(net).__name__, net.double() == seen[0].double(), loaded, __name__

net = Net(1, 1)
name, equal, loaded, main = train(net, flag=True)
assert (name, equal, main) == ("Net", True, "__main__")
assert loaded == [[0, 3, 6, 9], [12, 15, 18, 21]], loaded
assert Trainer().fit(2) == 7
back = distributed(processes=2)(lambda: Net(2, 1))()
assert isinstance(back, Net)
print("done")
"""


def test_a_script_without_name_main(run_script: Run) -> None:
    """Its functions, models, datasets and loaders work, and its top level is run once."""
    done = run_script(EVERYTHING, args=("--lr", "0.1"))
    assert done.stdout.split("\n") == ["top level", "done", ""]
    assert done.stderr == ""


# All objects that are sent to and from the loader's workers contain a class or function of __main__.
SPAWNED = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from parallelize import distributed, shard_loader

class Batch:
    def __init__(self, values):
        self.values = values

class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return scaled(index)

def scaled(index):
    return index * 3

def collate(values):
    return Batch(values)

def init(number):
    assert isinstance(get_worker_info().dataset, Numbers)

@distributed(processes=2)
def train():
    loader = DataLoader(
        Numbers(), 2, num_workers=1, collate_fn=collate, worker_init_fn=init, multiprocessing_context="spawn"
    )
    batches = list(shard_loader(loader))
    assert all(isinstance(batch, Batch) for batch in batches)
    spawning = multiprocessing.get_context("spawn")
    with spawning.Pool(1) as pool, ProcessPoolExecutor(1, spawning) as executor:
        values = [*pool.map(scaled, [1]), *executor.map(scaled, [2]), pool.apply(Batch, [[0]])]
    assert isinstance(values.pop(), Batch)
    return [batch.values for batch in batches], values

seen = train.all_ranks()
assert seen == [([[0, 6]], [3, 6]), ([[3, 9]], [3, 6])], seen
print("done")
"""


def test_children_of_a_rank_that_are_not_forked(run_script: Run) -> None:
    """Those of loaders and pools can unpickle what a script without `if __name__` defines; what they return, too."""
    done = run_script(SPAWNED, how="file")
    assert done.stdout == "done\n", done.stderr


START_METHODS = """
import multiprocessing, sys
from parallelize import distributed

@distributed(processes=2)
def start_method():
    return multiprocessing.get_start_method()

if sys.argv[1:]:
    multiprocessing.set_start_method(sys.argv[1])
print(start_method.all_ranks(), multiprocessing.get_start_method())
"""


@pytest.mark.parametrize("args", [(), ("spawn",)])
def test_children_of_a_rank_start_as_those_of_the_caller(run_script: Run, args: tuple[str, ...]) -> None:
    """By the caller's method, or else by Python's own, which is another one since 3.14."""
    methods, _, own = run_script(START_METHODS, args=args).stdout.strip().rpartition(" ")
    assert methods == str([own, own])


UNREADABLE_ANNOTATIONS = """
from typing import TYPE_CHECKING
from parallelize import distributed
if TYPE_CHECKING:
    from nowhere import Missing

class Holder:
    value: Missing

    def get(self) -> Missing:
        return self.value

@distributed(processes=2)
def train(value: Missing, *more: Missing) -> Missing:
    holder = Holder()
    holder.value = value
    return holder, train.__wrapped__.__annotations__

holder, annotations = train(4, 5)
print(holder.get(), annotations)
try:
    Holder.get.__annotations__
except NameError:
    print("as before")
"""


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated when a function is defined")
def test_annotations_that_cannot_be_evaluated(run_script: Run) -> None:
    """Names that only type checkers import are texts in the workers, and stay unread in the caller."""
    done = run_script(UNREADABLE_ANNOTATIONS)
    annotations = {"value": "Missing", "more": "Missing", "return": "Missing"}
    assert done.stdout == f"4 {annotations}\nas before\n"


PACKAGE = """
import argparse, os, sys, warnings
from parallelize import distributed
from .parts import Part

parser = argparse.ArgumentParser()
parser.add_argument("--scale", type=int)

@distributed(processes=2)
def main(scale):
    import late
    from .parts import Part as again
    assert again is Part
    filters = [each[0] for each in warnings.filters if each[2] is FutureWarning]
    return [late.VALUE * scale * Part.value, __debug__, sys.flags.utf8_mode, filters, os.getcwd()]

if __name__ == "__main__":
    os.chdir(sys.argv.pop(1))
    sys.path.append(sys.argv.pop(1))
    print(main(**vars(parser.parse_args())))
"""


def test_a_package_run_by_name_with_flags_in_a_changed_directory(tmp_path: Path) -> None:
    """`python -O -X ... -W ... -m package` and its relative imports, sys.path and directory reach the workers."""
    elsewhere, extra = tmp_path / "outputs", tmp_path / "extra"
    texts = {"pkg/__main__": PACKAGE, "pkg/__init__": "", "pkg/parts": "class Part:\n    value = 1\n"}
    for name, text in {**texts, "extra/late": "VALUE = 42\n", "outputs/none": ""}.items():
        path = (tmp_path / name).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    flags = ["-O", "-X", "utf8", "-W", "error::FutureWarning"]
    command = [sys.executable, *flags, "-m", "pkg", str(elsewhere), str(extra), "--scale", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[84, False, 1, ['error'], str(elsewhere)]}\n"


REPL = """
import torch
from parallelize import distributed
factor = 2
@distributed(processes=2)
def double(x):
    return factor * x

double(21)
factor = 3
double(21)
"""


def test_the_interactive_interpreter(tmp_path: Path) -> None:
    """Functions typed at the prompt run, and see later changes of globals."""
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=REPL, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.split() == ["42", "63"]


def test_a_notebook(tmp_path: Path) -> None:
    """A cell calls functions of other cells, shows their output, and gets the worker's exception."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = [
        "import torch\nfrom parallelize import distributed, rank\nclass Net(torch.nn.Linear): pass",
        "@distributed(processes=2, logs='all')\ndef train(net):\n    print('at work', rank())\n    return net",
        "isinstance(train(Net(1, 1)), Net)",
        "@distributed(processes=2)\ndef fail():\n    raise KeyError('lr')",
        "try:\n    fail()\nexcept KeyError as error:\n    print(error)",
        "@distributed(processes=2)\ndef shell():\n    !true",
        "try:\n    shell()\nexcept Exception as error:\n    print(error)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed, failed, named = ("".join(o.get("text", "") for o in notebook.cells[n].outputs) for n in (2, 4, 6))
    assert sorted(printed.splitlines()) == ["[rank 0] at work 0", "[rank 1] at work 1"]
    assert [o.data["text/plain"] for o in notebook.cells[2].outputs if o.output_type == "execute_result"] == ["True"]
    assert failed == "'lr'\n"
    assert "fix: a line with ! or % is the notebook's own: write subprocess.run(...)" in named


@distributed(processes=2)
def add(x: int, y: int = 0) -> int:
    return x + y


class Methods:
    base = 100

    def __init__(self, own: int) -> None:
        self.own = own

    @distributed(processes=2)
    def method(self, x: int) -> int:
        return self.own + x

    @classmethod
    @distributed(processes=2)
    def of_class(cls, x: int) -> int:
        return cls.base + x

    @distributed(processes=2)
    @classmethod
    def of_class_too(cls, x: int) -> int:
        return cls.base + x

    @staticmethod
    @distributed(processes=2)
    def static(x: int) -> int:
        return x

    @distributed(processes=2)
    @staticmethod
    def static_too(x: int) -> int:
        return x

    def plain(self, x: int) -> int:
        return self.own - x

    __call__ = plain


def closing_over(y: int) -> Callable[[int], int]:
    return lambda x: x * y


def doubled(function: Callable[[int], int]) -> Callable[[int], int]:
    @functools.wraps(function)
    def twice(x: int) -> int:
        return 2 * function(x)

    return twice


@distributed(processes=2)
@doubled
def wrapped_below(x: int) -> int:
    return x


@doubled
@distributed(processes=2)
def wrapped_above(x: int) -> int:
    return x


ANY_FUNCTION: dict[str, tuple[Callable[[int], int], int]] = {
    "function": (add, 1),
    "lambda": (distributed(processes=2)(lambda x: -x), -1),
    "closure": (distributed(processes=2)(closing_over(7)), 7),
    "partial": (distributed(processes=2)(functools.partial(add.__wrapped__, y=9)), 10),
    "partial of a decorated one": (functools.partial(add, y=9), 10),
    "callable object": (distributed(processes=2)(Methods(7)), 6),
    "method": (Methods(20).method, 21),
    "class method": (Methods.of_class, 101),
    "class method, by an instance": (Methods(20).of_class_too, 101),
    "static method": (Methods.static, 1),
    "static method, below": (Methods(20).static_too, 1),
    "bound method, decorated": (distributed(processes=2)(Methods(20).plain), 19),
    "decorated below": (wrapped_below, 2),
    "decorated above": (wrapped_above, 2),
    "decorated twice": (distributed(processes=2)(add), 1),
    "other options": (add.options(processes=3), 1),
    "builtin": (distributed(processes=2)(abs), 1),
}


@pytest.mark.parametrize("kind", ANY_FUNCTION)
def test_every_kind_of_function(kind: str) -> None:
    """Callables of every kind return the same value as undecorated."""
    function, expected = ANY_FUNCTION[kind]
    assert function(1) == expected


def test_an_unpicklable_object_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable, argument or attribute, and does not wait for the workers."""
    thing = (number for number in range(3))
    holder = Methods(0)
    holder.own = {"deep": [1, thing]}  # type: ignore[assignment]  # what a user does
    circle: dict[str, object] = {"thing": thing}
    circle["circle"] = circle

    @distributed(processes=2)
    def uses() -> None:
        print(thing)

    # The fork server does not get the call, so that one which waits for its workers waits for ever.
    monkeypatch.setattr(socket, "send_fds", lambda *_: None)
    for call, name in [
        (uses, "the variable 'thing'"),
        (lambda: add(1, thing), "argument 'y' (second)"),
        (lambda: add(1, y=thing), "argument 'y'"),
        (lambda: holder.method(2), "self.own['deep'][1]"),
        (lambda: add(circle), "argument 'x'['thing']"),
    ]:
        with pytest.raises(ConfigError, match=rf"{re.escape(name)} cannot be pickled\n(.|\n)*'generator' object"):
            call()


LOADED_BY_PATH = """
import importlib.util, sys
from pathlib import Path

path = Path("loaded_by_path.py")
path.write_text('''
from parallelize import distributed
class Thing:
    pass
def helper():
    return Thing()
@distributed(processes=2)
def make():
    return helper()
''')
spec = importlib.util.spec_from_file_location("by_path", path)
module = importlib.util.module_from_spec(spec)
sys.modules["by_path"] = module
spec.loader.exec_module(module)
assert isinstance(module.make(), module.Thing)
"""


def test_a_function_of_a_module_that_workers_cannot_import(run_script: Run) -> None:
    """A module that was loaded by its path is pickled by value, with its classes."""
    run_script(LOADED_BY_PATH)


CALLS_WHEN_IMPORTED = """
from pathlib import Path
from parallelize import distributed, rank

class Part:
    pass

def part():
    return Part()

@distributed(processes=2)
def other():
    return part()

@distributed(processes=2)
def train(folder):
    Path(folder, f"trained.{rank()}").touch(exist_ok=False)
    return other()

if Path("call").exists():
    found = train(".")
"""


def test_calls_while_their_module_is_imported(tmp_path: Path, run_script: Run) -> None:
    """A call of the program is made once, as no worker imports its module; one by a worker's import is refused."""
    (tmp_path / "experiment.py").write_text(CALLS_WHEN_IMPORTED)
    code = "import pathlib, experiment; pathlib.Path('call').touch(); experiment.other()"
    stderr = run_script(code, check=False).stderr
    assert "LaunchError: train is called at the top level of a module that a worker imports" in stderr
    assert "fix: put the call into a function, or below if __name__ == '__main__':" in stderr
    assert not list(tmp_path.glob("trained.*"))
    run_script("import experiment; assert type(experiment.found) is experiment.Part")
    assert sorted(path.name for path in tmp_path.glob("trained.*")) == ["trained.0", "trained.1"]


FORKED = """
import multiprocessing, os
from parallelize import distributed, rank

@distributed(processes=2)
def train():
    return rank()

def call():
    return train.all_ranks()

assert train.all_ranks() == [0, 1]
child = os.fork()
if child == 0:
    os._exit(7 if train.all_ranks() == train.all_ranks() == [0, 1] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.apply(call) == [0, 1]
assert train.all_ranks() == [0, 1]
"""


def test_a_forked_process_and_a_pool_worker_call(run_script: Run) -> None:
    """Each starts its own fork server, also a daemonic process, in which multiprocessing starts none."""
    run_script(FORKED)


def test_a_read_only_dev_shm_is_no_hindrance() -> None:
    """Processes are started and watched without semaphores, which are files there."""
    mount = 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("may not mount here")
    call = "from parallelize import distributed, rank\nprint(distributed(processes=2)(rank)())\n"
    ended = subprocess.run([*inside, sys.executable, "-c", call], check=False, capture_output=True, text=True)
    assert ended.stdout == "0\n", ended.stderr
