"""ModelContext, which `parallel_model` returns: `with` or `start()` begins its block.

    with parallel_model(model):         __enter__ ... __exit__
    parallel_model(model).start()       __enter__ ... __exit__ at the first of these:
                                            stop()
                                            the end of the decorated function
                                            the end of the process, without a decorated function

Before `with` or `start()`, the models are unchanged. A user who forgets both would train without
other ranks, so that this object refuses to be used as a model.
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
from parallelize.hang_detection.stack_frames import call_site
from parallelize.hang_detection.waiting import WaitKind, waiting_for
from parallelize.run import context
from parallelize.run.group_abort import is_interrupted
from parallelize.run.surroundings import surroundings

P = ParamSpec("P")
M = TypeVar("M")


class ModelContext(contextlib.AbstractContextManager[M], Generic[M]):
    """A block in which models run in parallel. It may begin several times, one after another.

    Args:
        begin: returns the context manager of a new block, which yields the model, or a tuple of
            models.
    """

    def __init__(self, begin: Callable[[], contextlib.AbstractContextManager[M]]) -> None:
        self._begin = begin
        # The line where the latest block begins: "train.py:11".
        self._line = ""
        # The blocks that have begun and not ended, the latest one last.
        self._open_blocks: list[contextlib.AbstractContextManager[M]] = []

    def __enter__(self) -> M:
        """Begin the block; return the model, or a tuple of the models."""
        block = self._begin()
        self._line = call_site()
        with waiting_for("parallel_model", wait_kind=WaitKind.CALL):
            models = block.__enter__()
        self._open_blocks.append(block)
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
            # Ctrl-C stops the ranks at different steps, and the user's code may have caught it. As
            # after any exception, the end of the block then waits for no rank.
            error_type, error = KeyboardInterrupt, KeyboardInterrupt()
        block = self._open_blocks.pop()
        with waiting_for("the end of the block", wait_kind=WaitKind.END_OF_BLOCK, block=self._line):
            is_suppressed = block.__exit__(error_type, error, traceback)
        if context.active() is None:
            # A decorated function removes this package's frames from the traceback of an error. In
            # a script without such a function, this is the last place to do so.
            folded_traceback.__exit__(error_type, error, traceback)
        return is_suppressed

    def start(self) -> M:
        """Begin the block; it ends with the decorated function, at `stop`, or with the process.

            model = parallel_model(model).start()

        Returns:
            The model, or a tuple of the models: the same objects.
        """
        models = self.__enter__()
        run = context.active()
        # In a plain script, the run is that of a block, whose end no decorated function marks.
        if run is None or not run.ends_of_calls:
            atexit.register(self._end_at_exit)
        else:
            run.ends_of_calls[-1].push(self._end)
        return models

    def stop(self) -> None:
        """End the block that `start` has begun; do nothing if it has ended.

        Raises:
            ConfigError: a block that has begun later is still open. It has to end first, because
                it restores the hooks and random states that it has found at its beginning.
        """
        if self._open_blocks and surroundings().script.open_blocks[-1] is not self:
            raise ConfigError(
                "stop() of a parallel_model block while one that has begun later goes on",
                why="that block has taken over the random numbers and hooks of this one",
                fix="stop the later one first, or begin both as one: "
                "parallel_model(model, other).start()",
            )
        self._end(None, None, None)

    def _end_at_exit(self) -> None:
        """End the block with the process, with the exception that ends the script, if there is one.

        After an exception of this rank, the other ranks may never come to the end of their blocks,
        so that the end of this block must not wait for them.
        """
        # The interpreter sets `last_value` to an exception that nobody has caught.
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
        """End all open blocks of this object, the latest one first."""
        while self._open_blocks:
            self.__exit__(error_type, error, traceback)

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse a call, as of a model."""
        self._refuse("is called")

    def __getattr__(self, name: str) -> Any:
        """Refuse to read an attribute, as of a model.

        Python and libraries look for special methods, such as `__deepcopy__`, and expect an
        AttributeError.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"has no attribute {name!r}")

    def __iter__(self) -> Iterator[Any]:
        """Refuse to be unpacked, as a tuple of models."""
        self._refuse("is unpacked")

    def _refuse(self, use: str) -> NoReturn:
        """Raise the error for a forgotten `with` or `.start()`.

        Args:
            use: what the user has done, to stand after "parallel_model(...)".
        """
        raise ConfigError(
            f"parallel_model(...) {use}",
            why="it is a context manager, and not the model",
            fix="write `with parallel_model(model):`, or `model = parallel_model(model).start()` "
            "without a block",
        )


def model_context(function: Callable[P, Iterator[M]]) -> Callable[P, ModelContext[M]]:
    """Decorate `parallel_model`, as contextlib.contextmanager does.

    A call returns a ModelContext, which has `start` and `stop`, too.
    """
    begin = contextlib.contextmanager(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> ModelContext[M]:
        return ModelContext(lambda: begin(*args, **kwargs))

    return call
