"""Collectives on tensors, numbers and containers: all_reduce, all_gather, broadcast, barrier.

The first three are differentiable. Before a collective the processes compare what they call, and
with what: different calls would hang, or mix up values silently.

Glossary:

    leaf        a tensor or number in what is sent, which may be a container of leaves
    call        the collective as messages name it: "all_reduce(op='mean')"
    signature   what must be equal on all processes: shapes, dtypes and containers, not the values
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallelize.agreement.fingerprint import digest
from parallelize.agreement.gather import gather_objects
from parallelize.errors import ConfigError, SyncError, did_you_mean, error_text
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
    call = f"all_reduce(op={op!r})"
    _refuse_unsupported(x, call, op=op)
    if num_processes() == 1:
        return map_leaves(lambda leaf: _reduce_alone(leaf, op), x)
    _check_same_call(call, x)
    return map_leaves(lambda leaf: _reduce(leaf, op), x)


def all_gather(x: Any) -> Any:
    """Gather the values of all processes on every process.

    A collective: every process must call it.

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
        return map_leaves(_gather_alone, x)
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
        return map_leaves(_copy, x)
    _check_same_call(f"broadcast(src={src})", x)

    def broadcast_tensor(tensor: Tensor) -> Tensor:
        return differentiable.broadcast(tensor, src)

    return map_leaves(lambda leaf: _apply(leaf, broadcast_tensor), x)


def barrier(name: str | None = None) -> None:
    """Wait until every process has called `barrier`; a collective.

    Args:
        name: label of this barrier, compared between processes and shown in errors and hang
            reports.

    Raises:
        SyncError: another process is at a barrier with another name, or at another collective.
    """
    if num_processes() > 1:
        call = "barrier" if name is None else f"barrier({name!r})"
        _check_same_call(call, None)


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Run the block on rank 0 first, then on all other ranks.

    They can use the files that rank 0 has cached. A collective: every process must enter the block.
    If the block raises on one process, every process raises.

        rank 0        block ── first exchange ────────── second exchange
        other ranks            first exchange ── block ── second exchange

    Raises:
        SyncError: the block raised on another process; the message contains that rank and its
            error.
    """
    if num_processes() == 1:
        yield
        return
    is_main = dist.get_rank() == 0
    failure: BaseException | None = None
    if not is_main:
        _exchange_failures(None)
    try:
        yield
    except BaseException as exc:
        failure = exc
        raise
    finally:
        if is_main:
            _exchange_failures(failure)
        # If rank 0 has failed, the other ranks have raised in the first exchange.
        if failure is None or not is_main:
            _exchange_failures(failure)


def _exchange_failures(failure: BaseException | None) -> None:
    """Tell the other ranks whether this one has failed; a collective.

    Raises:
        SyncError: another rank has failed, and this one has not.
    """
    text = None if failure is None else f"{type(failure).__name__}: {error_text(failure)}"
    with waiting_for("main_first", wait_kind=WaitKind.CALL):
        texts = gather_objects(text)
    if failure is not None:
        return
    for rank, text_of_rank in enumerate(texts):
        if text_of_rank is not None:
            raise SyncError(
                f"main_first failed on rank {rank}: {text_of_rank}",
                why="the block must succeed on every rank",
                fix=f"see the error of rank {rank}",
            )


# Checks before a collective: its values can be sent, and all processes make the same call


def num_processes() -> int:
    """Return the size of the process group, or 1 without a group.

    Raises:
        ConfigError: there is no group, although a launcher has started several processes.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    world = context.current().world
    if world.world_size > 1:
        raise ConfigError(
            f"no process group in a world of {world.world_size}",
            why="a launcher has started this process, but torch.distributed is not initialized",
            fix="call this inside a @distributed function, or call "
            "torch.distributed.init_process_group() first",
        )
    return 1


def _refuse_unsupported(x: Any, call: str, *, op: str | None = None) -> None:
    """Raise ConfigError for a leaf that cannot be sent, or not be reduced by `op`."""
    for leaf in leaves(x):
        if isinstance(leaf, Tensor):
            _refuse_unsupported_tensor(leaf, call, op=op)
        elif not isinstance(leaf, (bool, int, float)):
            raise ConfigError(
                f"{call} of {type(leaf).__name__} {leaf!r:.80}",
                why="only tensors, numbers and containers of them can be sent",
                fix="use torch.distributed.broadcast_object_list or all_gather_object for other "
                "objects",
            )
        elif isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
            raise ConfigError(
                f"{call} of an integer of {leaf.bit_length()} bits",
                why="integers are sent as 64 bits",
                fix="use float(x), or torch.distributed.all_gather_object",
            )


