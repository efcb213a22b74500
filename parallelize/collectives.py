"""Collectives on tensors, numbers and containers: all_reduce, all_gather, broadcast (differentiable), barrier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallelize.agreement.fingerprint import digest
from parallelize.agreement.gather import gather_objects
from parallelize.errors import ConfigError, SyncError, did_you_mean
from parallelize.gradients import differentiable
from parallelize.hang_detection.stack_frames import call_site
from parallelize.hang_detection.statements import rank_test_here
from parallelize.hang_detection.waiting import WaitKind, waiting_for
from parallelize.run import context
from parallelize.run.containers import leaves, map_leaves

Op = Literal["mean", "sum", "max", "min"]


def all_reduce(x: Any, op: Op) -> Any:
    """Reduce a value over all processes; a collective: every process must call it.

    Args:
        x: a tensor, a number, or a container of them, with the same structure on every process; not
            modified.
        op: "mean", "sum", "max" or "min", elementwise over the processes; any nan makes the result
            nan, as in torch. Half-precision tensors are summed in fp32 and rounded once.

    Returns:
        The reduced values in the structure of `x`, on every process. Tensors keep their shape,
        dtype and device. Differentiable: a gradient of the result on any process flows back to `x`
        on every process.

    Raises:
        ConfigError: `op` is unknown, or `x` cannot be reduced (such as an integer tensor by
            "mean").
        SyncError: the processes called this with different shapes, dtypes, containers or `op`.
    """
    if op not in differentiable.REDUCE_OPS:
        raise ConfigError(
            f"op={op!r}",
            why="unknown reduction",
            fix=did_you_mean(str(op), differentiable.REDUCE_OPS),
        )
    _refuse_unsupported(x, f"all_reduce(op={op!r})", op=op)
    if num_processes() == 1:
        return map_leaves(lambda leaf: _reduce_alone(leaf, op), x)
    _check_same_call(f"all_reduce(op={op!r})", x)
    return map_leaves(
        lambda leaf: (
            differentiable.all_reduce(leaf, op)
            if isinstance(leaf, Tensor)
            else _reduce_number(leaf, op)
        ),
        x,
    )


def all_gather(x: Any) -> Any:
    """Gather the values of all processes on every process; a collective: every process must call
    it.

    Args:
        x: a tensor, a number, or a container of them, with the same structure on every process; not
            modified.

    Returns:
        The gathered values in the structure of `x`, in rank order: a tensor of shape (world_size,
        *S) for each tensor of shape S, and a list for each number. Differentiable.

    Raises:
        ConfigError: `x` contains a value that cannot be sent.
        SyncError: the processes called this with different shapes, dtypes or containers.
    """
    _refuse_unsupported(x, "all_gather")
    if num_processes() == 1:
        return map_leaves(
            lambda leaf: leaf.clone()[None] if isinstance(leaf, Tensor) else [leaf], x
        )
    _check_same_call("all_gather", x)
    return map_leaves(lambda leaf: _apply(leaf, differentiable.all_gather), x)


def broadcast(x: Any, src: int = 0) -> Any:
    """Send the value of one process to every process; a collective: every process must call it.

    Args:
        x: a tensor, a number, or a container of them, with the same structure on every process; not
            modified.
        src: rank whose value is sent.

    Returns:
        A copy of rank `src`'s value. Differentiable: the gradients of all processes are summed on
        rank `src`.

    Raises:
        ConfigError: `src` is not a rank of this run, or `x` contains a value that cannot be sent.
        SyncError: the processes called this with different shapes, dtypes, containers or `src`.
    """
    size = num_processes()
    if type(src) is not int or not 0 <= src < size:
        raise ConfigError(
            f"src={src!r}",
            why=f"ranks go from 0 to {size - 1} here",
            fix="use src=0, the main process",
        )
    _refuse_unsupported(x, "broadcast")
    if size == 1:
        return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x)
    _check_same_call(f"broadcast(src={src})", x)
    return map_leaves(
        lambda leaf: _apply(leaf, lambda tensor: differentiable.broadcast(tensor, src)), x
    )


def barrier(name: str | None = None) -> None:
    """Wait until every process has called `barrier`; a collective.

    Args:
        name: label of this barrier, compared between processes and shown in errors and hang
            reports.

    Raises:
        SyncError: another process is at a barrier with another name, or at another collective.
    """
    if num_processes() > 1:
        _check_same_call("barrier" if name is None else f"barrier({name!r})", None)


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Run the block on rank 0 first, then on all other ranks, which can use the files that rank 0
    has cached.

    A collective: every process must enter the block. If the block raises on one process, every
    process raises.

    Raises:
        SyncError: the block raised on another process; the message contains that rank and its
            error.
    """
    if num_processes() == 1:
        yield
        return
    failure: BaseException | None = None
    if dist.get_rank() != 0:
        _raise_remote_failure(None)
    try:
        yield
    except BaseException as exc:
        failure = exc
        raise
    finally:
        # Exchange 1: rank 0 has left the block, so the other ranks enter it. Exchange 2: the other ranks have left it.
        if dist.get_rank() == 0:
            _raise_remote_failure(failure)
        if failure is None or dist.get_rank() != 0:
            _raise_remote_failure(failure)


