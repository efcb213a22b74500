"""Detection of `@distributed` in the source of a script, without running it."""

from __future__ import annotations

import ast

__all__ = ["uses_decorator"]

_PACKAGE = "parallelize"
_DECORATOR = "distributed"


def uses_decorator(source: str | bytes) -> bool:
    """Return whether a script uses `distributed` under any name; imported modules are not inspected.

    Return True also if the source does not parse: the interpreter then runs the script and reports the error.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return True
    decorator_names, package_names = _imported_names(tree)
    return any(_is_use(node, decorator_names, package_names) for node in ast.walk(tree))


def _imported_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names under which the script imports the decorator, and the package."""
    decorator_names, package_names = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in (_PACKAGE, f"{_PACKAGE}.decorator") and not node.level:
            decorator_names |= {alias.asname or _DECORATOR for alias in node.names if alias.name in (_DECORATOR, "*")}
        elif isinstance(node, ast.Import):
            package_names |= {alias.asname or _PACKAGE for alias in node.names if alias.name == _PACKAGE}
    return decorator_names, package_names


def _is_use(node: ast.AST, decorator_names: set[str], package_names: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in decorator_names and isinstance(node.ctx, ast.Load)
    if not isinstance(node, ast.Attribute) or node.attr != _DECORATOR:
        return False
    return isinstance(node.value, ast.Name) and node.value.id in package_names