def _refuse_unsupported_tensor(tensor: Tensor, call: str, *, op: str | None) -> None:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    if not is_dense or tensor.is_meta or tensor.is_quantized:
        raise ConfigError(
            f"{call} of a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}",
            why="only dense tensors with values can be sent",
            fix="use x.dequantize() or x.to_dense(), or a padded tensor of a nested one",
        )
    if op is not None and not _keeps_dtype(op, tensor.dtype):
        raise ConfigError(
            f"{call} of a tensor of {tensor.dtype}",
            why="the result does not fit this dtype, or process groups do not support it",
            fix="use x.float() for a mean, x.long() for a sum, x.abs() for the largest complex "
            "number",
        )


def _keeps_dtype(op: str, dtype: torch.dtype) -> bool:
    """Whether process groups can reduce a dtype by `op`, and the result has the same dtype."""
    result_fits_by_op = {
        "mean": dtype.is_floating_point or dtype.is_complex,
        "sum": dtype is not torch.bool,
        "max": not dtype.is_complex,
        "min": not dtype.is_complex,
    }
    return dtype in differentiable.REDUCE_DTYPES and result_fits_by_op[op]


def _check_same_call(call: str, x: Any) -> None:
    """Compare the call with those of the other processes; a collective.

    Args:
        call: the collective, with its arguments but x.
        x: what is sent; None: nothing.

    Raises:
        SyncError: the processes make different calls.
    """
    text = call
    if x is not None:
        text = f"{call} of {_signature(x)}"
    with waiting_for(call, wait_kind=WaitKind.CALL):
        digests = differentiable.all_gather(digest(text)).tolist()
        if len(set(digests)) == 1:
            return
        place = call_site()
        test = rank_test_here()
        if test is not None:
            place += f", under {test.text}"
        texts = gather_objects(f"{text} ({place})")
    places = [f"rank {rank} is at {text_of_rank}" for rank, text_of_rank in enumerate(texts)]
    raise SyncError(
        f"processes differ: {'; '.join(places)}",
        why="a collective needs the same call on every process",
        fix="call it on every rank, with the same shapes and dtypes in the same order",
    )


def _signature(x: Any) -> str:
    """Return shapes, dtypes and containers of x as text."""
    if isinstance(x, Tensor):
        text = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        # Compared, too: backward is a collective, and hangs if only some processes run it.
        if x.requires_grad and torch.is_grad_enabled():
            text += " with grad"
        return text
    if isinstance(x, (bool, int, float)):
        return type(x).__name__
    if isinstance(x, dict):
        items = [f"{key!r}: {_signature(value)}" for key, value in x.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(x, (list, tuple)):
        return f"({', '.join(map(_signature, x))})"
    return f"{type(x).__name__}[{', '.join(map(_signature, leaves(x)))}]"


# Collectives on a leaf


def _copy(leaf: Any) -> Any:
    """Return what a process without others broadcasts."""
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return leaf


def _gather_alone(leaf: Any) -> Any:
    """Return what a process without others gathers."""
    if isinstance(leaf, Tensor):
        return leaf.clone()[None]
    return [leaf]


def _reduce_alone(leaf: Any, op: str) -> Any:
    """Return what a process without others reduces."""
    if isinstance(leaf, Tensor):
        return leaf.clone()
    if op == "mean":
        return float(leaf)
    if op == "sum" and isinstance(leaf, bool):
        return int(leaf)
    return leaf


def _reduce(leaf: Any, op: str) -> Any:
    if isinstance(leaf, Tensor):
        return differentiable.all_reduce(leaf, op)
    if op == "sum" and isinstance(leaf, int):
        # Summed in Python, because the result may exceed 64 bits.
        return sum(_apply(leaf, differentiable.all_gather))
    number = float(leaf) if op == "mean" else leaf
    return _apply(number, lambda tensor: differentiable.all_reduce(tensor, op))


def _apply(leaf: Any, collective: Callable[[Tensor], Tensor]) -> Any:
    """Run a collective on a tensor, or on a number that is converted to a tensor and back."""
    if isinstance(leaf, Tensor):
        return collective(leaf)
    dtype = torch.int64
    if isinstance(leaf, float):
        dtype = torch.float64
    elif isinstance(leaf, bool):  # which is an int, too
        dtype = torch.bool
    return collective(torch.tensor(leaf, dtype=dtype)).tolist()