def _raise_remote_failure(failure: BaseException | None) -> None:
    """Exchange failures between ranks; raise SyncError if another rank has failed and this rank has not."""
    text_of_failure = None if failure is None else f"{type(failure).__name__}: {failure}"
    with waiting_for("main_first", wait_kind=WaitKind.CALL):
        failures = gather_objects(text_of_failure)
    for rank, text in enumerate(failures):
        if text is not None and failure is None:
            raise SyncError(
                f"main_first failed on rank {rank}: {text}",
                why="the block must succeed on every rank",
                fix=f"see the error of rank {rank}",
            )


# Checks before a collective: its values can be sent, and all processes make the same call


def num_processes() -> int:
    """Return the size of the process group; 1 without one, unless a launcher has started several processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    world = context.current().world
    if world.world_size > 1:
        raise ConfigError(
            f"no process group in a world of {world.world_size}",
            why="a launcher has started this process, but torch.distributed is not initialized",
            fix="call this inside a @distributed function, or call torch.distributed.init_process_group() first",
        )
    return 1


def _refuse_unsupported(x: Any, call: str, *, op: str | None = None) -> None:
    for leaf in leaves(x):
        if isinstance(leaf, Tensor):
            if (
                leaf.is_meta
                or leaf.is_nested
                or leaf.is_quantized
                or leaf.layout is not torch.strided
            ):
                raise ConfigError(
                    f"{call} of a tensor of {leaf.dtype}, {leaf.layout}, on {leaf.device}",
                    why="only dense tensors with values can be sent",
                    fix="use x.dequantize() or x.to_dense(), or a padded tensor of a nested one",
                )
            if op is not None and not _keeps_dtype(op, leaf.dtype):
                raise ConfigError(
                    f"{call} of a tensor of {leaf.dtype}",
                    why="the result does not fit this dtype, or process groups do not support it",
                    fix="use x.float() for a mean, x.long() for a sum, x.abs() for the largest complex number",
                )
        elif not isinstance(leaf, (bool, int, float)):
            raise ConfigError(
                f"{call} of {type(leaf).__name__} {leaf!r:.80}",
                why="only tensors, numbers and containers of them can be sent",
                fix="use torch.distributed.broadcast_object_list or all_gather_object for other objects",
            )
        elif isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
            raise ConfigError(
                f"{call} of an integer of {leaf.bit_length()} bits",
                why="integers are sent as 64 bits",
                fix="use float(x), or torch.distributed.all_gather_object",
            )


def _keeps_dtype(op: str, dtype: torch.dtype) -> bool:
    """Return whether process groups can reduce a dtype by `op`, and the result fits the same dtype."""
    fits = {
        "mean": dtype.is_floating_point or dtype.is_complex,
        "sum": dtype is not torch.bool,
        "max": not dtype.is_complex,
        "min": not dtype.is_complex,
    }
    return dtype in differentiable.REDUCE_DTYPES and fits[op]


def _check_same_call(call: str, x: Any) -> None:
    """Raise SyncError if the processes make different calls, which would hang or silently mix up values."""
    text = f"{call} of {_signature(x)}" if x is not None else call
    with waiting_for(call, wait_kind=WaitKind.CALL):
        if len(set(differentiable.all_gather(digest(text)).tolist())) == 1:
            return
        test = rank_test_here()
        place = call_site()
        if test is not None:
            place += f", under {test.text}"
        texts = gather_objects(f"{text} ({place})")
    raise SyncError(
        "processes differ: "
        + "; ".join(f"rank {rank} is at {each}" for rank, each in enumerate(texts)),
        why="a collective needs the same call on every process",
        fix="call it on every rank, with the same shapes and dtypes in the same order",
    )


def _signature(x: Any) -> str:
    if isinstance(x, Tensor):
        # Compared too: the backward pass contains a collective, which hangs if only some processes run it.
        grad = " with grad" if x.requires_grad and torch.is_grad_enabled() else ""
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{grad}"
    if isinstance(x, (bool, int, float)):
        return type(x).__name__
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key!r}: {_signature(each)}" for key, each in x.items()) + "}"
    if isinstance(x, (list, tuple)):
        return "(" + ", ".join(_signature(each) for each in x) + ")"
    return f"{type(x).__name__}[{', '.join(_signature(each) for each in leaves(x))}]"


# Collectives on a single tensor or number


def _reduce_alone(leaf: Any, op: str) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return (
        float(leaf)
        if op == "mean"
        else (int(leaf) if op == "sum" and isinstance(leaf, bool) else leaf)
    )


def _reduce_number(number: float, op: str) -> Any:
    if op == "sum" and isinstance(number, int):
        return sum(
            _apply(number, differentiable.all_gather)
        )  # summed in Python: the result may exceed 64 bits
    return _apply(
        float(number) if op == "mean" else number,
        lambda tensor: differentiable.all_reduce(tensor, op),
    )


def _apply(leaf: Any, collective: Callable[[Tensor], Tensor]) -> Any:
    """Run a collective on a tensor, or on a number that is converted to a tensor and back."""
    if isinstance(leaf, Tensor):
        return collective(leaf)
    kind = (
        torch.float64
        if isinstance(leaf, float)
        else torch.bool
        if isinstance(leaf, bool)
        else torch.int64
    )
    return collective(torch.tensor(leaf, dtype=kind)).tolist()
