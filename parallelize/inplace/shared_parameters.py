"""Parameters that several models of a block share: averaged at the end of each backward pass, not by the engines."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.errors import ConfigError
from parallelize.inplace.gradient_average import Average, Window
from parallelize.inplace.gradient_origins import UNDER_NO_SYNC, record
from parallelize.runtime.context import Runtime
from parallelize.runtime.gradients import at_end_of_backward, has_sparse_gradient

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
    pending: set[str] = set()

    def on_gradient(name: str, parameter: torch.Tensor) -> None:
        if any(each.is_no_sync for each in windows):
            record(parameter, UNDER_NO_SYNC)
            return
        if not pending:
            at_end_of_backward(average)
        pending.add(name)

    def average() -> None:
        for name, each in shared.items():  # in the same order on every rank
            if name in pending and each.grad is not None:
                gradient = each.grad.detach().div_(dist.get_world_size())
                dist.all_reduce(gradient)
                record(each, None)
        pending.clear()

    with contextlib.ExitStack() as stack:
        each: Any
        for name, each in shared.items():
            is_trained, each.requires_grad = each.requires_grad, True  # hooks of frozen parameters are refused
            hook = functools.partial(on_gradient, name)
            stack.enter_context(each.register_post_accumulate_grad_hook(hook))
            each.requires_grad = is_trained
        yield
