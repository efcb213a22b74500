"""Contexts that call a function before each operation of torch.

    torch.add(a, b)             before_operations sees calls from Python, with the user's tensors
    └── aten::add.Tensor        before_writes sees what runs after autograd and autocast, such as
                                the operations of a backward pass

Both contexts are modes of torch. A mode belongs to the thread that enters it, and slows down each
operation in it: enter it around as little code as possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of an operation."""


class _BeforeOperations(TorchFunctionMode):
    """The mode of `before_operations`; torch calls it in place of each function."""

    def __init__(self, change: Callable[[Any, tuple[Any, ...], dict[str, Any]], Arguments]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self._change(func, args, kwargs or {})
        return func(*args, **kwargs)


class _BeforeWrites(TorchDispatchMode):
    """The mode of `before_writes`; torch calls it in place of each operation."""

    def __init__(self, see: Callable[[Arguments], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            self._see((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def before_operations(
    change: Callable[[Any, tuple[Any, ...], dict[str, Any]], Arguments],
) -> TorchFunctionMode:
    """Return a context in which functions of torch are called with changed arguments.

    The balanced backend moves operands to one device by this.

    Args:
        change: gets (function, args, kwargs), and returns the (args, kwargs) of the call.
    """
    return _BeforeOperations(change)


def before_writes(see: Callable[[Arguments], None]) -> TorchDispatchMode:
    """Return a context that calls `see` before each operation that writes to an argument.

    With this, the balanced backend copies a tensor before a trial forward changes it. The context
    sees writes through views and `.data`, too, which do not raise the version of the tensor.

    Args:
        see: gets the (args, kwargs) of the operation.
    """
    return _BeforeWrites(see)
