"""Architecture rules: each is a function from sources to the list of violations."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from change_finder import changes_in
from changes import OF_PYTHON, OF_TORCH, Change

from parallelize.plugins.registry import BUILTIN

__all__ = [
    "CHANNELS",
    "ENVIRONMENT",
    "FLOORS",
    "MAX_CHANNELS",
    "MAX_FLOORS",
    "PACKAGE",
    "READING",
    "ROOMS",
    "ROOT",
    "Sources",
    "aimless_ignores",
    "changes_of_others",
    "channel_table",
    "channels",
    "code_tokens",
    "cycles",
    "environment_access",
    "files_at_top",
    "names_of_files",
    "plugin_imports",
    "public_names",
    "read",
    "reading",
    "room_of",
    "rooms",
    "sizes",
    "undocumented_tests",
    "upward_imports",
]

PACKAGE = "parallelize"
ROOT = Path(__file__).parents[1]

# Path below the root, with "/" -> text.
Sources = Mapping[str, str]

# From the ground up: a room (a folder, or a file beside the folders) imports only from rooms on lower floors. "" is
# parallelize/__init__.py. Each floor says why it lies above the one before.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "version"}),  # import nothing of the package
    frozenset({"cluster"}),  # facts about the machine and its code; raises errors
    # lines of the user, whose code `cluster` tells; the contracts, which name World and Node; changes of torch
    frozenset({"hang_detection", "plugins", "torch_patches"}),
    frozenset({"config"}),  # parses values into plug-ins, and lays them over the devices of a node
    frozenset({"call", "run"}),  # carry a Layout: to another process, or as this process's contextvar
    frozenset({"gradients"}),  # of the backward passes in a run
    frozenset({"agreement"}),  # compares what the ranks of a run do, and how their gradients were averaged
    frozenset({"backends", "collectives", "precision"}),  # run inside a run
    frozenset({"block", "data", "worker"}),  # use collectives, or engines
    frozenset({"checkpoint", "comparison", "launchers"}),  # save or record what a block routes; start workers
    frozenset({"decorator", "model"}),  # the doors
    frozenset({"", "cli"}),  # what users import or type
    frozenset({"__main__"}),
)
MAX_FLOORS = 13
MAX_FILES_AT_TOP = 8

# The plug-ins of these folders, each a file or a folder, never import each other. Other files are shared by several.
PLUGIN_FOLDERS = frozenset({"backends", "launchers", "precision"})

# The only modules that may use os.environ, each with its reason. All others take a mapping as an argument.
ENVIRONMENT: Mapping[str, str] = {
    "call.tracebacks": "a variable of the process in which an exception is shown; exceptions pass no mapping on",
    "cli.main": "public entry point: passes the variables to its commands as a mapping",
    "decorator": "public entry point: passes the variables to config and world as a mapping",
    "launchers.batch_launcher": "a node of a call, on another machine: passes its variables on",
    "launchers.ssh": "its agents are started by ssh, which sets variables, and get the key of the call",
    "launchers.slurm.step": "a separate program that srun starts: passes its variables on",
    "model": "public entry point: passes the variables to config and world as a mapping",
    "run.context": "entry point of rank(), device(), ...: passes the variables on; sets that of cuBLAS",
    "run.rendezvous": "gloo reads its network interface from a variable when a group is created",
    "run.run_key": "PARALLELIZE_KEY of ranks that others have started; calls outside of a run pass no mapping on",
    "worker.main": "a variable of the caller says whether pdb stops at errors",
    "worker.process_setup": "sets the variables of its own process at its start",
    "worker.preemption": "should_stop is a public entry point; a variable passes the path of the stop file to workers",
}

MAX_FILE_LINES = 600  # of a file that is one noun
MAX_FUNCTION_LINES = 45
MAX_PARAMETERS = 7
MAX_NESTING = 3

# Code tokens that each room may have, "" for the files beside the folders: what the latest rewrite of the room has
# reached. Whoever needs more names the mechanism that leaves; a feature raises a row by what it was planned to cost.
ROOMS: Mapping[str, int] = {
    "": 6_241,
    "agreement": 14_149,
    "backends": 11_671,
    "backends/auto": 3_387,
    "backends/balanced": 13_456,
    "backends/fsdp": 18_295,
    "block": 6_193,
    "call": 18_332,
    "checkpoint": 18_328,
    "cli": 5_342,
    "cluster": 6_235,
    "comparison": 1_838,
    "config": 6_543,
    "data": 21_663,
    "gradients": 10_869,
    "hang_detection": 12_249,
    "launchers": 26_908,
    "plugins": 3_336,
    "precision": 8_045,
    "run": 10_685,
    "torch_patches": 7_326,
    "worker": 7_958,
}

# Figures that each room stays within: code tokens a line; of a thousand code tokens: comprehensions, those in others or
# with two loops, conditional expressions; of a hundred names: those that name nothing.
READING: Mapping[str, float] = {
    "tokens a line": 5.0,
    "comprehensions": 4.0,
    "nested comprehensions": 0.1,
    "conditional expressions": 2.3,
    "pronouns": 0.5,
}
_PRONOUNS = {
    *("each", "found", "own", "kind", "one", "known", "other", "others", "them", "it", "what", "told", "given", "look"),
    *("thing", "things", "left", "mine", "ours", "its", "both"),
}

# Modules that hold a channel: objects of modules and classes that are written to while the program runs, so that state
# flows between rooms unseen. What is of a run, a block or an engine is a field of it, or is passed. These few belong to
# the process: each with its reason.
CHANNELS: Mapping[str, str] = {
    "hang_detection.waiting": "the threads: the watchdog's thread reads what the main thread waits for",
    "launchers.local.calling_process": "a program that makes calls: its fork servers, and the times of its files, "
    "outlive each call",
    "run.surroundings": "the code that runs now: functions of users get no run as an argument. What a program keeps "
    "beyond its runs is a field of it",
    "torch_patches.backward": "`torch.autograd.backward`, of which a process has one: who runs around it",
    "torch_patches.forward": "the models that are in a block: code that gets a model alone finds its block",
    "torch_patches.step": "torch's hooks on the steps of all optimizers, of which a process has one list: "
    "who runs in it",
}
MAX_CHANNELS = 6
_CODE_TOKENS = frozenset({tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING})

_FORBIDDEN_FILES = frozenset({"common", "helpers", "misc", "util", "utils"})
_COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


_parse = functools.cache(ast.parse)  # by the text: most rules read the same files


def read(folder: str) -> Sources:
    """Every Python file below `folder` of this repository."""
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}


def _modules(sources: Sources) -> dict[str, ast.Module]:
    """Name inside the package ("", "config", "backends.ddp", "data" for a folder's __init__) -> its tree."""
    trees = {}
    for path, text in sources.items():
        parts = path.removesuffix(".py").split("/")[1:]
        trees[".".join(part for part in parts if part != "__init__")] = _parse(text)
    return trees


def _imported(tree: ast.Module, known: Mapping[str, object]) -> Iterator[str]:
    """Modules of the package that a file imports anywhere: in functions, by a literal name; not for TYPE_CHECKING."""
    checked = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    ignored = {node for block in checked for node in ast.walk(block)}
    for node in ast.walk(tree):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            each = [f"{base}.{alias.name}" for alias in node.names]
            full = [name if name[len(PACKAGE) + 1 :] in known else base for name in each]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            full = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        else:
            continue
        for name in full:
            if name.startswith("."):
                yield name
            if name == PACKAGE or name.startswith(f"{PACKAGE}."):
                yield name[len(PACKAGE) + 1 :]


def _edges(sources: Sources) -> dict[str, set[str]]:
    modules = _modules(sources)
    return {name: set(_imported(tree, modules)) for name, tree in modules.items()}


def _unit(module: str) -> str:
    return module.split(".", 1)[0]


def upward_imports(sources: Sources) -> list[str]:
    """Imports of a room that is not on a lower floor; files of one folder may import each other."""
    floor = {unit: number for number, units in enumerate(FLOORS) for unit in units}
    found = [f"{name or '__init__'} is on no floor" for name in _edges(sources) if _unit(name) not in floor]
    for name, targets in _edges(sources).items():
        for target in sorted(targets):
            if target.startswith("."):
                found.append(f"{name} imports {target}: relative")
            elif _unit(target) not in floor or _unit(name) not in floor:
                found.append(f"{name} imports {target}: one of them is on no floor")
            elif not (floor[_unit(target)] < floor[_unit(name)] or (_unit(target) == _unit(name) and "." in name)):
                found.append(f"{name} imports {target}: not a lower floor")
    return found


def plugin_imports(sources: Sources) -> list[str]:
    """Imports of a plug-in by another file of its folder; a plug-in may be a folder of files that do so."""
    plugins = {f"{kind}.{value.partition(':')[0]}" for kind, values in BUILTIN.items() for value in values.values()}
    return [
        f"{name} imports the plug-in {target}"
        for name, targets in _edges(sources).items()
        for target in sorted(targets)
        if _unit(name) in PLUGIN_FOLDERS
        and _unit(target) == _unit(name)
        and _plugin(target) != _plugin(name)
        and _plugin(target) in {_plugin(each) for each in plugins}
    ]


def _plugin(module: str) -> str:
    # backends.balanced.schedule belongs to backends.balanced
    return ".".join(module.split(".")[:2])


def _assigned(tree: ast.Module) -> set[str]:
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def cycles(sources: Sources) -> list[str]:
    """Import cycles, lazy imports included, each once."""
    edges, found, done = _edges(sources), [], set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append(" -> ".join(each or "__init__" for each in (*path[path.index(name) :], name)))
        elif name not in done:
            for target in sorted(edges.get(name, ())):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())
    return found


