"""@distributed: a plain function whose calls run on every device."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist
import wrapt
from typing_extensions import Never, Unpack

from parallelize.call.module_sync import bring_back, modules_in
from parallelize.call.task import Outcome, Task, is_importable, name_of
from parallelize.cluster.devices import probe
from parallelize.cluster.world import Node, World, detect
from parallelize.config.config import Config
from parallelize.config.explain import explanation
from parallelize.config.layout import Layout
from parallelize.config.options import Options
from parallelize.config.placement import Placement, place
from parallelize.errors import ConfigError
from parallelize.launchers.batch_launcher import Queue
from parallelize.launchers.slurm.job import Job
from parallelize.plugins.base import Launcher
from parallelize.runtime.context import active
from parallelize.worker.main import entered, refuse_while_reading
from parallelize.worker.preemption import heeding

__all__ = ["DistributedFunction", "distributed"]

_DEFAULT_LAUNCHER = "elastic"

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


def distributed(*misplaced: Never, **options: Unpack[Options]) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    """Make calls of a function run on all devices asked for, as if it were called once.

    Decorating is inert: no process starts, no device is touched, nothing is read. At the call, the environment's
    PARALLELIZE_<OPTION> variables win over the options given here.

    A call takes nothing from the caller's generators of random numbers. In one process it begins with their state, in
    which they are afterwards, too: so without a seed a second call there draws the same numbers again.

    Args:
        **options: as `Config` describes them: `backend`, `gpus`, `processes`, `num_nodes`, `amp`, `amp_engine`, `seed`,
            `timeout`, `max_restarts`, `launcher`, `logs`, `process_group_backend`, `init_connection`, `wrap`,
            `verify_every`, `update_modules`.
        *misplaced: nothing; what is given without a name is refused.

    Returns:
        A decorator. What it returns has the function's signature, name and docstring, and is called like it.

    Raises:
        ConfigError: the options cannot work, whatever the machine; or (when it decorates) no plain function.
    """
    if misplaced:
        given = ", ".join(map(name_of, misplaced))
        raise ConfigError(
            f"distributed({given})",
            why="every option has a name, and the function comes after them",
            fix="write @distributed() with its parentheses above the function, or distributed(...)(function)",
        )
    config = Config.parse(**options)

    def decorate(function: Callable[P, R]) -> DistributedFunction[P, R]:
        _check(function)
        return DistributedFunction(function, config)

    return decorate


def _check(function: object) -> None:
    inner = inspect.unwrap(function) if callable(function) else function
    inner = inner.__func__ if isinstance(inner, (classmethod, staticmethod)) else inner
    kinds = {
        "an async function": inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner),
        "a generator function": inspect.isgeneratorfunction(inner),
        "a class": inspect.isclass(inner),
        f"a {type(inner).__name__}": not callable(inner),
    }
    for kind, is_so in kinds.items():
        if is_so:
            raise ConfigError(
                f"@distributed on {kind}: {getattr(inner, '__qualname__', inner)!r}",
                why="a call must run to its end in another process and return one value",
                fix="decorate a plain function (def) that returns its result",
            )


class DistributedFunction(wrapt.CallableObjectProxy[Any], Generic[P, R]):
    """A function whose calls run on every device of its options; in all else, the function."""

    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], config: Config) -> None:
        super().__init__(function)
        self._self_config = config

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run in every process of the layout.

        Returns:
            Rank 0's value, on every rank and node.

        Raises:
            ConfigError: the request does not fit this machine, or something cannot travel to another process.
            WorkerError: a worker ended without an exception of its own; else whatever the first to fail raised.
        """
        value: R = self._run(args, kwargs, all_ranks=False)
        return value

    def all_ranks(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """As a call, but every rank's value, in rank order."""
        values: list[R] = self._run(args, kwargs, all_ranks=True)
        return values

    def options(self, **changes: Unpack[Options]) -> DistributedFunction[P, R]:
        """The same function with other options; this one keeps its own.

        Raises:
            ConfigError: the changed options cannot work.
        """
        return type(self)(self.__wrapped__, self._self_config.changed(**changes))

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Queue a call and return at once.

        Modules among the arguments do not come back trained: return them, or their weights.

        Raises:
            ConfigError: the launcher queues nothing, the request leaves open what it must be asked for, it refuses the
                job, or something cannot travel.
            LaunchError: the queue cannot be reached from this machine.
        """
        return self._submitted([(args, kwargs)])[0]

    def submit_many(self, calls: Iterable[Mapping[str, Any]], *, at_most: int | None = None) -> list[Job[R]]:
        """Queue a call for each of `calls`, as one array of jobs; raises as `submit` does.

        Args:
            calls: the keyword arguments of each call.
            at_most: how many may run at the same time; None: as many as there is room for.
        """
        return self._submitted([((), dict(kwargs)) for kwargs in calls], at_most=at_most)

    def sbatch_script(self, path: str | os.PathLike[str], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Write the job script that `submit(*args, **kwargs)` would queue; raises as it does."""
        queue, config = self._queue()
        queue.write_script(self._queued(queue, config, args, kwargs), Path(path))

    def explain(self) -> str:
        """What a call would do here and now, as text; starts nothing.

        Raises:
            ConfigError: a call would be refused.
        """
        name, launcher = name_of(self.__wrapped__), self._self_config.merged(os.environ).launcher
        if isinstance(launcher, Queue) and detect(os.environ) is None:
            return explanation(launcher.plan(self._queue()[1]), None, name=name, queue=launcher.name)
        placement = self._placement()
        return explanation(placement.layout, placement.world, name=name)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> DistributedFunction[P, R]: ...
    @overload
    def __get__(
        self: DistributedFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> DistributedFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: bound like the function itself."""
        return type(self)(self.__wrapped__.__get__(instance, owner), self._self_config)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        # By name where the name leads here, as functions do; else function and options, for a pickler that can.
        home = sys.modules.get(self.__module__)
        if home and is_importable(home) and self._is_same(_named(self.__module__, self.__qualname__)):
            return _named, (self.__module__, self.__qualname__)
        return DistributedFunction, (self.__wrapped__, self._self_config)

    def _is_same(self, found: Any) -> bool:
        # A class gives its methods anew at every look.
        is_one = isinstance(found, DistributedFunction)
        return is_one and (found.__wrapped__, found._self_config) == (self.__wrapped__, self._self_config)

    def _placement(self) -> Placement:
        return place(self._self_config.merged(os.environ), probe(), os.environ)

    def _queue(self) -> tuple[Queue, Config]:
        config = self._self_config.merged(os.environ)
        if not isinstance(config.launcher, Queue):
            raise ConfigError(
                f"{name_of(self.__wrapped__)} has no queue: launcher={config.launcher and config.launcher.name!r}",
                why="only a launcher of a cluster can take a call and run it later",
                fix="use @distributed(launcher=SlurmLauncher(partition=...)), or call it without submit",
            )
        return config.launcher, config

    def _queued(self, queue: Queue, config: Config, args: Any, kwargs: Any, *, all_ranks: bool = False) -> Task:
        layout = queue.plan(config)
        for warning in layout.warnings:
            warnings.warn(warning, stacklevel=4)
        return Task(*_unbound(self.__wrapped__, args), kwargs, layout, all_ranks)

    def _submitted(self, calls: Sequence[tuple[Any, Any]], *, at_most: int | None = None) -> list[Job[R]]:
        refuse_while_reading(name_of(self.__wrapped__))
        queue, config = self._queue()
        tasks = [self._queued(queue, config, args, kwargs) for args, kwargs in calls]
        return queue.submit(tasks, at_most=at_most, environ=os.environ) if tasks else []

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, all_ranks: bool) -> Any:
        function: Any = self.__wrapped__
        if active() is not None:
            value = function(*args, **kwargs)
            return _everyones(value) if all_ranks else value
        refuse_while_reading(name_of(function))
        config = self._self_config.merged(os.environ)
        if isinstance(config.launcher, Queue) and detect(os.environ) is None:
            task = self._queued(config.launcher, config, args, kwargs, all_ranks=all_ranks)
            return _launch(task, by=config.launcher)
        placement = self._placement()
        layout, world = placement.layout, placement.world
        for warning in layout.warnings:
            warnings.warn(warning, stacklevel=3)
        task = Task(*_unbound(function, args), kwargs, layout, all_ranks)
        with heeding():
            if world is not None:
                return _join(task, world)
            if layout.world_size == 1:
                return _run_here(task)
            return _launch(task, by=_launcher_of(layout.config), node=placement.node)


def _named(module: str, qualname: str) -> Any:
    """What a dotted name in a module means; None if nothing."""
    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _unbound(function: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A bound method as its function and self; a worker finds the function by its name."""
    is_method = isinstance(function, types.MethodType)
    return (function.__func__, (function.__self__, *args)) if is_method else (function, args)


def _launcher_of(config: Config) -> Launcher:
    """What starts processes here; a queue does not, and this is a process of a job of it already."""
    launcher = config.launcher
    if launcher is None or launcher.queues:
        launcher = Config.parse(launcher=_DEFAULT_LAUNCHER).launcher
        assert launcher is not None
    return launcher


def _launch(task: Task, *, by: Launcher, node: Node | None = None) -> Any:
    """In processes of their own; modules among the arguments come back trained."""
    outcomes: Sequence[Outcome] = by.launch(task, node=node, environ=os.environ)
    for module, trained in zip(modules_in(task.args, task.kwargs), outcomes[0].trained, strict=False):
        bring_back(module, trained)
    return [outcome.value for outcome in outcomes] if task.all_ranks else outcomes[0].value


def _join(task: Task, world: World) -> Any:
    """A launcher has placed this process: be the rank it says."""
    with entered(task.layout, world):
        value = task.function(*task.args, **task.kwargs)
        return _everyones(value) if task.all_ranks else _of_rank_0(value)


def _of_rank_0(value: object) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _everyones(value: object) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _run_here(task: Task) -> Any:
    """One device needs no other process: debuggers, profilers and tracebacks work."""
    with _random_as_before(task.layout), entered(task.layout, World()):
        value = task.function(*task.args, **task.kwargs)
    return [value] if task.all_ranks else value


@contextlib.contextmanager
def _random_as_before(layout: Layout) -> Iterator[None]:
    """The generators that a call in another process would have left alone."""
    python = random.getstate()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    indices = layout.indices if layout.device_type == "cuda" else ()
    with torch.random.fork_rng(devices=indices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                sys.modules["numpy"].random.set_state(numpy)
