"""Values that all processes of a run share: reduced, gathered, sent from one, or just waited for."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallelize import runtime
from parallelize.containers import leaves, map_leaves
from parallelize.errors import ConfigError, SyncError, did_you_mean
from parallelize.watch.frames import site

__all__ = ["all_gather", "all_reduce", "barrier", "broadcast", "main_first"]

Op = Literal["mean", "sum", "max", "min"]
_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(x: Any, op: Op = "mean") -> Any:
    """One value from the value of every process, on every process; a collective: every process has to call it.

    Args:
        x: a tensor, a number, or containers of them; alike on every process. It is not changed.
        op: "mean", "sum", "max" or "min", over processes, element by element.

    Returns:
        The same containers around the reduced values: a tensor of the same shape, type and device for a tensor, a
        number for a number. Differentiable: a gradient that reaches the result on any process reaches `x` on all.

    Raises:
        ConfigError: an `op` that there is not, something that cannot be reduced, the mean of a tensor of integers.
        SyncError: the processes called it with different shapes, types, containers or `op`.
    """
    if op not in _OPS:
        raise ConfigError(f"op={op!r}", why="there is no such reduction", fix=did_you_mean(str(op), _OPS))
    _refuse_what_cannot_travel(x, f"all_reduce(op={op!r})", op=op)
    if _size() == 1:
        return map_leaves(lambda leaf: _alone(leaf, op), x)
    _agree(f"all_reduce(op={op!r})", x)
    return map_leaves(lambda leaf: _one(leaf, lambda tensor: _apply(_AllReduce, tensor, op), op=op), x)


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
    return map_leaves(lambda leaf: _one(leaf, lambda tensor: _apply(_AllGather, tensor)), x)


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
    return map_leaves(lambda leaf: _one(leaf, lambda tensor: _apply(_Broadcast, tensor, src)), x)


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
    world = runtime.current().world
    if world.world_size > 1:
        raise ConfigError(
            f"no process group in a world of {world.world_size}",
            why="a launcher has started this process, but nobody has connected it with the others",
            fix="call this inside a @distributed function, or torch.distributed.init_process_group() before",
        )
    return 1


def _refuse_what_cannot_travel(x: Any, what: str, *, op: str | None = None) -> None:
    for leaf in leaves(x):
        if not isinstance(leaf, (Tensor, bool, int, float)):
            raise ConfigError(
                f"{what} of {type(leaf).__name__} {leaf!r:.80}",
                why="only tensors, numbers and containers of them travel between processes",
                fix="use torch.distributed.broadcast_object_list or all_gather_object for other things",
            )
        if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_meta):
            kind = "meta" if leaf.is_meta else str(leaf.layout)
            raise ConfigError(f"{what} of a {kind} tensor", why="only dense values travel", fix="use x.to_dense()")
        if isinstance(leaf, Tensor) and not _is_kept_by(op, leaf.dtype):
            raise ConfigError(
                f"{what} of a tensor of {leaf.dtype}",
                why="the result would not fit the type of the tensor",
                fix="use x.float() for a mean, x.long() for a sum, x.abs() for the largest complex number",
            )


def _is_kept_by(op: str | None, dtype: torch.dtype) -> bool:
    """Whether a reduction of values of a type is of that type again."""
    return {
        "mean": dtype.is_floating_point or dtype.is_complex,
        "sum": dtype is not torch.bool,
        "max": not dtype.is_complex,
        "min": not dtype.is_complex,
    }.get(op or "", True)


def _agree(what: str, x: Any) -> None:
    """Compare what every process is about to do: collectives of different shapes hang, or mix values up silently."""
    text = f"{what} of {_signature(x)}" if x is not None else what
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    mine = torch.tensor([digest], device=_carrier(torch.device("cpu")))
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, mine)
    if len({int(each) for each in torch.cat(digests)}) == 1:
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


def _one(leaf: Any, collective: Callable[[Tensor], Tensor], *, op: str | None = None) -> Any:
    """The collective on a tensor, or on a number that becomes one for the way."""
    if isinstance(leaf, Tensor):
        kind = torch.uint8 if leaf.dtype is torch.bool else leaf.dtype
        return collective(leaf.to(_carrier(leaf.device), kind)).to(leaf.device, leaf.dtype)
    kind = torch.float64 if isinstance(leaf, float) or op == "mean" else torch.int64
    result = collective(torch.tensor(leaf, dtype=kind, device=_carrier(torch.device("cpu"))))
    if isinstance(leaf, bool) and op not in ("mean", "sum"):
        result = result.bool()
    return result.tolist()


def _carrier(device: torch.device) -> torch.device:
    """The device itself if this run's processes can talk from there, else one from which they can."""
    types = [each.type for each in dist.distributed_c10d._get_default_group()._device_types]
    return device if device.type in types else runtime.current().device


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # torch has no types for it
    return result


# For backward: L is the sum of the losses of all processes, x and y a process's own value and result, W the world size.


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str) -> Tensor:
        y = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, _OPS[op])
        if op == "mean":
            y /= dist.get_world_size()
        ctx.op = op
        ctx.save_for_backward(*((x, y) if op in ("max", "min") else ()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.op in ("mean", "sum"):
            return _apply(_AllReduce, grad, ctx.op), None
        # dL/dx goes to who holds the extremum; those who tie share it.
        x, y = ctx.saved_tensors
        holds = (x == y).to(grad.dtype)
        return _apply(_AllReduce, grad, "sum") * holds / _apply(_AllReduce, holds, "sum"), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:  # S -> (W, *S)
        mine = x.detach().contiguous()
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        return torch.stack(gathered)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:  # (W, *S) -> S
        return _apply(_AllReduce, grad, "sum")[dist.get_rank()]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int) -> Tensor:
        y = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(y, src)
        ctx.src = src
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = _apply(_AllReduce, grad, "sum")
        return total if dist.get_rank() == ctx.src else torch.zeros_like(total), None
