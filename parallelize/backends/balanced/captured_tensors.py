"""Captured tensors: what a forward computes and leaves outside of its output: on the model, in a list, by a hook.

Micro-batches would leave the tensors of one of them there. A function mode holds a weak reference to each tensor that
the forward computes; after the output is gone, those that are still alive were captured.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from parallelize.runtime.containers import leaves

__all__ = ["CapturedTensors"]

_Tensor: Any = torch.Tensor
_GETTERS = (_Tensor.grad.__get__, _Tensor._base.__get__)


class CapturedTensors(TorchFunctionMode):
    """Function mode of one forward; `names` then tells which modules computed tensors that are still alive.

    Saved tensors are copied, so that autograd does not keep them alive.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = []
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._cleanup = contextlib.ExitStack()

    @override
    def __enter__(self) -> Any:
        saved = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
        before = register_module_forward_pre_hook(lambda module, _: self._running.append(self._name(module)))
        after = register_module_forward_hook(self._after, always_call=True)
        self._cleanup.enter_context(saved)
        self._cleanup.callback(before.remove)
        self._cleanup.callback(after.remove)
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    @override
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        self._cleanup.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record its results."""
        del types
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling() and func not in _GETTERS:
            self._record(result, (args, kwargs), self._running[-1] if self._running else "the model")
        return result

    def names(self) -> list[str]:
        """Return where tensors that are still alive were computed; call it when the output is gone."""
        if any(ref() is not None for ref, _ in self._found.values()):
            gc.collect()  # of reference cycles
        return list(dict.fromkeys(name for ref, name in self._found.values() if ref() is not None))

    def _name(self, module: nn.Module) -> str:
        return self._names.get(id(module)) or "the model"

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._running.pop()
            self._record(output, args, self._name(module))  # also that of a compiled module, or an autograd function

    def _record(self, result: Any, operands: Any, name: str) -> None:
        given = {id(each) for each in _tensors(operands)}  # an operation in place returns one of them
        for each in _tensors(result):
            known = self._found.get(id(each))
            if id(each) not in given and (known is None or known[0]() is not each):
                self._found[id(each)] = weakref.ref(each), name


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return [each for each in leaves(value) if isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter)]
