"""Backward of micro-batches: in threads, for stages on the CPU, where autograd would run one graph in one thread.

    parameters ──> _Backward ──> outputs of micro-batch 0, 1, 2, ... ──> joined outputs ──> loss
                       │
                       └ its backward computes, in a thread for each micro-batch, the gradients of the leaves of the
                         micro-batch's own graph; autograd gets their sum, so that each parameter gets one gradient

With create_graph=True, the gradients are computed in one thread, with a graph. Only gradients of leaves and of inputs
of the model are computed, not those of a tensor inside the model.

On all devices, a backward that reaches some micro-batches elsewhere than at their outputs is refused:

    loss ──> joined output ──> micro-batch 0, 1, 2, 3      the full batch: the search ends at the joined output
      └────> a tensor that forward has kept ──> micro-batch 3

Nodes are marked at the inputs of the first units and of each stage. Second derivatives reach the nodes of
all micro-batches in this way, too, and are right. torch.autograd.grad is not checked.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from parallelize.errors import ConfigError
from parallelize.runtime.autograd_graph import grad_fns_of, node_of, nodes_behind, reaches_any
from parallelize.torch_patches import backward as passes

__all__ = [
    "GraphEntries",
    "Microbatch",
    "compute_gradients",
    "connect",
    "has_reentrant_checkpoint",
    "mark_inside",
    "mark_joined",
]

Run = Callable[[Sequence[Callable[[], Any]]], list[Any]]

_INSIDE = "parallelize: inside a micro-batch"
_JOINED = "parallelize: joined micro-batches"

Microbatch = tuple[object, int, int]
"""Object that stands for the batch, index of the micro-batch, number of micro-batches."""


def connect(rows: Sequence[list[Any]], *, bounds: Sequence[torch.Tensor], run: Run) -> None:
    """Replace the differentiable outputs in `rows` by ones that are connected to their leaves by a backward in threads.

    Outputs of reentrant checkpoints, which compute gradients by themselves, stay as they are.

    Args:
        rows: outputs of each micro-batch.
        bounds: inputs that require grad: the micro-batches' graphs end there.
        run: returns the results of calls, made in threads.
    """
    used = [[each for each in row if isinstance(each, torch.Tensor) and each.grad_fn is not None] for row in rows]
    flat = [each for row in used for each in row]
    leaves = _leaves(used, bounds)
    # A backward of the micro-batches would go on behind an input that was computed with parameters of the model.
    if not flat or leaves is None or reaches_any(bounds, leaves):
        return
    found: Any = _Backward.apply(flat, [*map(len, used)], run, *bounds, *leaves)  # type: ignore[no-untyped-call]  # torch's
    connected = dict(zip(map(id, flat), found, strict=True))
    for row in rows:
        row[:] = [connected.get(id(each), each) for each in row]


def has_reentrant_checkpoint(outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether gradients of given tensors cannot be computed, since a reentrant checkpoint runs a backward."""
    return _leaves([outputs], ()) is None


def compute_gradients(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    *,
    inputs: Sequence[torch.Tensor],
    create_graph: bool = False,
    keep_graph: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Compute the gradients of `inputs` without calling hooks of theirs, or patches of torch.autograd.grad."""
    with _without_hooks(inputs), _explained_recomputation():
        found: Any = torch.autograd.Variable._execution_engine.run_backward(
            tuple(outputs),
            tuple(gradients),
            keep_graph=keep_graph,
            create_graph=create_graph,
            inputs=tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    return tuple(found)


class _Backward(torch.autograd.Function):
    """Autograd node between the leaves of all micro-batches' graphs and their outputs."""

    @staticmethod
    def forward(ctx: Any, outputs: list[torch.Tensor], sizes: list[int], run: Run, *leaves: torch.Tensor) -> Any:
        # As saved tensors, they are freed as torch frees a graph: after a backward without retain_graph.
        ctx.save_for_backward(*outputs)
        ctx.sizes, ctx.leaves, ctx.run = sizes, leaves, run
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        pairs, leaves = zip(ctx.saved_tensors, gradients, strict=True), ctx.leaves
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, None, *_part([*pairs], leaves)
        parts = [[*itertools.islice(pairs, size)] for size in ctx.sizes]
        # Recomputed forwards set and restore the random number generator, in several threads at once.
        rng_state = torch.get_rng_state()
        with _without_hooks(leaves):
            of_each = ctx.run([functools.partial(_part, part, leaves) for part in reversed(parts)])
        torch.set_rng_state(rng_state)
        return None, None, None, *map(_sum, zip(*of_each, strict=True))


def _part(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]], leaves: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    used = [(output, gradient) for output, gradient in pairs if gradient is not None]
    if not used:
        return [None] * len(leaves)
    outputs, gradients = zip(*used, strict=True)
    return compute_gradients(outputs, gradients, inputs=leaves, create_graph=torch.is_grad_enabled(), keep_graph=True)


