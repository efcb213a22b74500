"""Architecture rules hold for this repository, and each is shown to detect a violation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import architecture
import changes
import pytest
from architecture import Sources

GUIDE = Path(__file__).parents[1] / ".github" / "CONTRIBUTING.md"
PACKAGE = architecture.read("parallelize")
TESTS = architecture.read("tests")
SCRIPTS = {**architecture.read("examples"), **architecture.read("benchmarks")}

RULES: dict[Callable[[Sources], list[str]], Sources] = {
    architecture.upward_imports: PACKAGE,
    architecture.plugin_imports: PACKAGE,
    architecture.cycles: PACKAGE,
    architecture.files_at_top: PACKAGE,
    architecture.names_of_files: PACKAGE,
    architecture.sizes: PACKAGE,
    architecture.rooms: PACKAGE,
    architecture.changes_of_others: PACKAGE,
    architecture.channels: PACKAGE,
    architecture.reading: PACKAGE,
    architecture.environment_access: PACKAGE,
    architecture.aimless_ignores: {**PACKAGE, **TESTS, **SCRIPTS},
    architecture.undocumented_tests: TESTS,
}


WORLD = "parallelize/cluster/world.py"


def function(body: str, parameters: str = "") -> str:
    return f"def f({parameters}):\n" + "".join(f"    {line}\n" for line in body.splitlines())


# rule, sources that violate it, a part of the expected finding
BROKEN: list[tuple[Callable[[Sources], list[str]], Sources, str]] = [
    *(
        (architecture.upward_imports, {WORLD: source}, "not a lower floor")
        for source in (
            "from parallelize.config.config import Config",
            "import parallelize.config.config",
            "from parallelize import all_reduce",
            function("import parallelize.model"),
            "import_module('parallelize.model')",
        )
    ),
    (architecture.upward_imports, {"parallelize/backends/dp.py": "import parallelize.precision.apex"}, "not a lower"),
    (architecture.upward_imports, {"parallelize/model.py": "import parallelize.decorator"}, "not a lower floor"),
    (architecture.upward_imports, {WORLD: "from .errors import ConfigError"}, "relative"),
    (architecture.upward_imports, {"parallelize/extra.py": ""}, "extra is on no floor"),
    (
        architecture.plugin_imports,
        {
            "parallelize/backends/dp.py": "",
            "parallelize/backends/ddp2.py": "import parallelize.backends.dp",
        },
        "backends.ddp2 imports the plug-in backends.dp",
    ),
    (
        architecture.plugin_imports,
        {
            "parallelize/backends/balanced/__init__.py": "",
            "parallelize/backends/balanced/plan.py": "",
            "parallelize/backends/dp.py": "from parallelize.backends.balanced import plan",
        },
        "backends.dp imports the plug-in backends.balanced.plan",
    ),
    (
        architecture.cycles,
        {
            "parallelize/data/shard_loader.py": "import parallelize.data.sampling",
            "parallelize/data/sampling.py": "def f():\n    from parallelize.data.shard_loader import Loader",
        },
        "data.sampling -> data.shard_loader -> data.sampling",
    ),
    (
        architecture.files_at_top,
        {f"parallelize/{name}.py": "" for name in "abcdefghi"} | {"parallelize/data/j.py": ""},
        "9 files beside the folders, more than 8",
    ),
    (architecture.names_of_files, {"parallelize/data/__init__.py": "x = 1"}, "is not empty"),
    (architecture.names_of_files, {"parallelize/data/utils.py": ""}, "says nothing"),
    (architecture.sizes, {"parallelize/a.py": "x = 1\n" * 601}, "has 601 lines"),
    (architecture.rooms, {"parallelize/block/a.py": "x = 1\n" * 20_000}, "block: 60000 code tokens, more than"),
    (architecture.rooms, {"parallelize/attic/a.py": "x = 1"}, "attic: 3 code tokens, more than 0"),
    *(
        (architecture.changes_of_others, {"parallelize/a.py": source}, f"a.py changes {name}: ")
        for source, name in (
            ("import torch\ntorch.autograd.backward = f", "torch.autograd.backward"),
            ("from torch import Tensor as T\nmine: Any = T\nmine.backward = f", "torch.Tensor.backward"),
            ("import torch\nreplace_attribute(torch.Tensor, 'backward', f)", "torch.Tensor.backward"),
            ("import torch\nsetattr(torch.Tensor, name, f)", "torch.Tensor.<name>"),
            ("import torch as t\nf(t.use_deterministic_algorithms)", "torch.use_deterministic_algorithms"),
            ("class A(TorchFunctionMode): ...", "class A(TorchFunctionMode)"),
            ("import sys\na, sys.excepthook = f", "sys.excepthook"),
            ("import sys\nsys.modules['a'] = f", "sys.modules"),
            ("import sys\nsys.path.insert(0, 'a')", "sys.path"),
            ("import signal\nsignal.signal(number, f)", "signal.signal"),
            ("tensor.__class__ = A", "tensor.__class__"),
        )
    ),
    (architecture.changes_of_others, {}, "torch_patches/save.py does not change torch.save, as"),
    (architecture.sizes, {"parallelize/a.py": function('"""Doc."""\n# why\n' + "x = 1\n\n" * 46)}, "46 lines of code"),
    (architecture.sizes, {"parallelize/a.py": function("...", "self, a, b, c, d, e, f, *, g, h, i=1")}, "8 parameters"),
    (
        architecture.sizes,
        {"parallelize/a.py": function("if a:\n  for b in c:\n    with d:\n      while e: f")},
        "4 levels of nesting",
    ),
    (
        architecture.sizes,
        {"parallelize/a.py": function("try: a\nexcept b:\n  if c: d\n  elif e:\n    if f:\n      if g: h")},
        "4 levels of nesting",
    ),
    *(
        (architecture.channels, {"parallelize/a.py": source}, f"a.{name} is a channel, and not in CHANNELS")
        for name, source in (
            ("_seen", "_seen = {}"),
            ("_seen", "_seen: dict[str, int] = dict[str, int]()"),
            ("_numbers", "_numbers = itertools.count()"),
            ("_alive", "_alive: WeakSet[int] = weakref.WeakSet()"),
            ("_active", "_active: ContextVar[int] = ContextVar('a')"),
            ("_lock", "_lock = threading.Lock()"),
            ("state", "class State:\n    writes = 0\nstate = State()"),
            ("state", "class State:\n    def write(self): self.writes = 1\nstate = State()"),
            ("_count", "_count = 0\ndef f():\n    global _count"),
            ("_CACHE", "_CACHE = {}\ndef f(key): _CACHE[key] = 1"),
            ("_NAMES", "_NAMES = []\ndef f(name): _NAMES.append(name)"),
            ("Saves.jobs", "class Saves:\n    jobs: ClassVar[list[int]] = []"),
            ("Saves.job", "class Saves:\n    job = None\ndef f(): Saves.job = 1"),
            ("cls.job", "class Saves:\n    @classmethod\n    def f(cls): cls.job = 1"),
        )
    ),
    (architecture.channels, {"parallelize/run/surroundings.py": ""}, "run.surroundings is in a table of channels"),
    (architecture.reading, {"parallelize/data/a.py": "a = (1, 2, 3)\nb = 1 if a else 2"}, "tokens a line"),
    (architecture.reading, {"parallelize/data/a.py": "b = 1 if a else 2"}, "conditional expressions"),
    (architecture.reading, {"parallelize/data/a.py": "b = [c for c in a]"}, "comprehensions"),
    (architecture.reading, {"parallelize/data/a.py": "b = [c for d in a for c in d]"}, "nested comprehensions"),
    (architecture.reading, {"parallelize/data/a.py": "each = b"}, "pronouns"),
    (architecture.environment_access, {"parallelize/config/layout.py": "import os\nos.environ['A']"}, "layout uses"),
    (architecture.environment_access, {"parallelize/config/layout.py": "import os\nos.getenv('A')"}, "layout uses"),
    (architecture.environment_access, {"parallelize/config/layout.py": "from os import environ"}, "layout uses"),
    (
        architecture.environment_access,
        {"parallelize/run/context.py": ""},
        "run.context is in ENVIRONMENT",
    ),
    (architecture.aimless_ignores, {"parallelize/a.py": "x = 1  # noqa"}, "a.py:1"),
    (architecture.aimless_ignores, {"parallelize/a.py": "x = 1  # noqa: E501"}, "a.py:1"),
    (architecture.aimless_ignores, {"parallelize/a.py": "x = 1  # type: ignore  # because"}, "a.py:1"),
    (architecture.undocumented_tests, {"tests/test_a.py": "def test_b(): ..."}, "test_b"),
]

ALLOWED: list[tuple[Callable[[Sources], list[str]], Sources]] = [
    (architecture.upward_imports, {WORLD: "from parallelize.errors import ConfigError"}),
    (
        architecture.upward_imports,
        {"parallelize/config/config.py": "", "parallelize/config/layout.py": "from parallelize.config import config"},
    ),
    (architecture.upward_imports, {"parallelize/data/loader.py": "from parallelize.data.sampling import shard"}),
    (
        architecture.plugin_imports,
        {
            "parallelize/precision/native.py": "import parallelize.precision.levels",
            "parallelize/precision/levels.py": "",
        },
    ),
    (
        architecture.plugin_imports,
        {
            "parallelize/backends/balanced/engine.py": "import parallelize.backends.balanced.plan",
            "parallelize/backends/balanced/plan.py": "",
        },
    ),
    (
        architecture.cycles,
        {
            "parallelize/data/shard_loader.py": "import parallelize.data.sampling",
            "parallelize/data/sampling.py": "if TYPE_CHECKING:\n    from parallelize.data.shard_loader import Loader",
        },
    ),
    (architecture.rooms, {"parallelize/block/a.py": "# a comment\n'a string'\n" * 100}),
    (architecture.sizes, {"parallelize/a.py": function("if a: b\nelif c: d\nelif e: f\nelif g: h\nelse: i")}),
    (architecture.sizes, {"parallelize/a.py": function("...", "*, a=1, b=1, c=1, d=1, e=1, f=1, g=1, h=1")}),
    (architecture.aimless_ignores, {"parallelize/a.py": "x = 1  # type: ignore[arg-type]  # torch's stub is wrong"}),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds(rule: Callable[[Sources], list[str]]) -> None:
    """This repository does not violate the rule."""
    assert rule(RULES[rule]) == []


@pytest.mark.parametrize(("rule", "sources", "named"), BROKEN)
def test_the_rule_reports_violations(rule: Callable[[Sources], list[str]], sources: Sources, named: str) -> None:
    """Sources that violate the rule are reported."""
    assert any(named in found for found in rule(sources)), rule(sources)


@pytest.mark.parametrize(("rule", "sources"), ALLOWED)
def test_the_rule_accepts_the_rest(rule: Callable[[Sources], list[str]], sources: Sources) -> None:
    """Sources that only resemble a violation pass."""
    assert rule(sources) == []


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['a'] = 'b'", "self.a = 1", "import parallelize as p\np.a = 1"]
)
def test_what_is_no_change_of_others(source: str) -> None:
    """Variables of the environment have a rule of their own; attributes of the package's objects belong to it."""
    assert architecture.changes_of_others({"parallelize/a.py": source}, ()) == []