def files_at_top(sources: Sources) -> list[str]:
    """Too many files beside the package's folders."""
    beside = [path for path in sources if path.count("/") == 1]
    found = f"{PACKAGE} has {len(beside)} files beside the folders, more than {MAX_FILES_AT_TOP}"
    return [found] if len(beside) > MAX_FILES_AT_TOP else []


def names_of_files(sources: Sources) -> list[str]:
    """Non-empty __init__ files of folders, and files with a name that says nothing."""
    found = [
        f"{path} is not empty"
        for path, text in sources.items()
        if path.endswith("/__init__.py") and path != f"{PACKAGE}/__init__.py" and text.strip()
    ]
    return found + [f"{path} has a name that says nothing" for path in sources if Path(path).stem in _FORBIDDEN_FILES]


def sizes(sources: Sources) -> list[str]:
    """Files and functions that are too long, have too many parameters, or nest too deeply."""
    found = []
    for path, text in sources.items():
        lines = text.splitlines()
        if len(lines) > MAX_FILE_LINES:
            found.append(f"{path} has {len(lines)} lines, more than {MAX_FILE_LINES}")
        for node in ast.walk(_parse(text)):
            if isinstance(node, _FUNCTIONS):
                measures = (
                    ("lines of code", _code_lines(node, lines), MAX_FUNCTION_LINES),
                    ("parameters", _parameters(node), MAX_PARAMETERS),
                    ("levels of nesting", _nesting(node.body), MAX_NESTING),
                )
                found += [
                    f"{path}: {node.name} has {n} {what}, more than {most}" for what, n, most in measures if n > most
                ]
    return found