def _sum(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the sum of the gradients of the micro-batches, in a fixed order."""
    found = [each for each in parts if each is not None]
    return sum(found[1:], found[0]) if found else None


@contextlib.contextmanager
def _without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Remove the hooks of leaves for a while: they run once, on the gradient of the batch."""
    hooked = [(each, hooks) for each in tensors if (hooks := each._backward_hooks) and each.is_leaf]
    for each, _ in hooked:
        each._backward_hooks = None
    try:
        yield
    finally:
        for each, hooks in hooked:
            each._backward_hooks = hooks


def _leaves(rows: Sequence[Sequence[torch.Tensor]], bounds: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the leaves of the outputs' graphs up to `bounds`, in a fixed order; None if they are computed elsewhere.

    None: a reentrant checkpoint, or nodes that several micro-batches share, such as those of a tensor that was computed
    before this forward: hooks of it would see the gradients of one micro-batch at a time.
    """
    ends = {each.grad_fn for each in bounds}
    seen: set[Any] = set()
    found: dict[int, torch.Tensor] = {}
    for row in rows:
        inner = set()
        for node in nodes_behind((each.grad_fn for each in row), is_end=ends.__contains__):
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor):
                found.setdefault(id(leaf), leaf)
            elif node in ends:
                continue
            elif node.name() == "CheckpointFunctionBackward" or (node in seen and not _is_cast(node)):
                return None
            else:
                inner.add(node)
        seen |= inner
    return list(found.values())


def _is_cast(node: Any) -> bool:
    """Return whether a node casts a leaf, as autocast does once for all micro-batches."""
    return node.name().startswith("ToCopyBackward") and hasattr(node.next_functions[0][0], "variable")


def mark_inside(tensors: Any, microbatch: Microbatch) -> None:
    """Mark the nodes of tensors that one micro-batch uses; those that several use are outside of all of them."""
    for node in grad_fns_of(tensors):
        known = node.metadata.get(_INSIDE, microbatch)
        is_shared = known is None or (known[0] is microbatch[0] and known[1] != microbatch[1])
        node.metadata[_INSIDE] = None if is_shared else microbatch


def mark_joined(tensors: Any) -> None:
    """Mark the nodes of joined outputs, or of those of a batch that is not split: searches end there."""
    for node in grad_fns_of(tensors):
        node.metadata[_JOINED] = True


def _entered(node: Any) -> Microbatch | None:
    """Return the micro-batch inside of which a node is; None: none, or it is behind a joined output."""
    return None if _JOINED in node.metadata else node.metadata.get(_INSIDE)


class GraphEntries:
    """Check of each backward pass in a context: a subscriber of torch_patches.backward."""

    def __init__(self, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._context = context

    def check(self, each: passes.Pass, run: passes.Run) -> None:
        """Check a backward pass, and run it.

        Raises:
            ConfigError: it reaches some but not all micro-batches of a batch elsewhere than at the joined outputs.
        """
        nodes = nodes_behind(
            map(node_of, each.roots), is_end=lambda node: _JOINED in node.metadata or _entered(node) is not None
        )
        reached = {batch for node in nodes if (batch := _entered(node)) is not None}
        if any(sum(batch is other for other, *_ in reached) < count for batch, _, count in reached):
            raise ConfigError(
                "a backward pass reaches some micro-batches elsewhere than at the model's output",
                why="forward has kept a tensor of one micro-batch, in a global or a list, which it did not for an "
                "earlier batch like this one; its gradient would miss the other micro-batches",
                fix="return the tensor from forward; or use BalancedBackend(microbatches=1), which does not split "
                "batches, or backend='ddp'",
            )
        with self._context(), _explained_recomputation():
            run(each)


@contextlib.contextmanager
def _explained_recomputation() -> Iterator[None]:
    """Explain the error of an activation checkpoint that computes again with tensors of two stages.

    Raises:
        ConfigError: it does so outside of the units, whose hooks would move the tensors.
    """
    try:
        yield
    except RuntimeError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        modules = [frame.f_globals.get("__name__", "") for frame in frames]
        if "same device" not in str(error) or torch_checkpoint.__name__ not in modules:
            raise
        last = max(i for i, name in enumerate(modules) if name == torch_checkpoint.__name__)
        place = frames[min(last + 1, len(frames) - 1)].f_code
        raise ConfigError(
            f"torch.utils.checkpoint calls {place.co_name} ({place.co_filename}, line {place.co_firstlineno}), which "
            "computes with tensors of two stages",
            why="backward computes it again, where only calls of submodules move their arguments to one device",
            fix="checkpoint the module that holds them, or compute with them outside of checkpoint(...); or use "
            "BalancedBackend(recompute=True) instead",
        ) from error