@pytest.mark.parametrize("change", [*changes.OF_TORCH, *changes.OF_PYTHON], ids=lambda change: change.what)
def test_a_change_has_a_test(change: changes.Change) -> None:
    """The file that makes a change, and the test that fails without it, exist; or the table says why there is none."""
    assert (architecture.ROOT / "parallelize" / change.where).exists()
    path, _, name = change.test.partition("::")
    if not path.startswith("none: "):
        assert f"def {name}(" in (architecture.ROOT / path).read_text()


def test_there_are_few_floors() -> None:
    """Imports of the package climb at most eleven floors, each room standing on one of them."""
    rooms = [room for floor in architecture.FLOORS for room in floor]
    assert len(architecture.FLOORS) <= architecture.MAX_FLOORS
    assert len(rooms) == len(set(rooms))


@pytest.mark.parametrize(
    "source",
    [
        "_log = logging.getLogger(__name__)\n_by_name = attrgetter('name')\n_NAMES = ['a']\nPath = str | None",
        "_RULES = {}\nfor name in 'ab':\n    _RULES[name] = 1",
        "class Folded:\n    def __exit__(self, *_): sys.excepthook = None\nfolded = Folded()",
        "class Base:\n    amp: ClassVar[Mapping[str, int]] = {}\n    @property\n    def f(self): self.g = []",
        "class A(TypedDict): ...\ndef f(module): module.B = 1",
    ],
)
def test_what_nothing_writes_to_is_no_channel(source: str) -> None:
    """Loggers, constants, objects without state and attributes of objects are not reported."""
    assert architecture.channels({"parallelize/a.py": source}) == architecture.channels({"parallelize/a.py": ""})


