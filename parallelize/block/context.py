"""ModelContext: the context manager that `parallel_model` returns; `start` begins its block without a `with`."""

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

__all__ = ["ModelContext", "model_context"]

P = ParamSpec("P")
M = TypeVar("M")

_open: list[Any] = []  # contexts of this process, in the order of their beginning


class ModelContext(contextlib.AbstractContextManager[M], Generic[M]):
    """Block in which models run in parallel: `with parallel_model(model):`, or `parallel_model(model).start()`.

    Args:
        enter: returns the context manager of a new block, which yields the model, or a tuple of models.
    """

    def __init__(self, enter: Callable[[], contextlib.AbstractContextManager[M]]) -> None:
        self._enter = enter
        self._entered: list[contextlib.AbstractContextManager[M]] = []

    def __enter__(self) -> M:
        """Begin the block; return the model, or a tuple of the models."""
        block = self._enter()
        models = block.__enter__()
        self._entered.append(block)
        _open.append(self)
        return models

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> bool | None:
        """End the block; the models are plain models again."""
        _open.remove(self)
        if error is None and is_interrupted():  # ranks have made different numbers of steps
            kind, error = KeyboardInterrupt, KeyboardInterrupt()
        is_suppressed = self._entered.pop().__exit__(kind, error, traceback)
        if context.active() is None:  # a script without a decorated function
            folded_traceback.__exit__(kind, error, traceback)
        return is_suppressed

    def start(self) -> M:
        """Begin the block, and end it when the decorated function returns, at `stop`, or when the process ends.

            model = parallel_model(model).start()

        Returns:
            The model, or a tuple of the models: the same objects.
        """
        run = context.active()  # before a block of a plain script has a run of its own
        models = self.__enter__()
        if run is None:
            atexit.register(self._end_at_exit)
        else:
            run.at_end.push(self._end)
        return models

    def stop(self) -> None:
        """End the block that `start` has begun; no-op if it has ended.

        Raises:
            ConfigError: a block that has begun later goes on.
        """
        if self._entered and _open[-1] is not self:
            raise ConfigError(
                "stop() of a parallel_model block while one that has begun later goes on",
                why="that block has taken over the random numbers and hooks of this one",
                fix="stop the later one first, or begin both as one: parallel_model(model, other).start()",
            )
        self._end(None, None, None)

    def _end_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # the exception that ends this script: other ranks do not end it
        self._end(error and type(error), error, error and error.__traceback__)

    def _end(self, *error: Any) -> None:
        while self._entered:
            self.__exit__(*error)

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

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"parallel_model(...) {what}",
            why="it is a context manager, and not the model",
            fix="write `with parallel_model(model):`, or `model = parallel_model(model).start()` without a block",
        )


def model_context(function: Callable[P, Iterator[M]]) -> Callable[P, ModelContext[M]]:
    """Decorate a generator function, as contextlib.contextmanager does; calls return a ModelContext."""
    enter = contextlib.contextmanager(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> ModelContext[M]:
        return ModelContext(lambda: enter(*args, **kwargs))

    return call
