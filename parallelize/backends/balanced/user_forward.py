"""The user's forward, as a micro-batch calls it and as a whole batch does."""

from __future__ import annotations

from typing import Any

from parallelize.backends.balanced.microbatch_run import active
from parallelize.backends.balanced.stage_parameters import Half
from parallelize.plugins.base import Inner

__all__ = ["Forward"]


class Forward:
    """Calls the user's forward in the block's precision.

    Where a level has weights in half precision (O2), a whole batch has them cast on the model; micro-batches, which run
    at the same time, each cast the shadows that they use.

    Args:
        inner: of the block.
    """

    def __init__(self, inner: Inner) -> None:
        self._inner = inner
        dtype, apart = inner.session.weights_dtype, inner.session.fp32_modules
        self.half = None if dtype is None else Half.of(inner.model, dtype, apart)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch, or for the micro-batch that this thread runs."""
        return self._inner(*args, **kwargs) if active() is None else self._inner.with_weights(*args, **kwargs)
