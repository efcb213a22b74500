"""Gradient hooks of the user's, which are to see true gradients while scaled ones pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from parallelize.precision.loss_scale import LossScale
from parallelize.precision.replace_attribute import replaced

__all__ = ["TrueGradients"]

Hook = Callable[[torch.Tensor], torch.Tensor | None]


class TrueGradients:
    """Stands around hooks on tensors: a hook that clips at 1 clips at 1, whatever the loss scale.

    Such hooks are how recurrent nets clip inside backward, and how gradients are looked at. Under a hand-written
    GradScaler they see scaled gradients, and clip at 1 / scale.

    Hooks on modules and on nodes of the graph, those that run after a gradient was accumulated, and custom autograd
    functions see scaled gradients here too.

    Args:
        scale: the loss scale.
    """

    def __init__(self, scale: LossScale) -> None:
        self._scale = scale
        self._is_scaled = False

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Scaled gradients pass while this lasts."""
        self._is_scaled = True
        try:
            yield
        finally:
            self._is_scaled = False

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Stand around every hook that is registered while this lasts."""
        original: Any = torch.Tensor.register_hook

        def register_hook(tensor: torch.Tensor, hook: Hook) -> Any:
            return original(tensor, self._around(hook))

        with replaced(torch.Tensor, "register_hook", register_hook):
            yield

    def adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Stand around the hooks that parameters have already."""
        for hooks in _hooks_of(parameters):
            hooks.update({key: self._around(hook) for key, hook in hooks.items()})

    def release(self, parameters: Iterable[torch.Tensor]) -> None:
        """Step aside: every hook of the parameters is the user's own again."""
        for hooks in _hooks_of(parameters):
            own = {key: hook.hook for key, hook in hooks.items() if isinstance(hook, _Around) and hook.of is self}
            hooks.update(own)

    def _around(self, hook: Hook) -> Hook:
        return hook if isinstance(hook, _Around) or _is_of_torch(hook) else _Around(hook, of=self)

    def show(self, hook: Hook, gradient: torch.Tensor) -> torch.Tensor | None:
        """Call a hook with the true gradient; what it returns goes on scaled."""
        if not self._is_scaled:
            return hook(gradient)
        scale, inverse = self._scale.on(gradient.device)
        # In fp32: what is large enough for fp16 while scaled may be too small without.
        result = hook(gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * inverse)
        return None if result is None else (result * scale).to(gradient.dtype)


class _Around:
    """A hook of the user's, with us around it."""

    def __init__(self, hook: Hook, *, of: TrueGradients) -> None:
        self.hook = hook
        self.of = of

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return self.of.show(self.hook, gradient)


def _hooks_of(parameters: Iterable[torch.Tensor]) -> Iterator[dict[int, Any]]:
    for parameter in parameters:
        hooks: dict[int, Any] | None = getattr(parameter, "_backward_hooks", None)
        if hooks:
            yield hooks


def _is_of_torch(hook: Any) -> bool:
    """An engine's own hook, which only waits for its moment: fully_shard has them on what a forward returns."""
    module = getattr(getattr(hook, "__func__", hook), "__module__", None) or ""
    return module.startswith("torch.")
