"""Gradients averaged by DistributedDataParallel: its options, and the engine that the backends standing on it share."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from parallelize.backends.broadcast_checks import refuse_unsendable
from parallelize.backends.ddp_comm_hooks import COMPRESSING, HOOKS, CommHook, hook_for
from parallelize.backends.ddp_static_graph import FirstIteration
from parallelize.errors import ConfigError
from parallelize.plugins.base import Backend, Engine, Inner, LocalEngine
from parallelize.plugins.traffic import Traffic
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.context import current_world
from parallelize.runtime.process_group import new_group

__all__ = ["Averaging", "AveragingEngine", "averaging_engine", "send"]


@dataclass(frozen=True, kw_only=True)
class Averaging(Backend):
    """The options of DistributedDataParallel.

    Args:
        find_unused_parameters: look for parameters that a forward has not used; for models with branches.
        static_graph: promise that every iteration uses the same parameters in the same way.
        gradient_as_bucket_view: let gradients be views of the communication buffers: as much memory less as they take.
        bucket_cap_mb: gradients travel in groups of this many MiB; None: torch's choice.
        broadcast_buffers: begin each training forward with rank 0's buffers (batch norm's running statistics).
        sync_batchnorm: compute batch norm's statistics over the batches of all ranks, on GPUs.
        comm_hook: how gradients travel: in "fp16" or "bf16", as low-rank factors ("powersgd"), or a pair of a state
            and a hook as `DistributedDataParallel.register_comm_hook` takes them; None: as they are, or as mixed
            precision says.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html,
        https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float | None = None
    broadcast_buffers: bool = True
    sync_batchnorm: bool = False
    comm_hook: CommHook | None = None

    def __post_init__(self) -> None:
        if isinstance(self.comm_hook, str) and self.comm_hook not in HOOKS:
            raise ConfigError(
                f"comm_hook={self.comm_hook!r}",
                why="there is no way of communication of that name",
                fix="use 'fp16', 'bf16', 'powersgd', or a pair (state, hook)",
            )


class _Replica(DistributedDataParallel):
    """DistributedDataParallel that sends buffers in training only: one rank may evaluate with gradients on."""

    is_training: Callable[[], bool]

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        sends = self.is_training()
        if self.broadcast_buffers is not sends:
            self.broadcast_buffers = sends
        run: Any = super().forward
        return run(*inputs, **kwargs)

    @override
    def _post_forward(self, output: Any) -> Any:
        """With the tensors of an output in a list: torch itself opens fewer kinds of containers, and no dataclass."""
        watch: Any = super()._post_forward
        if not self.find_unused_parameters:
            return watch(output)
        watched = iter(watch(list(leaves(output))))
        return map_leaves(lambda _: next(watched), output)


