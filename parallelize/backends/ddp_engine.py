"""DistributedDataParallel for a block: its options, its construction, and the engine that runs it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from parallelize.backends.broadcast import broadcast_from_rank_0, refuse_unbroadcastable
from parallelize.backends.ddp_comm_hooks import HOOK_OF_DTYPE, HOOKS, CommHook, build_comm_hook
from parallelize.backends.ddp_static_graph import FirstIteration
from parallelize.errors import ConfigError
from parallelize.plugins.base import Backend, Engine, Inner, LocalEngine
from parallelize.plugins.traffic import Traffic
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.context import current_world
from parallelize.runtime.gradients import unpatched_backward
from parallelize.runtime.process_group import separate_gloo_group
from parallelize.torch_private import self_test, unsupported

__all__ = ["DDPEngine", "DDPOptions", "build_ddp_engine"]


_CONSTRUCTOR = inspect.signature(DistributedDataParallel)


@dataclass(frozen=True, kw_only=True)
class DDPOptions(Backend):
    """Options of DistributedDataParallel.

    Args:
        find_unused_parameters: find the parameters that a forward has not used; needed by models with branches.
        static_graph: assume that every iteration uses the same parameters in the same way.
        gradient_as_bucket_view: make gradients views of the communication buckets, which saves one copy of them.
        bucket_cap_mb: size in MiB of the buckets in which gradients are all-reduced; None: torch's default.
        batched_grad_copy: copy gradients to each bucket by one kernel; since torch 2.13.
        broadcast_buffers: broadcast rank 0's buffers (batch norm's running statistics) before each training forward.
        sync_batchnorm: compute batch norm's statistics over the batches of all ranks; GPUs only.
        comm_hook: compression of the gradients that are sent: "fp16", "bf16", "powersgd" (low-rank factors), or a pair
            (state, hook) for `DistributedDataParallel.register_comm_hook`; None: no compression, unless mixed precision
            sets a `communication_dtype`.
        powersgd_rank: rank of the factors that "powersgd" sends; more is exacter, and slower.
        powersgd_start: number of backward passes before "powersgd" compresses, at least 2: early gradients tolerate it
            least. torch suggests 10 % of all steps.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html,
        https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float | None = None
    batched_grad_copy: bool = False
    broadcast_buffers: bool = True
    sync_batchnorm: bool = False
    comm_hook: CommHook | None = None
    powersgd_rank: int = 1
    powersgd_start: int = 1000

    def __post_init__(self) -> None:
        for name, least in (("powersgd_rank", 1), ("powersgd_start", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                why = f"it is not an integer >= {least}"
                raise ConfigError(f"{name}={value!r}", why=why, fix=f"use {name}={least}")
            if self.comm_hook != "powersgd" and value != getattr(DDPOptions, name):
                why = "it is a setting of PowerSGD, which is not used"
                raise ConfigError(f"{name}={value!r} without comm_hook='powersgd'", why=why, fix="add it, or drop this")
        if self.batched_grad_copy and "batched_grad_copy" not in _CONSTRUCTOR.parameters:
            why = "DistributedDataParallel has this option since torch 2.13"
            fix = "install torch 2.13 or newer, or drop it"
            raise ConfigError(f"batched_grad_copy=True with torch {torch.__version__}", why=why, fix=fix)
        if isinstance(self.comm_hook, str) and self.comm_hook not in HOOKS:
            raise ConfigError(
                f"comm_hook={self.comm_hook!r}",
                why="no communication hook has that name",
                fix="use 'fp16', 'bf16', 'powersgd', or a pair (state, hook)",
            )


class _DistributedDataParallel(DistributedDataParallel):
    """DistributedDataParallel that broadcasts buffers in training mode only, so that one rank alone can evaluate."""

    is_training: Callable[[], bool]
    is_output_prepared: bool

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        should_broadcast = self.is_training()
        if self.broadcast_buffers is not should_broadcast:
            self.broadcast_buffers = should_broadcast
        run: Any = super().forward
        self.__dict__["is_output_prepared"] = False  # nn.Module.__setattr__ is slow
        output = run(*inputs, **kwargs)
        if not self.is_output_prepared:
            raise unsupported("backend='ddp'", instead="use backend='fsdp'")
        return output

    @override
    def _post_forward(self, output: Any) -> Any:
        """Pass the output's tensors to torch as a list: torch does not find tensors in dataclasses, for example."""
        self.__dict__["is_output_prepared"] = True
        post_forward: Any = super()._post_forward
        if not self.find_unused_parameters:
            return post_forward(output)
        hooked = iter(post_forward(list(leaves(output))))
        return map_leaves(lambda _: next(hooked), output)


@self_test("backend='ddp'", instead="use backend='fsdp'")
def _require_reported_reductions() -> bool:
    """A reducer raises until all of its parameters have gradients."""
    used: Any = torch.ones((), device="cpu", requires_grad=True)
    unused: Any = torch.ones((), device="cpu", requires_grad=True)
    reducer = dist.Reducer([used, unused], [[0, 1]], [2**20], dist.ProcessGroup(dist.HashStore(), 0, 1))
    reducer.prepare_for_backward([])
    reducer._check_reducer_finalized()
    unpatched_backward(used)
    try:
        reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


class DDPEngine(Engine):
    """Engine of a DistributedDataParallel, which this package or the user (`wrap=`) has constructed.

    Args:
        module: the DistributedDataParallel.
        local: the module that it wraps.
        broadcasts_buffers: whether all ranks get rank 0's buffers at the end of the block.
        hook: communication hook that this package has registered, which `traffic` reports; None: no such hook.
        changes: returns a context in which the model has the changes that the engine needs.
    """

    averages_gradients = True

    def __init__(
        self,
        module: DistributedDataParallel,
        *,
        local: nn.Module,
        broadcasts_buffers: bool,
        hook: CommHook | str | None = None,
        changes: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        _require_reported_reductions()
        self.module: DistributedDataParallel = module
        self.local = local
        self._broadcasts_buffers = broadcasts_buffers
        self._hook = hook
        self._changes = changes
        self._applied_changes = contextlib.ExitStack()
        self._applied_changes.enter_context(changes())
        self._first_iteration = FirstIteration(module) if module.static_graph else None

    @override
    def traffic(self) -> Traffic:
        ignored = set(self.module.parameters_to_ignore)
        named = [(name, each) for name, each in self.module.module.named_parameters() if each.requires_grad]
        averaged = [each for name, each in named if name not in ignored]
        if self._hook in HOOK_OF_DTYPE.values():
            return Traffic(sum(2 * each.numel() for each in averaged), f"all-reduced as {self._hook}")
        size_bytes = sum(each.nbytes for each in averaged)
        return Traffic(size_bytes, "passed to a comm hook") if self.module._comm_hooks else Traffic(size_bytes)

    @override
    def is_reduction_complete(self) -> bool:
        if self._first_iteration is not None and not self._first_iteration.is_over:
            return False
        try:
            self.module.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    @override
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        if self._first_iteration is not None and not self._first_iteration.is_over:
            # torch records the static graph in an iteration that averages, and aborts under no_sync. Averaging this
            # micro-batch too does not change the final average.
            return contextlib.nullcontext()
        return self.module.no_sync()

    @override
    def pause(self) -> Callable[[], None] | None:
        # A static graph is recorded by counting the hooks of parameters, also those of other engines' backward passes.
        if not self.is_reduction_complete():
            return None
        # After a forward whose backward has not run, the reducer reacts to every backward pass.
        self.module.reducer._reset_state()
        self._applied_changes.close()
        return self._resume

    def _resume(self) -> None:
        if self.module.find_unused_parameters and not self.module.static_graph:
            # While paused, the reducer has recorded which parameters other engines' backward passes have used.
            self.module.reducer._reset_state()
        self._applied_changes.enter_context(self._changes())

    @override
    def close(self, *, failed: bool) -> None:
        if self._first_iteration is not None:
            self._first_iteration.remove_hooks()
        # Otherwise the reducer's hooks stay on the AccumulateGrad nodes until the reducer is freed.
        self.module.reducer._remove_autograd_hooks()
        self._applied_changes.close()
        if not failed and self._broadcasts_buffers:
            broadcast_from_rank_0(list(self.local.buffers()))
        if not failed and self.module._comm_hooks:
            # A gloo thread may still hold the comm hook's last future, and with it the process group. During the
            # barrier the thread releases both: a group that its own thread destroys would abort the process.
            dist.barrier()


class _FrozenEngine(LocalEngine):
    """Engine of a model without trained parameters; the block replaces it once a parameter is unfrozen.

    Args:
        module: calls the user's forward.
        broadcasts_buffers: whether all ranks get rank 0's buffers at the end of the block.
    """

    averages_gradients = True

    def __init__(self, module: nn.Module, *, broadcasts_buffers: bool) -> None:
        super().__init__(module)
        self._broadcasts_buffers = broadcasts_buffers

    @override
    def close(self, *, failed: bool) -> None:
        if not failed and self._broadcasts_buffers:
            broadcast_from_rank_0(list(self.module.buffers()))


def build_ddp_engine(options: DDPOptions, module: nn.Module, *, inner: Inner, device: torch.device) -> Engine:
    """Wrap `module` in DistributedDataParallel, which broadcasts rank 0's parameters and buffers.

    Args:
        options: options of the backend.
        module: `inner`, or a DataParallel of it.
        inner: calls the user's forward.
        device: device of the parameters.

    Raises:
        ConfigError: the device or a parameter does not support the options.
    """
    refuse_unbroadcastable(inner.model, accepts_expanded=False)
    if not any(parameter.requires_grad for parameter in inner.parameters()):
        broadcast_from_rank_0([*inner.parameters(), *inner.buffers()])
        return _FrozenEngine(module, broadcasts_buffers=options.broadcast_buffers)
    hook = options.comm_hook or HOOK_OF_DTYPE.get(inner.session.communication_dtype)  # type: ignore[arg-type]  # get(None) returns None
    powersgd = {"powersgd_rank": options.powersgd_rank, "powersgd_start": options.powersgd_start}
    state_and_hook = None if hook is None else build_comm_hook(inner.model, hook, **powersgd)
    newer: dict[str, Any] = {"batched_grad_copy": True} if options.batched_grad_copy else {}
    changes: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    if options.sync_batchnorm:
        changes = functools.partial(_sync_batchnorm, inner.model, device=device)
    with changes():
        replica = _DistributedDataParallel(
            module,
            process_group=separate_gloo_group(current_world()),
            init_sync=not inner.is_broadcast,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            bucket_cap_mb=options.bucket_cap_mb,
            **newer,
        )
    model = inner.model
    replica.is_training = lambda: options.broadcast_buffers and model.training
    if state_and_hook is not None:
        replica.register_comm_hook(*state_and_hook)
    return DDPEngine(replica, local=module, broadcasts_buffers=options.broadcast_buffers, hook=hook, changes=changes)


@contextlib.contextmanager
def _sync_batchnorm(model: nn.Module, *, device: torch.device) -> Iterator[None]:
    """Compute batch norm over all ranks inside the context: change the class of its modules to SyncBatchNorm."""
    if device.type == "cpu":
        raise ConfigError(
            "sync_batchnorm=True on cpu",
            why="torch.nn.SyncBatchNorm computes on GPUs only",
            fix="drop sync_batchnorm=, or use group or layer norm, which compute no batch statistics",
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
        for module, original_class in changed:
            module.__class__ = original_class
            del module.__dict__["process_group"]
