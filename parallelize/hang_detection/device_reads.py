"""Reads of a GPU: calls that hold the host until the GPU has computed what they return.

A collective on a GPU does not hold the host: it is work of a stream. The program goes on, and waits
at the next line that reads a number which the stream computes after the collective:

    host      loss.backward()  loss.item() ─────────────── returns when the stream is there
    stream    gradients, all_reduce ────────────────────── ends when all ranks have begun it

No frame of the stack shows this, because `item` is compiled code. The instruction of the innermost
frame does: a thread that has not moved for seconds is in the call of that instruction. Whether it
is held by a collective, the caller of this file has to know (see `main_thread`).
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
from types import FrameType

_READS = frozenset(
    {
        *("item", "tolist", "cpu", "numpy", "to", "copy_", "float", "int", "bool", "complex"),
        *("synchronize", "_cuda_synchronize", "_accelerator_synchronizeDevice"),
        *("is_nonzero", "nonzero", "masked_select", "equal"),
    }
)
"""Functions and methods of compiled code that return when the current stream has ended.

A function of Python with such a name has a frame of its own, which then is the innermost one.
"""


def read_at(frame: FrameType) -> str:
    """Return the read that an innermost frame makes: "item"; "": it makes none, or it is unknown.

    Args:
        frame: of another thread, which does not move.
    """
    code = frame.f_code
    operation = dis.opname[code.co_code[frame.f_lasti]]
    # A condition such as `if loss > 3:` has no call: the jump computes the truth value, or from
    # Python 3.13 on an instruction before it.
    is_conditional_jump = "JUMP" in operation and "IF_" in operation
    if is_conditional_jump or operation in ("TO_BOOL", "UNARY_NOT"):
        return "bool"
    # Python 3.11 may make the whole call in the instruction before CALL.
    if not operation.startswith(("CALL", "PRECALL")):
        return ""
    positions = itertools.islice(code.co_positions(), frame.f_lasti // 2, None)
    _line, end_line, _column, end_column = next(positions)
    source = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    name = _called_names(source).get((end_line, end_column), "")
    if name not in _READS:
        return ""
    # torch.cuda.synchronize() calls a function with a longer name.
    return "synchronize" if "synchronize" in name else name


@functools.lru_cache(maxsize=4)
def _called_names(source: str) -> dict[tuple[int | None, int | None], str]:
    """Return the functions that a program calls, by the line and column where the call ends.

    No two calls end at the same place. They may begin there: `x.sum().item()`.
    """
    names: dict[tuple[int | None, int | None], str] = {}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        # The file has changed since it was imported.
        return names
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ""
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
        elif isinstance(node.func, ast.Name):
            name = node.func.id
        names[node.end_lineno, node.end_col_offset] = name
    return names
