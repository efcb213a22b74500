"""Steps on full parameters, for optimizers that compute with whole matrices or with one vector of all parameters.

Muon, Shampoo and Adafactor multiply, factor or reduce a whole gradient, and LBFGS joins all of them. Such a step gets
full copies of its parameters, gradients and state, with which every rank computes what one process would, and keeps its
shard of the results. Between steps only shards are held.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.backends.sharded_tensors import convert_state_entry, full_tensor, shard
from parallelize.runtime.containers import map_leaves
from parallelize.runtime.gradients import change_closure, gradient_version, parameters_of
from parallelize.runtime.live_optimizers import live_optimizers

__all__ = ["FullSteps"]

_TORCH_OPTIMIZERS = {"LBFGS", "Muon", "Adafactor"}
# Names in the code of optimizers that compute with whole tensors: products, factorizations, orders, shapes, copies.
_WHOLE_TENSOR_NAMES = """
T addbmm addmm addmv argsort baddbmm bmm cat cholesky diag dot einsum eye flatten flip ger inverse kron kthvalue linalg
mT matmul matrix_exp matrix_power median mm mv numpy outer parameters_to_vector permute pinverse qr quantile ravel
reshape roll sort svd svd_lowrank symeig t tensordot tolist topk transpose transpose_ unsqueeze vdot
vector_to_parameters view view_as
"""


class FullSteps:
    """Runs the steps of some optimizers on full copies of sharded parameters.

    Args:
        shard_ids: ids of the shards.
    """

    def __init__(self, shard_ids: Mapping[int, Any]) -> None:
        self._shard_ids = frozenset(shard_ids)
        self._hooks: dict[int, list[Any]] = {}
        self._holders: dict[int, list[Any]] = {}
        self._running: dict[int, _FullStep] = {}

    def add(self, optimizer: Any) -> None:
        """Run the steps of an optimizer on full copies if its code needs whole tensors."""
        kind: Any = type(optimizer)
        if id(optimizer) in self._hooks or not _needs_full_tensors(kind):
            return
        # Hooks of one optimizer run after all global ones before a step, and before them after the step.
        self._hooks[id(optimizer)] = [
            optimizer,
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    def end_interrupted(self) -> None:
        """End the steps that an exception has left, unless the caller is the closure of a running step."""
        for key, step in list(self._running.items()):
            if not step.is_in_closure:
                step.end()
                del self._running[key]

    def close(self) -> None:
        """Remove all hooks."""
        self.end_interrupted()
        for _, *handles in self._hooks.values():
            for handle in handles:
                handle.remove()

    def _begin(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running = self._running.get(id(optimizer))
        if args[0] is not optimizer:  # a skipped step runs on a copy without parameters
            return None
        if running is not None:  # the step of a base class, called by the optimizer's own step
            running.depth += 1
            return None
        if id(optimizer) not in self._holders:
            self._holders[id(optimizer)] = live_optimizers(parameters_of(optimizer), also=[optimizer])
        step = self._running[id(optimizer)] = _FullStep(self._holders[id(optimizer)], self._shard_ids)
        return change_closure(step.closure_on_shards, args, kwargs)

    def _end(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        step = self._running.get(id(optimizer))
        if step is not None:
            step.depth -= 1
            if step.depth == 0:
                del self._running[id(optimizer)]
                step.end()


class _FullStep:
    """One step of an optimizer on full copies of its sharded parameters, which begins with the construction.

    Args:
        optimizers: the optimizer, and those that hold its parameters, too, such as one that it wraps.
        shard_ids: ids of all shards of the model.
    """

    def __init__(self, optimizers: Sequence[Any], shard_ids: frozenset[int]) -> None:
        self._optimizers = optimizers
        self.is_in_closure = False
        self.depth = 1
        held = {id(one): one for each in optimizers for one in parameters_of(each) if id(one) in shard_ids}
        self._copies: list[tuple[Any, nn.Parameter]] = [
            (each, nn.Parameter(_full(each), requires_grad=each.requires_grad)) for each in held.values()
        ]
        self._versions: dict[int, tuple[int, int]] = {}
        self._gather()
        for optimizer, (sharded, copied) in itertools.product(optimizers, self._copies):
            if sharded in optimizer.state:
                optimizer.state[copied] = map_leaves(_full, optimizer.state.pop(sharded))

    def end(self) -> None:
        """Keep this rank's shards of the full parameters, gradients and state."""
        self._scatter()
        for optimizer, (sharded, copied) in itertools.product(self._optimizers, self._copies):
            if copied in optimizer.state:
                convert = functools.partial(convert_state_entry, parameter=sharded, like=sharded)
                optimizer.state[sharded] = map_leaves(convert, optimizer.state.pop(copied))

    def closure_on_shards(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure that runs forward and backward on the shards, inside the step."""

        @functools.wraps(closure)
        def on_shards(*args: Any, **kwargs: Any) -> Any:
            self._scatter()
            self.is_in_closure = True
            try:
                value = closure(*args, **kwargs)
            finally:
                self.is_in_closure = False
            self._gather()
            return value

        return on_shards

    def _scatter(self) -> None:
        """Let the optimizer hold the shards again, with the values and gradients of the full copies."""
        self._replace({id(copied): sharded for sharded, copied in self._copies})
        for sharded, copied in self._copies:
            with torch.no_grad():
                sharded.copy_(shard(copied, like=sharded))
            if copied.grad is None:
                sharded.grad = None
            elif self._versions.get(id(copied)) != gradient_version(copied.grad):
                sharded.grad = shard(copied.grad, like=sharded)

    def _gather(self) -> None:
        """Let the optimizer hold the full copies, with full gradients."""
        self._replace({id(sharded): copied for sharded, copied in self._copies})
        for sharded, copied in self._copies:
            copied.grad = None if sharded.grad is None else _full(sharded.grad)
            if copied.grad is not None:
                self._versions[id(copied)] = gradient_version(copied.grad)

    def _replace(self, replacements: Mapping[int, Any]) -> None:
        for group in itertools.chain.from_iterable(each.param_groups for each in self._optimizers):
            group["params"][:] = [replacements.get(id(each), each) for each in group["params"]]


def _full(value: Any) -> Any:
    """Gather a DTensor on its own device; return other values unchanged."""
    return full_tensor(value).to(value.device) if hasattr(value, "full_tensor") else value


@functools.cache
def _needs_full_tensors(kind: type) -> bool:
    """Return whether the code of an optimizer's class does more than element-wise arithmetic and norms."""
    for base in kind.__mro__[:-1]:
        if base.__module__.partition(".")[0] == "torch":
            return base.__name__ in _TORCH_OPTIMIZERS
        if any(map(_uses_whole_tensors, _codes(base))):
            return True
    return False


def _uses_whole_tensors(code: types.CodeType) -> bool:
    if not set(_WHOLE_TENSOR_NAMES.split()).isdisjoint(code.co_names):
        return True
    return any(each.argrepr in ("@", "@=") for each in dis.get_instructions(code))


def _codes(kind: type) -> Iterator[types.CodeType]:
    """Yield the code of a class, and of the functions and classes outside of torch that its code names."""
    waiting: list[Any] = [kind]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        # Hooks of optimizers, torch.no_grad and torch.compile wrap functions.
        each = inspect.unwrap(getattr(each, "__func__", each), stop=lambda one: isinstance(one, type))
        if id(each) in seen or (getattr(each, "__module__", None) or "").partition(".")[0] == "torch":
            continue
        seen.add(id(each))
        if isinstance(each, type):
            waiting += [one for one in vars(each).values() if callable(one) or hasattr(one, "__func__")]
        elif isinstance(each, types.FunctionType):
            codes = [each.__code__]
            for code in codes:
                codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
                waiting += _named_by(code, each)
            yield from codes


def _named_by(code: types.CodeType, function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function's code names: globals, variables of enclosing functions, and attributes of modules."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in (*code.co_names, *code.co_freevars):
        found = cells[name].cell_contents if name in cells else function.__globals__.get(name)
        if isinstance(found, types.ModuleType):
            if found.__name__.partition(".")[0] != "torch":
                yield from (vars(found)[one] for one in code.co_names if one in vars(found))
        elif callable(found):
            yield found
