"""Operations of torch in a context, which its user sees or changes before they run.

    torch.add(a, b)             before_operations: Python functions, with the user's own tensors
    └── aten::add.Tensor        before_writes: what autograd and autocast have made of them

Both are torch's own modes. They belong to the thread, and slow each operation down: only what needs
one is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of an operation."""


class _BeforeOperations(TorchFunctionMode):
    def __init__(self, change: Callable[[Any, tuple[Any, ...], dict[str, Any]], Arguments]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self._change(func, args, kwargs or {})
        return func(*args, **kwargs)


class _BeforeWrites(TorchDispatchMode):
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
    """Return a context in which functions of torch get other arguments.

    Args:
        change: gets (function, args, kwargs), and returns the arguments of the call.
    """
    return _BeforeOperations(change)


def before_writes(see: Callable[[Arguments], None]) -> TorchDispatchMode:
    """Return a context that shows the arguments of operations which may write to one of them.

    This sees writes through views and `.data`, which raise no version counter of the tensor itself.

    Args:
        see: is called before the operation runs.
    """
    return _BeforeWrites(see)
