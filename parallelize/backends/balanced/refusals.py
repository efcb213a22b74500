"""Errors for models, batches and calls that this backend does not support, and placeholders that raise them on use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from parallelize.errors import ConfigError
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import leaves

__all__ = [
    "CannotSplitError",
    "NoUnitsError",
    "UnjoinedOutput",
    "check_supported",
    "explained_split_failure",
    "not_sample_by_sample",
    "one_pipeline",
    "stateful",
    "too_large",
]


_NO_SPLIT = "use BalancedBackend(microbatches=1), which does not split batches, or backend='ddp'"
_NO_CACHE = "train a Hugging Face language model with model.config.use_cache = False"

_COMPOSABLE_CHECKPOINT = "torch.distributed._composable.checkpoint_activation"
# Names, since importing FSDP takes a second.
_UNSUPPORTED = {"DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "ScriptModule"}
_UNSUPPORTED |= {"SyncBatchNorm"}


class CannotSplitError(ConfigError):
    """A kind of batch of which micro-batches would not compute what the full batch does; such batches are not split."""

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(what, why=why, fix=f"{fix}; or {_NO_SPLIT}")


class NoUnitsError(ConfigError):
    """A forward that calls no submodules."""

    def __init__(self) -> None:
        super().__init__(
            "forward calls no submodules, so there is nowhere to split it",
            why="stages begin where a submodule is called",
            fix="use backend='ddp'",
        )


def check_supported(inner: Inner) -> None:
    """Check that the calls of the model's submodules can be followed.

    Raises:
        ConfigError: the model is compiled as a whole, or one of its modules is scripted or already parallel.
    """
    is_optimized = type(inner.model).__name__ == "OptimizedModule" or inner.model._compiled_call_impl is not None
    if is_optimized or not inner.is_replicable:
        raise ConfigError(
            "the model is compiled",
            why="calls of submodules inside a compiled graph cannot be followed, so it cannot be split into stages",
            fix="compile its blocks instead: for block in model.blocks: block.compile(); or use backend='ddp'",
        )
    for name, module in inner.model.named_modules():
        if any(kind.__name__ in _UNSUPPORTED and kind.__module__.startswith("torch.") for kind in type(module).__mro__):
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__}",
                why="it has its own threads, processes or graph, which cannot be split into stages",
                fix="use the plain module in its place, or backend='ddp'",
            )
        hooks = module._forward_pre_hooks.values()
        if any(getattr(hook, "__module__", "") == _COMPOSABLE_CHECKPOINT for hook in hooks):
            raise ConfigError(
                f"torch.distributed._composable.checkpoint of {name or 'the model'}",
                why="it stores the state of one forward on the module, and micro-batches run at the same time",
                fix="use BalancedBackend(recompute=True), or call torch.utils.checkpoint.checkpoint in forward",
            )


@contextlib.contextmanager
def explained_split_failure(
    dimensions: Mapping[str, int], *, run_whole: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Raise CannotSplitError for a forward that fails on a part of a batch, but not on the full batch.

    Args:
        dimensions: see `Batch.split_dims`.
        run_whole: runs the full batch, which raises the error if it is the user's.
    """
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        run_whole()
        listed = [f"{name} along dimension {dim}" for name, dim in dimensions.items()]
        raise CannotSplitError(
            f"forward fails on a part of the batch ({type(error).__name__}), but not on the full batch; split "
            f"arguments: {_shortened(listed, 4)}",
            why="every tensor as long as the first one is split along the batch, also inside lists; forward may need "
            "all samples of one of them",
            fix="pass a list of samples as one tensor; give tensors that are not per sample another length; set "
            "BalancedBackend(batch_dim=...); use no constant batch size in forward",
        ) from error


def _shortened(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def stateful(names: Sequence[str]) -> CannotSplitError:
    """Build the error for a forward that stores state on the model."""
    return CannotSplitError(
        f"forward changes {_shortened(names, 5)} of the model",
        why="micro-batches run at the same time, and would read each other's values",
        fix="pass such values between modules as arguments and return values",
    )


def one_pipeline(what: str) -> CannotSplitError:
    """Build the error for a forward that only the first of several pipelines can run."""
    return CannotSplitError(
        what, why="the other pipelines compute with copies of parameters and buffers", fix="use one pipeline"
    )


def not_sample_by_sample(what: str, difference: float) -> CannotSplitError:
    """Build the error for an output or a gradient of micro-batches that differs from that of the full batch."""
    return CannotSplitError(
        f"{what}, computed in micro-batches, differs from that of the full batch by {difference:.3g}",
        why="a sample's output depends on other samples; or an argument as long as the batch was split although it is "
        "not per sample; or the loss is not a mean over samples",
        fix="compute such a loss outside of the model; set BalancedBackend(batch_dim=...)",
    )


def too_large(needed_bytes: float, devices: Sequence[str], *, what: str = "the best split") -> ConfigError:
    """Build the error for a model that no split fits."""
    return ConfigError(
        f"the model does not fit on {', '.join(devices)}",
        why=f"{what} needs {needed_bytes / 2**20:.1f} MiB ({needed_bytes:.0f} bytes) on every device",
        fix="use more or larger devices or a smaller batch, raise memory=, or save memory: "
        "BalancedBackend(recompute='auto', optimizer_state=...)",
    )


class UnjoinedOutput:
    """Placeholder for an output that cannot be joined; raises CannotSplitError when it is used."""

    def __init__(self, what: str, why: str) -> None:
        self.__dict__["error"] = CannotSplitError(
            what,
            why=f"{why}, so they cannot be joined",
            fix="return tensors per sample, padded to one length, as by pad_packed_sequence(total_length=), or means "
            f"over samples (scalars); {_NO_CACHE}",
        )

    def __repr__(self) -> str:
        return f"<{str(self.__dict__['error']).splitlines()[0]}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # copy, pickle and isinstance look for optional methods
            raise AttributeError(name)
        self._raise()

    def _raise(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise self.__dict__["error"]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse an operation on the output."""
        del func, types
        next(leaf for leaf in leaves((args, kwargs or {})) if isinstance(leaf, cls))._raise()

    __getitem__ = __setitem__ = __setattr__ = __iter__ = __len__ = __bool__ = __call__ = __contains__ = _raise
    __float__ = __int__ = __index__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _raise