class AveragingEngine(Engine):
    """A DistributedDataParallel, ours or one that the user brought.

    Args:
        module: it.
        local: what it replicates.
        sends_buffers: whether buffers are rank 0's on every rank after the block.
        hook: how gradients travel, if otherwise than DistributedDataParallel lets them.
        on_close: gives back what was done to the model for it.
    """

    averages = True

    def __init__(
        self,
        module: DistributedDataParallel,
        *,
        local: nn.Module,
        sends_buffers: bool,
        hook: CommHook | str | None = None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self.module: DistributedDataParallel = module
        self.local = local
        self._sends_buffers = sends_buffers
        self._hook = hook
        self._on_close = on_close
        self._first = FirstIteration(module) if module.static_graph else None

    @override
    def traffic(self) -> Traffic:
        ignored = set(self.module.parameters_to_ignore)
        named = [(name, each) for name, each in self.module.module.named_parameters() if each.requires_grad]
        counted = [each for name, each in named if name not in ignored]
        if self._hook in COMPRESSING.values():
            return Traffic(sum(2 * each.numel() for each in counted), f"all-reduced as {self._hook}")
        own = sum(each.nbytes for each in counted)
        return Traffic(own, "handed to a comm hook") if self.module._comm_hooks else Traffic(own)

    @override
    def is_reduced(self, *, in_backward: bool) -> bool:
        if self._first is not None and not self._first.is_over:
            return False
        try:
            self.module.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    @override
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        if self._first is not None and not self._first.is_over:
            # torch learns the graph from a first iteration that averages, and aborts at any other. Averaging once more
            # than needed changes no sum.
            return contextlib.nullcontext()
        return self.module.no_sync()

    @override
    def close(self, *, failed: bool) -> None:
        if self._first is not None:
            self._first.stop()
        # Hooks on the parameters' accumulators would go with the last reference, whenever that goes.
        self.module.reducer._remove_autograd_hooks()
        self._on_close()
        if not failed and self._sends_buffers:
            send(list(self.local.buffers()))
        if not failed and self.module._comm_hooks:
            # A thread of gloo may still hold the hook's last future, and with it the group: while this thread waits, it
            # lets go. If it came last, it would end the group from inside, which aborts the process.
            dist.barrier()


class _Untrained(LocalEngine):
    """A model of which nothing is trained yet: alike on every rank, and watched for what is unfrozen.

    Args:
        module: it.
        sends_buffers: whether buffers are rank 0's on every rank after the block.
    """

    averages = True

    def __init__(self, module: nn.Module, *, sends_buffers: bool) -> None:
        super().__init__(module)
        self._sends_buffers = sends_buffers

    @override
    def close(self, *, failed: bool) -> None:
        if not failed and self._sends_buffers:
            send(list(self.module.buffers()))


def averaging_engine(options: Averaging, module: nn.Module, *, inner: Inner, device: torch.device) -> Engine:
    """Average the gradients of `module` over all ranks; parameters and buffers are rank 0's from here on.

    Args:
        options: the backend.
        module: `inner`, or what spreads it over the devices of this process.
        inner: calls the user's forward.
        device: where the parameters are.

    Raises:
        ConfigError: options that this device or these parameters cannot have.
    """
    refuse_unsendable(inner.model, takes_expanded=False)
    if not any(parameter.requires_grad for parameter in inner.parameters()):
        send([*inner.parameters(), *inner.buffers()])
        return _Untrained(module, sends_buffers=options.broadcast_buffers)
    hook = options.comm_hook or COMPRESSING.get(inner.session.communication_dtype)  # type: ignore[arg-type]  # None is no key, and get() then says None
    registered = None if hook is None else hook_for(inner.model, hook)
    with contextlib.ExitStack() as stack:
        if options.sync_batchnorm:
            stack.enter_context(_synchronised_batchnorm(inner.model, device=device))
        replica = _Replica(
            module,
            process_group=_group_of_its_own(),
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            bucket_cap_mb=options.bucket_cap_mb,
        )
        replica.is_training = lambda: options.broadcast_buffers and inner.model.training
        if registered is not None:
            replica.register_comm_hook(*registered)
        sends_buffers = options.broadcast_buffers
        on_close = stack.pop_all().close
        return AveragingEngine(replica, local=module, sends_buffers=sends_buffers, hook=hook, on_close=on_close)


def _group_of_its_own() -> dist.ProcessGroup | None:
    """A process group for one DistributedDataParallel, or None: the default one.

    DistributedDataParallel never lets its group go, not even when the group is destroyed and it is gone itself, and
    gloo's threads go with the group. Were it the default one, what they hold of the run's last collectives would be
    freed while Python ends, which aborts the process. Workers of ours end without that; programs that torchrun or srun
    has started do not.
    """
    is_program = multiprocessing.parent_process() is None
    return new_group(current_world()) if is_program and dist.get_backend() == dist.Backend.GLOO else None


def send(tensors: list[torch.Tensor]) -> None:
    """Rank 0's values of tensors that every rank holds alike, in place; a collective per tensor."""
    with torch.no_grad():
        for work in [dist.broadcast(tensor.detach(), src=0, async_op=True) for tensor in tensors]:
            work.wait()


@contextlib.contextmanager
def _synchronised_batchnorm(model: nn.Module, *, device: torch.device) -> Iterator[None]:
    """Batch norms that see the batches of all ranks, by another class on the same modules: nothing else changes."""
    if device.type == "cpu":
        raise ConfigError(
            "sync_batchnorm=True on cpu",
            why="torch.nn.SyncBatchNorm computes on GPUs only",
            fix="drop sync_batchnorm=, or use group or layer norm, which need no statistics of the batch",
        )
    changed: list[tuple[nn.Module, type]] = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            changed.append((module, type(module)))
            module.__class__ = nn.SyncBatchNorm
            module.__dict__["process_group"] = None  # the default group
    try:
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind
            del module.__dict__["process_group"]
