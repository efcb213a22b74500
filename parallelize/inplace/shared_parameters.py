"""Parameters that several models of a block share: averaged at the end of each backward pass, not by the engines."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parallelize.errors import ConfigError, SyncError
from parallelize.inplace.gradient_average import Average, Window
from parallelize.inplace.model_consistency import require_equal
from parallelize.runtime.context import Runtime
from parallelize.runtime.gradients import at_end_of_backward, has_sparse_gradient, parameters_of

__all__ = ["averaged", "find_shared_parameters", "without_gradients"]


def find_shared_parameters(models: Sequence[nn.Module], *, run: Runtime, average: Average) -> dict[str, nn.Parameter]:
    """Return the parameters that several of the models have: name in the first model -> parameter.

    Raises:
        ConfigError: the options do not support them.
    """
    owners: dict[nn.Parameter, list[str]] = {}
    for model in models:
        for name, each in model.named_parameters():
            owners.setdefault(each, []).append(f"{name} of {type(model).__name__}")
    shared = {names[0]: each for each, names in owners.items() if len(names) > 1}
    sparse = {each.weight for model in models for each in model.modules() if has_sparse_gradient(each)}
    config = run.config
    for name, each in shared.items():
        reasons = {
            f"backend={config.backend.name!r}": (config.backend.shards_gradients or config.backend.places_model)
            and "each model places its own parameters",
            f"amp_engine={config.amp_engine!r}": config.amp is not None
            and (config.amp_engine != "native" or config.amp.level in {"O2", "O3"})
            and "each model casts its own weights",
            f"average={average!r}": average == "tokens" and "each model weights its own gradients",
            "nn.Embedding(sparse=True)": each in sparse and "sparse gradients are averaged for one model only",
        }
        for option, why in reasons.items():
            if why:
                raise ConfigError(
                    f"{name}, which another model of the block shares, with {option}",
                    why=why,
                    fix="put the models into one nn.Module, pass that module, and name its methods in methods=[...]",
                )
    return shared


@contextlib.contextmanager
def without_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Freeze parameters in the context: an engine that is built there leaves their gradients alone."""
    trained = [each for each in parameters if each.requires_grad]
    for each in trained:
        each.requires_grad = False
    try:
        yield
    finally:
        for each in trained:
            each.requires_grad = True


@contextlib.contextmanager
def averaged(shared: dict[str, nn.Parameter], windows: Sequence[Window]) -> Iterator[None]:
    """Average the gradients of shared parameters over the ranks in the context.

    Two engines would both wait for such a gradient, of which any backward pass may be the last: a GAN's critic trains
    between the forward and the backward of its generator. Here each backward pass that accumulates a gradient averages
    it at its end. The part from earlier passes is equal on all ranks already, and stays as it is.

    Args:
        shared: name -> parameter.
        windows: of the block's models; under `no_sync` of one of them, nothing is averaged.
    """
    averaging = _Averaging(shared, windows)
    with contextlib.ExitStack() as stack:
        each: Any
        for name, each in shared.items():
            is_trained, each.requires_grad = each.requires_grad, True  # hooks of frozen parameters are refused
            hook = functools.partial(averaging.on_gradient, name)
            stack.callback(each.register_post_accumulate_grad_hook(hook).remove)
            each.requires_grad = is_trained
        if shared:
            stack.callback(register_optimizer_step_pre_hook(averaging.before_step).remove)
            stack.callback(register_optimizer_step_post_hook(averaging.after_step).remove)
        yield


class _Averaging:
    def __init__(self, shared: dict[str, nn.Parameter], windows: Sequence[Window]) -> None:
        self._shared = shared
        self._windows = windows
        self._pending: set[str] = set()
        self._local: set[str] = set()
        self._averaged_since_step: set[str] = set()

    def on_gradient(self, name: str, _: torch.Tensor) -> None:
        """Average the gradient at the end of the running backward pass."""
        if any(each.is_no_sync for each in self._windows):
            self._local.add(name)
            return
        if not self._pending:
            at_end_of_backward(self._average)
        self._pending.add(name)

    def _average(self) -> None:
        for name, each in self._shared.items():  # in the same order on every rank
            if name in self._pending and each.grad is not None:
                gradient = each.grad.detach().div_(dist.get_world_size())
                dist.all_reduce(gradient)
        self._local -= self._pending
        self._averaged_since_step |= self._pending
        self._pending = set()

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a step on a gradient that is not averaged; compare one that no backward pass has computed."""
        has_closure = callable(kwargs.get("closure", args[1] if len(args) > 1 else None))
        held = set(map(id, parameters_of(optimizer)))
        for name, each in self._shared.items():
            if each.grad is None:
                self._local.discard(name)
            if id(each) not in held or each.grad is None:
                continue
            if name in self._local and each.grad.count_nonzero():
                raise SyncError(
                    f"the gradient of {name}, which another model shares, is not averaged over the ranks",
                    why="it was accumulated under no_sync, and no backward outside of no_sync has averaged it since",
                    fix="run forward and backward of the last micro-batch outside of no_sync of both models",
                )
            if name not in self._averaged_since_step and not has_closure:
                hint = "(no backward in this block computed it: average it with parallelize.all_reduce)"
                require_equal({"its gradient": each.grad}, model_name=name, when=hint)

    def after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Record which gradients are used: another step on them compares them again."""
        held = set(map(id, parameters_of(optimizer)))
        self._averaged_since_step -= {name for name, each in self._shared.items() if id(each) in held}
