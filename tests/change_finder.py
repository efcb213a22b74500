"""Finds what the package changes of torch, of Python and of other packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["changes_in"]

# Functions that change the whole process, or the thread, for longer than their call.
_FUNCTIONS = {
    "atexit.register",
    "faulthandler.dump_traceback_later",
    "faulthandler.enable",
    "gc.freeze",
    "multiprocessing.set_start_method",
    "os.register_at_fork",
    "signal.set_wakeup_fd",
    "signal.signal",
    "sys.setprofile",
    "sys.settrace",
    "torch.compiler.set_stance",
    "torch.nn.modules.module.register_module_buffer_registration_hook",
    "torch.nn.modules.module.register_module_forward_hook",
    "torch.nn.modules.module.register_module_forward_pre_hook",
    "torch.nn.modules.module.register_module_full_backward_hook",
    "torch.nn.modules.module.register_module_module_registration_hook",
    "torch.nn.modules.module.register_module_parameter_registration_hook",
    "torch.optim.optimizer.register_optimizer_step_post_hook",
    "torch.optim.optimizer.register_optimizer_step_pre_hook",
    "torch.set_default_device",
    "torch.set_default_dtype",
    "torch.set_float32_matmul_precision",
    "torch.set_num_threads",
    "torch.use_deterministic_algorithms",
    "warnings.filterwarnings",
    "warnings.resetwarnings",
}
# Methods that change a container, such as `sys.path`.
_METHODS = {"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}
_MODES = ("TorchDispatchMode", "TorchFunctionMode")
# Variables of the environment have a rule of their own.
_IGNORED = ("os.environ",)


def changes_in(tree: ast.Module, package: str) -> set[str]:
    """Return what a module changes of other packages, by the names that these have there.

    Args:
        tree: of the module.
        package: whose own names are no others'.
    """
    paths = _paths_of_names(tree, package)
    changes = {change for node in ast.walk(tree) for change in _changes_at(node, paths)}
    return {change for change in changes if not change.startswith(_IGNORED)}


def _changes_at(node: ast.AST, paths: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Call):
        yield from _changes_by_call(node, paths)
    elif isinstance(node, ast.ClassDef):
        for base in node.bases:
            if ast.unparse(base).endswith(_MODES):
                yield f"class {node.name}({ast.unparse(base)})"
    elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        path = _path_of(node, paths)
        if path in _FUNCTIONS:
            yield path
    elif isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from _changes_by_assignment(target, paths)


def _changes_by_call(node: ast.Call, paths: dict[str, str]) -> Iterator[str]:
    function = ast.unparse(node.func)
    if function == "replace_attribute":
        owner, name = node.args[:2]
        last = name.value if isinstance(name, ast.Constant) else f"<{ast.unparse(name)}>"
        yield f"{_path_of(owner, paths) or ast.unparse(owner)}.{last}"
    elif function == "setattr":
        owner = node.args[0]
        others = [path for part in ast.walk(owner) if (path := _path_of(part, paths)) is not None]
        if others:
            yield f"{ast.unparse(owner)}.<{ast.unparse(node.args[1])}>"
    elif isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        container = _path_of(node.func.value, paths)
        if container is not None and "." in container:
            yield container


def _changes_by_assignment(target: ast.expr, paths: dict[str, str]) -> Iterator[str]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _changes_by_assignment(element, paths)
    elif isinstance(target, ast.Attribute):
        path = _path_of(target, paths)
        if path is not None:
            yield path
        elif target.attr in {"__class__", "f_trace"}:
            yield ast.unparse(target)
    elif isinstance(target, ast.Subscript):
        path = _path_of(target.value, paths)
        if path is not None:
            yield path


def _paths_of_names(tree: ast.Module, package: str) -> dict[str, str]:
    """Return the names that a module imports from other packages, with their paths; and variables that are one."""
    paths = {name: path for name, path in _imports(tree) if path.partition(".")[0] != package}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        path = None if node.value is None else _path_of(node.value, paths)
        for target in targets:
            if isinstance(target, ast.Name) and path is not None:
                paths[target.id] = path
    return paths


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a module imports, with their paths."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (top, top) if alias.asname is None else (alias.asname, alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _path_of(node: ast.AST, paths: dict[str, str]) -> str | None:
    """Return the path of `name` or `name.attribute` if it begins with a name from another package."""
    if isinstance(node, ast.Name):
        return paths.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _path_of(node.value, paths)
        return None if owner is None else f"{owner}.{node.attr}"
    return None