def test_there_are_few_channels() -> None:
    """State of the process is in at most six modules, and CONTRIBUTING says why."""
    assert len(architecture.CHANNELS) <= architecture.MAX_CHANNELS
    assert architecture.channel_table() in GUIDE.read_text(), architecture.channel_table()


def test_every_rule_has_a_violation() -> None:
    """Every rule has a test that it can fail."""
    assert {rule for rule, _, _ in BROKEN} == RULES.keys()


def test_the_package_names_what_it_imports() -> None:
    """parallelize/__init__.py only imports, also lazily, and its `__all__` is sorted and complete."""
    assert architecture.public_names(PACKAGE["parallelize/__init__.py"]) == []


CHECKED = "if TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (f"{CHECKED}from parallelize.a import b\n__all__ = ['b']", "b is not both imported from parallelize.a and"),
        (f"{CHECKED}from parallelize.a import b\n_NAMES_BY_MODULE = {{'c': 'b'}}", "b is not both imported"),
        ("_NAMES_BY_MODULE = {'a': 'b'}\n__all__ = []", "b is not both in _NAMES_BY_MODULE and in __all__"),
        ("__all__ = ['b']", "b is not both"),
        ("__all__ = ['c', 'b']", "not sorted"),
        ("import os\n__all__ = []", "line 1 is no import"),
        ("x = 1\n__all__ = []", "x is defined here"),
    ],
)
def test_a_wrong_package_file_is_reported(source: str, named: str) -> None:
    """A name that is missing, out of order or defined there is reported."""
    assert any(named in found for found in architecture.public_names(source))


