"""Values that all processes of a run share: reduced, gathered, sent from one, or just waited for."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallelize.errors import ConfigError, SyncError, did_you_mean
from parallelize.hang_detection.stack_frames import site
from parallelize.runtime import context, differentiable
from parallelize.runtime.containers import leaves, map_leaves

__all__ = ["all_gather", "all_reduce", "barrier", "broadcast", "main_first"]

Op = Literal["mean", "sum", "max", "min"]


def all_reduce(x: Any, op: Op = "mean") -> Any:
    """One value from the value of every process, on every process; a collective: every process has to call it.

    Args:
        x: a tensor, a number, or containers of them; alike on every process. It is not changed.
        op: "mean", "sum", "max" or "min", over processes, element by element; of a nan and numbers each is nan, as
            torch has it. Tensors in half precision are summed in fp32 and rounded once.

    Returns:
        The same containers around the reduced values: a tensor of the same shape, type and device for a tensor, a
        number for a number. Differentiable: a gradient that reaches the result on any process reaches `x` on all.

    Raises:
        ConfigError: an `op` that there is not, something that cannot be reduced, the mean of a tensor of integers.
        SyncError: the processes called it with different shapes, types, containers or `op`.
    """
    if op not in differentiable.OPS:
        raise ConfigError(f"op={op!r}", why="there is no such reduction", fix=did_you_mean(str(op), differentiable.OPS))
    _refuse_what_cannot_travel(x, f"all_reduce(op={op!r})", op=op)
    if _size() == 1:
        return map_leaves(lambda leaf: _alone(leaf, op), x)
    _agree(f"all_reduce(op={op!r})", x)
    return map_leaves(
        lambda leaf: differentiable.reduce(leaf, op) if isinstance(leaf, Tensor) else _reduced_number(leaf, op), x
    )


def all_gather(x: Any) -> Any:
    """The value of every process, on every process; a collective: every process has to call it.

    Args:
        x: a tensor, a number, or containers of them; alike on every process. It is not changed.

    Returns:
        The same containers; a tensor of shape S becomes one of shape (world_size, *S) in rank order, a number a list
        of numbers. Differentiable.

    Raises:
        ConfigError: something that cannot travel.
        SyncError: the processes called it with different shapes, types or containers.
    """
    _refuse_what_cannot_travel(x, "all_gather")
    if _size() == 1:
        return map_leaves(lambda leaf: leaf.clone()[None] if isinstance(leaf, Tensor) else [leaf], x)
    _agree("all_gather", x)
    return map_leaves(lambda leaf: _one(leaf, differentiable.gather), x)


def broadcast(x: Any, src: int = 0) -> Any:
    """The value of one process, on every process; a collective: every process has to call it.

    Args:
        x: a tensor, a number, or containers of them; alike on every process, and not changed.
        src: rank of the process whose value it is.

    Returns:
        The same containers around the values of `src`. Differentiable: gradients of all processes add up at `src`.

    Raises:
        ConfigError: a rank that there is not, something that cannot travel.
        SyncError: the processes called it with different shapes, types, containers or `src`.
    """
    size = _size()
    if type(src) is not int or not 0 <= src < size:
        raise ConfigError(f"src={src!r}", why=f"ranks go from 0 to {size - 1} here", fix="use src=0, the main process")
    _refuse_what_cannot_travel(x, "broadcast")
    if size == 1:
        return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x)
    _agree(f"broadcast(src={src})", x)
    return map_leaves(lambda leaf: _one(leaf, lambda tensor: differentiable.send(tensor, src)), x)


def barrier(name: str | None = None) -> None:
    """Wait until every process is here; a collective: every process has to call it.

    Args:
        name: what the processes wait for; named barriers tell when they have met at different ones.

    Raises:
        SyncError: the processes are at barriers of different names.
    """
    if _size() > 1:
        _agree("barrier" if name is None else f"barrier({name!r})", None)


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Run the block on rank 0 first, then on all others at once: one process downloads, the others find it cached.

    Every process has to enter it. An exception in the block, on any process, ends the block on all of them.

    Raises:
        SyncError: the block failed on another process; says where and how.
    """
    if _size() == 1:
        yield
        return
    failure: BaseException | None = None
    if dist.get_rank() != 0:
        _meet("main_first", None)
    try:
        yield
    except BaseException as exc:
        failure = exc
        raise
    finally:
        # Rank 0 lets the others in, or tells them why not; then all tell each other how the block went.
        if dist.get_rank() == 0:
            _meet("main_first", failure)
        if failure is None or dist.get_rank() != 0:
            _meet("main_first", failure)


