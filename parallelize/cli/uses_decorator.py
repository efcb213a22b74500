"""Whether a script starts processes itself, told from its source: nothing of it is run for that."""

from __future__ import annotations

import ast

__all__ = ["starts_itself"]

_PACKAGE = "parallelize"
_NAME = "distributed"


def starts_itself(source: str | bytes) -> bool:
    """Whether a script uses `distributed` itself, under whatever name; what its imports do is not looked at.

    One that is no Python counts too: the interpreter, to which it is then given, says best what is wrong with it.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return True
    names, packages = _bound(tree)
    return any(_is_use(node, names, packages) for node in ast.walk(tree))


def _bound(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The names by which the script knows the decorator, and the package."""
    names, packages = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in (_PACKAGE, f"{_PACKAGE}.decorator") and not node.level:
            names |= {alias.asname or _NAME for alias in node.names if alias.name in (_NAME, "*")}
        elif isinstance(node, ast.Import):
            packages |= {alias.asname or _PACKAGE for alias in node.names if alias.name == _PACKAGE}
    return names, packages


def _is_use(node: ast.AST, names: set[str], packages: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names and isinstance(node.ctx, ast.Load)
    if not isinstance(node, ast.Attribute) or node.attr != _NAME:
        return False
    return isinstance(node.value, ast.Name) and node.value.id in packages
