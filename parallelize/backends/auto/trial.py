"""Measurement of a model on its first batch: bytes, seconds, and what messages and an optimizer's step take.

One forward counts what autograd saves, and drops it, so that it needs little more than the parameters. Then forward and
backward are timed, if they fit. Buffers, attributes and generators are restored, and no gradient changes.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from parallelize.backends.auto.choice import SIZES, USABLE, Facts
from parallelize.backends.measuring import free_bytes, run_backward, shortest
from parallelize.backends.model_state import ModelState
from parallelize.cluster.world import World
from parallelize.errors import ConfigError
from parallelize.plugins.base import Backend, Inner
from parallelize.plugins.registry import find
from parallelize.run.containers import leaves, map_leaves
from parallelize.run.live_optimizers import live_optimizers
from parallelize.torch_patches.module_tensors import all_buffers, all_parameters
from parallelize.torch_patches.step import parameters_of

__all__ = ["facts_of", "rates_of", "tried"]

_log = logging.getLogger(__name__)
_STATES = {"SGD": 0, "Muon": 0, "Adagrad": 1, "RMSprop": 1}
"""Optimizer of torch -> tensors of a parameter's size in its state, beside those of an option; others have 2."""
_OPTIONS = ("momentum", "amsgrad", "centered")
"""Options of optimizers that add a tensor to the state."""
_reference: Any = StorageWeakRef  # equal for one storage, also after it is freed


def facts_of(
    model: nn.Module, world: World, devices: Sequence[torch.device], memory: int | None, restore: int
) -> Facts:
    """Return what is known of a model before its first batch.

    Args:
        model: the user's model.
        world: ranks and sizes.
        devices: of this process.
        memory: usable bytes of the device; None: what is free.
        restore: whether the block ends with full parameters.
    """
    tensors: list[Any] = [*all_parameters(model), *all_buffers(model)]
    device = devices[0]
    trained = [each for each in tensors if each.requires_grad]
    present, optimizers = [*tensors, *(each.grad for each in trained)], live_optimizers(trained)
    state = 0.0 if optimizers else 2 * _bytes(trained)
    for each in optimizers:
        kept, count = leaves(each.state), _STATES.get(type(each).__name__, 2)
        count += sum(bool(each.defaults.get(name)) for name in _OPTIONS)
        state += _bytes(kept) or count * _bytes(parameters_of(each))
        present += kept
    units = find("backends", "fsdp")().units(model) if world.world_size > 1 else []
    sizes = [_bytes(all_parameters(each)) for each in units]
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
        "largest stage": (_bytes(tensors) + _bytes(trained) + state) / len(devices),
        **dict.fromkeys(("s of forward and backward", "s of dp", "s of balanced"), math.inf),
    }


def _bytes(values: Any, device: torch.device | None = None) -> int:
    """Return the bytes of the tensors among some values; of those on a device."""
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    return sum(each.numel() * each.element_size() for each in tensors if device in {None, each.device})