def room_of(path: str) -> str:
    """Return the room of a file: its folder in the package; a folder of the back ends is a room of its own."""
    parts = path.split("/")[1:-1]
    if len(parts) > 1 and parts[0] == "backends":
        return "/".join(parts[:2])
    return parts[0] if parts else ""


def code_tokens(text: str) -> int:
    """Return the number of names, operators, numbers and strings: neither long lines nor short files change it."""
    found = depth = 0
    for each in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[each.type]
        depth -= name == "FSTRING_END"  # from Python 3.12 on, an f-string is several tokens
        found += not depth and (each.type in _CODE_TOKENS or name == "FSTRING_END")
        depth += name == "FSTRING_START"
    return found


def rooms(sources: Sources, most: Mapping[str, int] = ROOMS) -> list[str]:
    """Rooms that have more code tokens than they may, or that are not in the table."""
    found: dict[str, int] = dict.fromkeys(most, 0)
    for path, text in sources.items():
        found[room_of(path)] = found.get(room_of(path), 0) + code_tokens(text)
    return [
        f"{room or 'beside the folders'}: {size} code tokens, more than {most.get(room, 0)}"
        for room, size in found.items()
        if size > most.get(room, 0)
    ]


def reading(sources: Sources) -> list[str]:
    """Figures of rooms that are above READING, with what they are."""
    faults = []
    for room in sorted({room_of(path) for path in sources}):
        texts = [text for path, text in sources.items() if room_of(path) == room]
        tokens = max(sum(map(code_tokens, texts)), 1)
        lines = sum(len(text.splitlines()) for text in texts)
        counts = dict.fromkeys(READING, 0)
        names = 0
        for node in (node for text in texts for node in ast.walk(_parse(text))):
            counts["conditional expressions"] += isinstance(node, ast.IfExp)
            if isinstance(node, _COMPREHENSIONS):
                inner = [each for each in ast.walk(node) if each is not node and isinstance(each, _COMPREHENSIONS)]
                counts["comprehensions"] += 1
                counts["nested comprehensions"] += bool(inner) or len(node.generators) > 1
            if isinstance(node, (ast.Name, ast.arg)):
                names += 1
                counts["pronouns"] += (node.id if isinstance(node, ast.Name) else node.arg) in _PRONOUNS
        figures = {name: 1000 * count / tokens for name, count in counts.items()}
        figures["tokens a line"] = tokens / max(lines, 1)
        figures["pronouns"] = 100 * counts["pronouns"] / max(names, 1)
        for name, limit in READING.items():
            if figures[name] > limit:
                faults.append(f"{room}: {figures[name]:.2f} {name}, more than {limit}")
    return faults