def _meet(where: str, failure: BaseException | None) -> None:
    """Tell the others about `failure`; raise what they tell, unless this process has a failure of its own."""
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if failure is None else f"{type(failure).__name__}: {failure}")
    for rank, text in enumerate(told):
        if text is not None and failure is None:
            raise SyncError(
                f"{where} failed on rank {rank}: {text}",
                why="what that process was to prepare is not there",
                fix=f"see the error of rank {rank}",
            )


# What may travel, and whether all processes mean the same


def _size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    world = context.current().world
    if world.world_size > 1:
        raise ConfigError(
            f"no process group in a world of {world.world_size}",
            why="a launcher has started this process, but nobody has connected it with the others",
            fix="call this inside a @distributed function, or torch.distributed.init_process_group() before",
        )
    return 1


def _refuse_what_cannot_travel(x: Any, what: str, *, op: str | None = None) -> None:
    for leaf in leaves(x):
        if isinstance(leaf, Tensor):
            _refuse_tensor(leaf, what, op=op)
        elif not isinstance(leaf, (bool, int, float)):
            raise ConfigError(
                f"{what} of {type(leaf).__name__} {leaf!r:.80}",
                why="only tensors, numbers and containers of them travel between processes",
                fix="use torch.distributed.broadcast_object_list or all_gather_object for other things",
            )
        elif isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
            raise ConfigError(
                f"{what} of an integer of {leaf.bit_length()} bits",
                why="integers travel between processes in 64 bits",
                fix="use float(x), or torch.distributed.all_gather_object",
            )


def _refuse_tensor(x: Tensor, what: str, *, op: str | None) -> None:
    odd = {"meta": x.is_meta, "nested": x.is_nested, "quantized": x.is_quantized}
    kind = next((name for name, holds in odd.items() if holds), str(x.layout))
    if kind != str(torch.strided):
        fix = "use x.dequantize()" if x.is_quantized else "use x.to_dense(), or a padded tensor of a nested one"
        raise ConfigError(f"{what} of a {kind} tensor", why="only dense values travel", fix=fix)
    if op is not None and not _is_kept_by(op, x.dtype):
        raise ConfigError(
            f"{what} of a tensor of {x.dtype}",
            why="the result would not fit the type of the tensor, or no process group computes in it",
            fix="use x.float() for a mean, x.long() for a sum, x.abs() for the largest complex number",
        )


def _is_kept_by(op: str, dtype: torch.dtype) -> bool:
    """Whether a reduction of values of a type is of that type again."""
    return (
        dtype in differentiable.REDUCED_AS
        and {
            "mean": dtype.is_floating_point or dtype.is_complex,
            "sum": dtype is not torch.bool,
            "max": not dtype.is_complex,
            "min": not dtype.is_complex,
        }[op]
    )


def _agree(what: str, x: Any) -> None:
    """Compare what every process is about to do: collectives of different shapes hang, or mix values up silently."""
    text = f"{what} of {_signature(x)}" if x is not None else what
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    if len(set(differentiable.gather(torch.tensor([digest])).flatten().tolist())) == 1:
        return
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, f"{text} ({site()})")
    raise SyncError(
        "processes differ: " + "; ".join(f"rank {rank} is at {each}" for rank, each in enumerate(texts)),
        why="a collective is one call that all processes make alike",
        fix="call it on every rank, with the same shapes and types in the same order",
    )


def _signature(x: Any) -> str:
    if isinstance(x, Tensor):
        # A backward that only some processes run would leave them waiting for the others.
        grad = " with grad" if x.requires_grad and torch.is_grad_enabled() else ""
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{grad}"
    if isinstance(x, (bool, int, float)):
        return type(x).__name__
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key!r}: {_signature(each)}" for key, each in x.items()) + "}"
    if isinstance(x, (list, tuple)):
        return "(" + ", ".join(_signature(each) for each in x) + ")"
    return f"{type(x).__name__}[{', '.join(_signature(each) for each in leaves(x))}]"


# One value at a time


def _alone(leaf: Any, op: str) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return float(leaf) if op == "mean" else (int(leaf) if op == "sum" and isinstance(leaf, bool) else leaf)


def _reduced_number(number: float, op: str) -> Any:
    if op == "sum" and isinstance(number, int):
        return sum(_one(number, differentiable.gather))  # by Python: it may have more than 64 bits
    return _one(float(number) if op == "mean" else number, lambda tensor: differentiable.reduce(tensor, op))


def _one(leaf: Any, collective: Callable[[Tensor], Tensor]) -> Any:
    """The collective on a tensor, or on a number that becomes one for the way."""
    if isinstance(leaf, Tensor):
        return collective(leaf)
    kind = torch.float64 if isinstance(leaf, float) else torch.bool if isinstance(leaf, bool) else torch.int64
    return collective(torch.tensor(leaf, dtype=kind)).tolist()