INERT = """
import sys, threading
import psutil
{lines}
slow = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "sympy", "parallelize.cli", "tqdm.auto"]
assert not [each for each in slow if each in sys.modules], [each for each in slow if each in sys.modules]
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert not psutil.Process().children(), psutil.Process().children()
assert not {{"apex", "submitit"}} & sys.modules.keys()
"""


def test_importing_starts_nothing(run_script: Callable[..., object]) -> None:
    """No process, thread or optional package; sharded tensors and the compiler, which take long, wait for their use."""
    run_script(INERT.format(lines="from parallelize import *"))


SHOWN = """
import sys
from parallelize.cli.main import main
for option in ("--version", "--help"):
    try:
        main([option])
    except SystemExit as end:
        assert end.code == 0
assert not [each for each in ("torch", "numpy", "cloudpickle") if each in sys.modules]
"""


def test_the_command_line_shows_its_help_without_torch(run_script: Callable[..., object]) -> None:
    """`parallelize --version` and `parallelize --help` answer at once."""
    run_script(SHOWN)


@pytest.mark.parametrize(
    "lines",
    [
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "import subprocess; subprocess.Popen(['sleep', '1'])",
        "sys.modules['apex'] = sys",
    ],
)
def test_an_import_that_starts_something_is_reported(lines: str, run_script: Callable[..., object]) -> None:
    """The check above fails on a thread, a process and an optional package."""
    assert "AssertionError" in run_script(INERT.format(lines=lines), check=False).stderr