def changes_of_others(sources: Sources, listed: Sequence[Change] = (*OF_TORCH, *OF_PYTHON)) -> list[str]:
    """Changes of torch, Python or another package that are not in tests/changes.py, and those there that are gone."""
    known = {(f"{PACKAGE}/{change.where}", name) for change in listed for name in change.names}
    made = {(path, name) for path, text in sources.items() for name in changes_in(_parse(text), PACKAGE)}
    # `setattr` on any object is how it changes them.
    made.discard((f"{PACKAGE}/torch_patches/private.py", "owner.<name>"))
    faults = [f"{path} changes {name}: see tests/changes.py" for path, name in sorted(made - known)]
    return faults + [f"{path} does not change {name}, as tests/changes.py says" for path, name in sorted(known - made)]


def channels(sources: Sources, allowed: Mapping[str, str] = CHANNELS) -> list[str]:
    """Objects of modules and classes that are written to, beside those of `allowed`; modules of it that have none.

    A constant has an upper-case name, and nothing writes to it.
    """
    trees = _modules(sources)
    classes = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    listed = allowed.keys()
    faults, holding = [], set()
    for module, tree in trees.items():
        names = {*_objects_of_module(tree), *_written_constants(tree), *_written_classes(tree, classes)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                names.update(node.names)
        if names:
            holding.add(module)
        if module not in listed:
            faults += [f"{module}.{name} is a channel, and not in CHANNELS" for name in sorted(names)]
    return faults + [f"{module} is in a table of channels, and has none" for module in sorted(listed - holding)]


# What may be bound to a lower-case name of a module: nothing can be written to it.
_IMMUTABLE = {"attrgetter", "getLogger", "itemgetter", "methodcaller", "partial", "NewType", "ParamSpec", "TypeVar"}
_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MAKERS = {"Counter", "ExitStack", "OrderedDict", "count", "defaultdict", "deque", "dict", "list", "local", "set"}
_READ_ONLY = ("Mapping", "Sequence", "frozenset", "tuple")
_WRITING_METHODS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault"}
_WRITING_METHODS |= {"update", "__setitem__"}


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield the name, value and annotation of each assignment in the body of a module or class."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value, ""
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value, ast.unparse(node.annotation)


def _last_name(node: ast.expr) -> str:
    """Return the name after the last dot: of `weakref.WeakSet[Route]`, WeakSet."""
    base = node.value if isinstance(node, ast.Subscript) else node
    return ast.unparse(base).rpartition(".")[2]


def _objects_of_module(tree: ast.Module) -> Iterator[str]:
    """Yield names of containers and other objects that a module makes, and of lists that its classes share."""
    stateless = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not _has_state(node)}
    for name, value, _ in _bindings(tree.body):
        makes = isinstance(value, ast.Call) and _last_name(value.func) not in _IMMUTABLE | stateless
        if not name.isupper() and not name.startswith("__") and (makes or isinstance(value, _DISPLAYS)):
            yield name
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)):
        for name, value, annotation in _bindings(node.body):
            kind = annotation.removeprefix("ClassVar[")
            makes = isinstance(value, ast.Call) and _last_name(value.func) in _MAKERS
            is_empty = isinstance(value, _DISPLAYS) and not getattr(value, "elts", getattr(value, "keys", ()))
            if (makes or is_empty) and not kind.startswith(_READ_ONLY):
                yield f"{node.name}.{name}"


def _has_state(node: ast.ClassDef) -> bool:
    """Whether objects of a class may have attributes of their own."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            return True
    return bool(list(_bindings(node.body)) or node.decorator_list)


def _written_constants(tree: ast.Module) -> Iterator[str]:
    """Yield upper-case names of a module that its functions write to."""
    constants = {name for name, _, _ in _bindings(tree.body) if name.isupper()}
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    for node in (each for function in functions for each in ast.walk(function)):
        written: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            written = node.func.value if node.func.attr in _WRITING_METHODS else None
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            written = node.value
        if isinstance(written, ast.Name) and written.id in constants:
            yield written.id


def _written_classes(tree: ast.Module, classes: set[str]) -> Iterator[str]:
    """Yield attributes that are assigned to classes of the package, and not to their objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            owner = node.value.id
            if owner in classes or owner == "cls":
                yield f"{owner}.{node.attr}"