def rates_of(world: World, device: torch.device, in_node: int) -> Facts:
    """Return the seconds of an addition to a byte, and of collectives with messages of two sizes.

    Args:
        world: ranks and nodes.
        device: of this process.
        in_node: number of processes on each node, whose collectives are timed, too; 1: they are not.
    """
    found, most, n = Facts(), SIZES[-1], world.world_size
    sums = torch.ones(2, most // 4, device=device)
    found["s of updating a byte"] = shortest(functools.partial(sums[0].add_, sums[1]), device) / most
    node = dist.new_subgroups(in_node)[0] if 1 < in_node < n else None  # type: ignore[no-untyped-call]  # torch's
    for over, group, count in [("", None, n), (" in a node", node, in_node)][: (n > 1) + (node is not None)]:
        for size in SIZES:
            whole = torch.ones(count, size // 4 // count, device=device)
            gather = functools.partial(dist.all_gather, [*whole], whole[0].clone(), group=group)
            reduce = functools.partial(dist.all_reduce, whole, group=group)
            found[f"s of all_gather{over} of {size} bytes"] = shortest(gather, device)
            found[f"s of all_reduce{over} of {size} bytes"] = shortest(reduce, device)
    if node is not None:
        dist.destroy_process_group(node)
    return found


def tried(
    facts: Facts, inner: Inner, inputs: Any, places: Mapping[str, Any], engines: Mapping[str, Backend]
) -> tuple[Facts, Any]:
    """Return facts with the bytes that the first batch saves, and the seconds of its forward and backward; and a plan.

    Where backward does not fit on the first device, it is taken to last as long as two forwards.

    Args:
        facts: what is known.
        inner: holds the model.
        inputs: arguments of its forward.
        places: other arguments of `Backend.engine`.
        engines: name -> a backend that drives all devices of this process, which is timed, too; the last one's engine
            has a plan of stages.
    """
    devices, model, plan = places["devices"], inner.model, None
    state = ModelState(model, devices)

    def forward(call: Callable[..., Any] = inner) -> Any:
        state.restore()
        args, kwargs = map_leaves(_copy, inputs)
        return call(*args, **kwargs)

    try:
        with state.watching():
            found = facts | _saved(model, forward, min(2, places["world"].world_size))
        held = found["parameters"] + found["optimizer state"]
        seconds = None
        if held + found["in backward"] <= found["memory"] * USABLE:
            seconds = _seconds_if_it_fits(lambda: run_backward(model, forward()), devices)
            if seconds is None:
                # The prediction is too low: backward needs at least what there is, and the engines are chosen by that.
                found["in backward"] = found["memory"] - held
        if seconds is None:
            # Forward alone drops what it saves, which might not fit either.
            seconds = 3 * shortest(lambda: _saved(model, forward, 0), *devices)
        found["s of forward and backward"] = seconds
        for name, backend in engines.items():
            engine: Any = backend.engine(inner, **places)
            try:
                run_backward(model, forward(engine.module))  # of all ranks
                run = functools.partial(lambda call: run_backward(model, forward(call)), engine.local)
                found[f"s of {name}"], plan = shortest(run, *devices), getattr(engine, "plan", None)
            except (torch.OutOfMemoryError, ConfigError) as error:
                _log.info("%s does not run: %s", backend.name, str(error).splitlines()[0])
            finally:
                engine.close(failed=True)  # without collectives
        if plan is not None:
            found["largest stage"] = max(plan.memory_bytes, default=math.inf)  # none: it does not split the model
    finally:
        state.restore()
        _free_cached(devices)
    return found, plan


def _seconds_if_it_fits(run: Callable[[], object], devices: Sequence[torch.device]) -> float | None:
    """Return the shortest duration of a run; None: a device has too little memory for it."""
    try:
        return shortest(run, *devices)
    except torch.OutOfMemoryError as error:
        _log.info("forward and backward do not fit on a device: %s", str(error).splitlines()[0])
    # The error is gone, and with it the frames that kept what the run had allocated.
    _free_cached(devices)
    return None


def _free_cached(devices: Sequence[torch.device]) -> None:
    """Give the memory of trials back to the devices: what is chosen needs blocks of other sizes."""
    gc.collect()
    if devices[0].type != "cpu":
        torch.accelerator.empty_cache()


def _copy(value: Any) -> Any:
    """Return a copy of a tensor without its graph, which forward may change."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _saved(model: nn.Module, forward: Callable[[], object], copies: int) -> Facts:
    """Run a forward; return the bytes that it saves, and the most in backward, with so many copies of gradients.

    Backward frees what is saved in reverse order, while it computes the gradients of the parameters that it meets.
    """
    gradients = {
        _reference(each.untyped_storage()): _bytes([each]) * each.requires_grad for each in all_parameters(model)
    }
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
    kept = sum(sizes) + _bytes(outputs) + max([*sizes, _bytes(outputs)])
    computed, held = 0, [kept]
    for size, key in reversed(saved):
        computed += gradients.pop(key, 0)
        held.append(kept + copies * computed)
        kept -= size
    held.append(kept + copies * (computed + sum(gradients.values())))  # those that forward has not saved, as of tables
    return {"saved for backward": held[0], "in backward": max(held)}
