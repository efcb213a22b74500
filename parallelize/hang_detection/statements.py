"""The statements of the user's program around the line where a rank is, for reports of hangs.

They are read from the source, when a rank waits for long. A report says only what stands there:
that a call is under `if is_main():`, or that a line is in a loop which another rank has left.

    with parallel_model(model):             Statement(BLOCK, "train.py:11", ...)
        for x, y in loader:                 Statement(LOOP, "train.py:14", exits=["break:17"])
            loss.backward()
            if loss.item() < 0.1:
                break
        if is_main():                       Statement(RANK_TEST, "train.py:18", "`if is_main()`")
            save("a.pt", model=model)
"""

from __future__ import annotations

import ast
import enum
import functools
import linecache
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from parallelize.cluster.code_owner import is_user_frame
from parallelize.hang_detection.stack_frames import Stack

_NAMES_OF_RANK = frozenset(
    {
        *("rank", "get_rank", "local_rank", "global_rank", "RANK"),
        *("is_main", "is_main_process"),
    }
)
"""What programs call a rank, or the question for rank 0."""

_LONGEST_TEST = 60
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BLOCKS = (ast.With, ast.AsyncWith)
_EXITS = (ast.Break, ast.Continue, ast.Return, ast.ExceptHandler)
_PARTS = (ast.stmt, ast.excepthandler, ast.match_case)


class StatementKind(enum.StrEnum):
    """What a statement is to a report."""

    BLOCK = "block"
    """A `with`."""

    LOOP = "loop"
    """A `for` or `while`."""

    RANK_TEST = "rank test"
    """An `if` whose test has the name of a rank."""


class Statement(NamedTuple):
    """A statement around a line.

    Args:
        statement_kind: what it is to a report.
        line: where it begins: "train.py:18".
        text: of a RANK_TEST, the branch that the line is in, as a report names it.
        exits: of a LOOP, what may end it, or one of its steps, on one rank alone, with its line:
            "break:17". An "except" may be in the loop or around it.
    """

    statement_kind: StatementKind
    line: str
    text: str = ""
    exits: Sequence[str] = ()


def statements_around(stack: Stack) -> list[Statement]:
    """Return the statements around the lines of the user's program in a stack, outermost first.

    Frames of other code are left out: nobody could change their tests and loops.
    """
    statements: list[Statement] = []
    for frame, line in reversed(stack):
        if is_user_frame(frame):
            statements += _statements_in_frame(frame, line)
    return statements


def rank_test_here() -> Statement | None:
    """Return the innermost test of the rank around the lines of the caller; None: there is none."""
    stack = list(traceback.walk_stack(sys._getframe(1)))
    for statement in reversed(statements_around(stack)):
        if statement.statement_kind is StatementKind.RANK_TEST:
            return statement
    return None


def _statements_in_frame(frame: FrameType, line: int) -> Iterator[Statement]:
    """Yield the statements around a line of the function of a frame, outermost first."""
    path = frame.f_code.co_filename
    tree = _parsed("".join(linecache.getlines(path, frame.f_globals)))
    handlers: list[str] = []
    for node, branch in _nodes_around(tree, line):
        place = f"{Path(path).name}:{node.lineno}"
        if isinstance(node, _BLOCKS) and branch == "body":
            yield Statement(StatementKind.BLOCK, place)
        elif isinstance(node, _LOOPS) and branch != "orelse":
            # The first line of a loop belongs to it: the loop comes back there for its next item.
            yield Statement(StatementKind.LOOP, place, exits=[*_exits_in(node), *handlers])
        elif isinstance(node, ast.Try) and branch == "body":
            handlers += [f"except:{handler.lineno}" for handler in node.handlers]
        elif isinstance(node, ast.If) and branch and _names_rank(node.test):
            yield Statement(StatementKind.RANK_TEST, place, _text_of_branch(node.test, branch))


def _text_of_branch(test: ast.expr, branch: str) -> str:
    """Return what a report calls a branch of an `if`: "the `else` of `if is_main()`"."""
    shortened = textwrap.shorten(ast.unparse(test), _LONGEST_TEST, placeholder=" ...")
    text = f"`if {shortened}`"
    if branch == "orelse":
        return f"the `else` of {text}"
    return text


def _exits_in(loop: ast.stmt) -> list[str]:
    """Return what may end a loop, or one of its steps, with its line, in the order of lines.

    A `break` of a loop inside counts, since the ranks then make other numbers of steps. A `return`
    of a function that is defined in the loop ends that function alone, such as the closure of an
    optimizer: without this, a report would advise to change it.
    """
    line_and_name: list[tuple[int, str]] = []
    if isinstance(loop, ast.While):
        line_and_name.append((loop.lineno, "while"))
    unread: list[ast.AST] = [loop]
    while unread:
        node = unread.pop()
        if isinstance(node, _EXITS):
            name = type(node).__name__.lower()
            line_and_name.append((node.lineno, name.replace("excepthandler", "except")))
        if not isinstance(node, _FUNCTIONS):
            unread += ast.iter_child_nodes(node)
    return [f"{name}:{line}" for line, name in sorted(line_and_name)]


@functools.lru_cache(maxsize=16)
def _parsed(source: str) -> ast.AST:
    """Return the tree of a file; an empty one if the file has changed, and is no program now."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _nodes_around(tree: ast.AST, line: int) -> list[tuple[ast.stmt, str]]:
    """Return the statements of one function that a line of a program is in, outermost first.

    Args:
        tree: the whole program.
        line: number of the line.

    Returns:
        Each statement with the name of its part in which the line is, "body" or "orelse"; "": the
        line is its first one, or in its test.
    """
    around: list[tuple[ast.stmt, str]] = []
    parent: ast.AST | None = tree
    while parent is not None:
        branch, child = _part_with(parent, line)
        if isinstance(parent, _FUNCTIONS):
            # What is around a function was left when the function was called.
            around.clear()
        elif isinstance(parent, ast.stmt):
            around.append((parent, branch))
        parent = child
    return around


def _part_with(parent: ast.AST, line: int) -> tuple[str, ast.AST | None]:
    """Return the part of a statement in which a line is, and the statement of that part.

    Returns:
        ("", None): the line is in no statement of it, as in its first line.
    """
    for branch, parts in ast.iter_fields(parent):
        if not isinstance(parts, list):
            continue
        for part in parts:
            if isinstance(part, _PARTS) and _is_in(part, line):
                return branch, part
    return "", None


def _is_in(part: ast.stmt | ast.excepthandler | ast.match_case, line: int) -> bool:
    """Whether a line is in a part of a program; the lines of its decorators are in a function."""
    # A `case` has no line of its own.
    if isinstance(part, ast.match_case):
        return any(_is_in(statement, line) for statement in part.body)
    first = part.lineno
    if isinstance(part, _FUNCTIONS):
        first = min([first, *(decorator.lineno for decorator in part.decorator_list)])
    return first <= line <= (part.end_lineno or first)


def _names_rank(test: ast.expr) -> bool:
    """Whether a test has the name of a rank, as a variable, function, attribute or method."""
    for node in ast.walk(test):
        name = ""
        if isinstance(node, ast.Name):
            name = node.id
        elif isinstance(node, ast.Attribute):
            name = node.attr
        if name in _NAMES_OF_RANK:
            return True
    return False