def channel_table() -> str:
    """Return the table of channels that CONTRIBUTING has."""
    rows = [f"| `{name}` | {reason} |" for name, reason in sorted(CHANNELS.items())]
    return "\n".join(["| module | its channel belongs to |", "|---|---|", *rows])


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not body:
        return 0
    text = (line.strip() for line in lines[body[0].lineno - 1 : node.end_lineno])
    return sum(1 for line in text if line and not line.startswith("#"))


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters, without self, cls and keyword-only ones that have a default."""
    positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    return len([name for name in positional if name not in ("self", "cls")]) + node.args.kw_defaults.count(None)


def _nesting(body: list[ast.stmt]) -> int:
    return max((_depth(statement) for statement in body), default=0)


def _depth(statement: ast.stmt) -> int:
    if not isinstance(statement, _COMPOUND):  # a function in a function is measured on its own
        return 0
    blocks = [getattr(statement, name, []) for name in ("body", "finalbody")]
    blocks += [each.body for each in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))]
    otherwise = getattr(statement, "orelse", [])
    is_elif = isinstance(statement, ast.If) and len(otherwise) == 1 and isinstance(otherwise[0], ast.If)
    deeper = 1 + max(_nesting(block) for block in (*blocks, [] if is_elif else otherwise))
    return max(deeper, _nesting(otherwise)) if is_elif else deeper


def _exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def _order(name: str) -> tuple[int, str]:
    """Sort key: constants, classes, functions, as in ruff's RUF022."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


_TABLE = "_NAMES_BY_MODULE"


def public_names(source: str) -> list[str]:
    """Faults of parallelize/__init__.py: imports for type checkers, a sorted __all__, and the modules of its names."""
    tree = _parse(source)
    listed, found = _exported(tree), []
    blocks = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    imports = [n for block in blocks for n in block.body if isinstance(n, ast.ImportFrom)]
    imported = {(alias.name, f"{n.module}") for n in imports for alias in n.names}
    tables = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == _TABLE]
    modules = ast.literal_eval(tables[0]) if tables else {}
    lazy = {(name, f"{PACKAGE}.{module}") for module, names in modules.items() for name in names.split()}
    allowed = (ast.ImportFrom, ast.Assign, ast.Expr, ast.If)
    hooks = ("__getattr__", "__dir__")
    others = [n for n in tree.body if not isinstance(n, allowed) and getattr(n, "name", "") not in hooks]
    found += [f"line {node.lineno} is no import" for node in others]
    found += [f"{name} is defined here" for name in sorted(_assigned(tree) - {"__all__", _TABLE})]
    if listed is None or listed != sorted(listed, key=_order):
        found.append("__all__ is missing or not sorted")
    found += [f"{name} is not both imported from {module} and in {_TABLE}" for name, module in sorted(imported ^ lazy)]
    public = {name for name, _ in lazy} | {"__version__"}
    return found + [f"{name} is not both in {_TABLE} and in __all__" for name in sorted(public ^ set(listed or ()))]


def environment_access(sources: Sources, allowed: Mapping[str, str] = ENVIRONMENT) -> list[str]:
    """Modules that use this process's environment but are not in `allowed`, and modules in `allowed` that do not."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    touching = set()
    for module, tree in _modules(sources).items():
        for node in ast.walk(tree):
            attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
            imported = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
            if attribute or imported:
                touching.add(module)
    found = [f"{module} uses the environment" for module in sorted(touching - allowed.keys())]
    idle = sorted(allowed.keys() - touching)
    return found + [f"{module} is in ENVIRONMENT and does not use it" for module in idle]


def aimless_ignores(sources: Sources) -> list[str]:
    """Comments that silence a checker without naming the rule and the reason (after # or -)."""
    rule = r"noqa:\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*|(?:type|pyright):\s*ignore\[[\w, -]+\]"
    silenced = re.compile(r"#\s*(?:noqa|(?:type|pyright):\s*ignore)\b")
    reasoned = re.compile(rf"#\s*(?:{rule})\s+[#-]\s*\S")
    return [
        f"{path}:{token.start[0]} {token.string}"
        for path, text in sources.items()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and silenced.search(token.string) and not reasoned.search(token.string)
    ]


def undocumented_tests(sources: Sources) -> list[str]:
    """Tests whose docstring is missing or longer than its one sentence."""
    return [
        f"{path}: {node.name}"
        for path, text in sources.items()
        if Path(path).name.startswith("test_")
        for node in ast.walk(_parse(text))
        if isinstance(node, _FUNCTIONS) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
