"""Measurement of a model on its first batch: bytes, seconds, and what the messages between the ranks take.

One forward counts what autograd saves, and drops it, so that it needs little more than the parameters. Then forward and
backward are timed, if they fit. Buffers, attributes and generators are restored, and no gradient changes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from parallelize.backends.auto.choice import SIZES, Facts
from parallelize.backends.measuring import free_bytes, run_backward, seconds_of, shortest
from parallelize.backends.model_state import ModelState
from parallelize.cluster.world import World
from parallelize.plugins.base import Inner
from parallelize.plugins.registry import find
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.live_optimizers import live_optimizers
from parallelize.torch_patches.step import parameters_of

__all__ = ["facts_of", "links_of", "tried"]

_STATES = {"SGD": 0, "Muon": 0, "Adagrad": 1, "RMSprop": 1}
"""Optimizer of torch -> tensors of a parameter's size in its state, beside those of an option; others have 2."""
_OPTIONS = ("momentum", "amsgrad", "centered")
"""Options of optimizers that add a tensor to the state."""
_reference: Any = StorageWeakRef  # equal for one storage, also after it is freed


def facts_of(model: nn.Module, world: World, device: torch.device, memory: int | None, restore: int) -> Facts:
    """Return what is known of a model before its first batch.

    Args:
        model: the user's model.
        world: ranks and sizes.
        device: of this process.
        memory: usable bytes of the device; None: what is free.
        restore: whether the block ends with full parameters.
    """
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    trained = [each for each in tensors if each.requires_grad]
    present, optimizers = [*tensors, *(each.grad for each in trained)], live_optimizers(trained)
    state = 0.0 if optimizers else 2 * _bytes(trained)
    for each in optimizers:
        kept, count = leaves(each.state), _STATES.get(type(each).__name__, 2)
        count += sum(bool(each.defaults.get(name)) for name in _OPTIONS)
        state += _bytes(kept) or count * _bytes(parameters_of(each))
        present += kept
    units = find("backends", "fsdp")().units(model) if world.world_size > 1 else []
    sizes = [_bytes(each.parameters()) for each in units]
    outside = _bytes(tensors) - sum(sizes)
    free = free_bytes(device, world.local_world_size) + _bytes(present, device)
    return {
        "memory": min(free, memory or free),
        "parameters": _bytes(tensors),
        "gradients": _bytes(trained),
        "optimizer state": state,
        "units": 1 + len(sizes),
        "largest unit": max(sizes, default=0),
        "outside of units": outside,
        "restored at the end": restore * _bytes(tensors, device),
        "is on accelerator": device.type != "cpu",
        # Until they are measured:
        "saved for backward": 0,
        "in backward": math.inf,
        "s of forward and backward": math.inf,
    }


def _bytes(values: Any, device: torch.device | None = None) -> int:
    """Return the bytes of the tensors among some values; of those on a device."""
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    return sum(each.numel() * each.element_size() for each in tensors if device in {None, each.device})


def links_of(world: World, device: torch.device) -> Facts:
    """Return the seconds of the collectives of all ranks, with messages of two sizes."""
    found, n = Facts(), world.world_size
    for size in SIZES if n > 1 else ():
        whole = torch.ones(n, size // 4 // n, device=device)
        gather = functools.partial(dist.all_gather, [*whole], whole[0].clone())
        found[f"s of all_gather of {size} bytes"] = shortest(gather, device)
        found[f"s of all_reduce of {size} bytes"] = shortest(functools.partial(dist.all_reduce, whole), device)
    return found


def tried(facts: Facts, inner: Inner, inputs: Any, world: World, device: torch.device) -> Facts:
    """Return facts with the bytes that the first batch saves, and the seconds of its forward and backward.

    Where backward does not fit, it is taken to last as long as two forwards.
    """
    model, state, runs = inner.model, ModelState(inner.model, [device]), list[float]()

    def forward() -> Any:
        args, kwargs = map_leaves(_copy, inputs)
        return inner(*args, **kwargs)

    try:
        with state.watching():
            found = facts | _saved(model, forward, min(2, world.world_size))
        # Forward alone drops what it saves, which might not fit either.
        fits = found["parameters"] + found["optimizer state"] + found["in backward"] < found["memory"]
        for _ in range(4):
            state.restore()
            run = (lambda: run_backward(model, forward())) if fits else lambda: _saved(model, forward, 0)
            runs.append(seconds_of(run, [device]))
    finally:
        state.restore()
    return found | {"s of forward and backward": min(runs[1:]) * (1 if fits else 3)}


def _copy(value: Any) -> Any:
    """Return a copy of a tensor without its graph, which forward may change."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _saved(model: nn.Module, forward: Callable[[], object], copies: int) -> Facts:
    """Run a forward; return the bytes that it saves, and the most in backward, with so many copies of gradients.

    Backward frees what is saved in reverse order, while it computes the gradients of the parameters that it meets.
    """
    gradients = {_reference(each.untyped_storage()): _bytes([each]) * each.requires_grad for each in model.parameters()}
    seen, saved = {*gradients}, list[tuple[int, Any]]()

    def drop(tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            key = _reference(storage)
            saved.append((storage.nbytes() * (key not in seen), key))
            seen.add(key)

    with torch.autograd.graph.saved_tensors_hooks(drop, lambda each: each):
        outputs = leaves(forward())
    # The loss saves as much as the outputs; the gradient of an activation is as large as it.
    sizes = [size for size, _ in saved]
    kept = sum(sizes) + _bytes(outputs) + max(sizes, default=0)
    computed, held = 0, [kept]
    for size, key in reversed(saved):
        computed += gradients.pop(key, 0)
        held.append(kept + copies * computed)
        kept -= size
    held.append(kept + copies * (computed + sum(gradients.values())))  # those that forward has not saved, as of tables
    return {"saved for backward": held[0], "in backward": max(held)}
