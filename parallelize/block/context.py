"""ModelContext: what `parallel_model` returns. `start` begins its block without a `with`.

    with parallel_model(model):         __enter__ ... __exit__
    parallel_model(model).start()       __enter__ ... __exit__ at the first of
                                            stop()
                                            the end of the decorated function
                                            the end of the process, in a script without one

A context that is neither entered nor started has changed nothing: its use as a model is refused.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from parallelize.call.tracebacks import folded_traceback
from parallelize.errors import ConfigError
from parallelize.run import context
from parallelize.run.group_abort import is_interrupted
from parallelize.run.surroundings import surroundings

P = ParamSpec("P")
M = TypeVar("M")


class ModelContext(contextlib.AbstractContextManager[M], Generic[M]):
    """Block in which models run in parallel.

    `with parallel_model(model):`, or `parallel_model(model).start()`.

    Args:
        begin: returns the context manager of a new block, which yields the model, or a tuple of
            models.
    """

    def __init__(self, begin: Callable[[], contextlib.AbstractContextManager[M]]) -> None:
        self._begin = begin
        # Those that go on. The same object may be entered again after its block.
        self._blocks: list[contextlib.AbstractContextManager[M]] = []

    def __enter__(self) -> M:
        """Begin the block; return the model, or a tuple of the models."""
        block = self._begin()
        models = block.__enter__()
        self._blocks.append(block)
        surroundings().script.open_blocks.append(self)
        return models

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> bool | None:
        """End the block; the models are plain models again."""
        surroundings().script.open_blocks.remove(self)
        if error is None and is_interrupted():
            # Ranks have made different numbers of steps: the end of the block waits for no rank.
            error_type, error = KeyboardInterrupt, KeyboardInterrupt()
        is_suppressed = self._blocks.pop().__exit__(error_type, error, traceback)
        if context.active() is None:
            # In a script without a decorated function, which would fold it.
            folded_traceback.__exit__(error_type, error, traceback)
        return is_suppressed

    def start(self) -> M:
        """Begin the block; it ends with the decorated function, at `stop`, or with the process.

            model = parallel_model(model).start()

        Returns:
            The model, or a tuple of the models: the same objects.
        """
        # Asked first: the block of a plain script activates a run of its own.
        run = context.active()
        models = self.__enter__()
        if run is None:
            atexit.register(self._end_at_exit)
        else:
            run.at_end_of_call(self._end)
        return models

    def stop(self) -> None:
        """End the block that `start` has begun; no-op if it has ended.

        Raises:
            ConfigError: a block that has begun later goes on.
        """
        if self._blocks and surroundings().script.open_blocks[-1] is not self:
            raise ConfigError(
                "stop() of a parallel_model block while one that has begun later goes on",
                why="that block has taken over the random numbers and hooks of this one",
                fix="stop the later one first, or begin both as one: "
                "parallel_model(model, other).start()",
            )
        self._end(None, None, None)

    def _end_at_exit(self) -> None:
        """End the block with the process, by the exception that ends the script, if one does."""
        # Other ranks do not end by it, so that the end of the block may not wait for them.
        error = getattr(sys, "last_value", None)
        if error is None:
            self._end(None, None, None)
        else:
            self._end(type(error), error, error.__traceback__)

    def _end(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """End the block as often as it has begun; no-op if it has ended."""
        while self._blocks:
            self.__exit__(error_type, error, traceback)

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse the use as a model."""
        self._refuse("is called")

    def __getattr__(self, name: str) -> Any:
        """Refuse the use as a model."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"has no attribute {name!r}")

    def __iter__(self) -> Iterator[Any]:
        """Refuse the use as a tuple of models."""
        self._refuse("is unpacked")

    def _refuse(self, use: str) -> NoReturn:
        """Refuse a use of this object as the model: `with` or `.start()` was forgotten."""
        raise ConfigError(
            f"parallel_model(...) {use}",
            why="it is a context manager, and not the model",
            fix="write `with parallel_model(model):`, or `model = parallel_model(model).start()` "
            "without a block",
        )


def model_context(function: Callable[P, Iterator[M]]) -> Callable[P, ModelContext[M]]:
    """Decorate a generator function, as contextlib.contextmanager does.

    Calls return a ModelContext, which can also be started without a `with`.
    """
    begin = contextlib.contextmanager(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> ModelContext[M]:
        return ModelContext(lambda: begin(*args, **kwargs))

    return call
