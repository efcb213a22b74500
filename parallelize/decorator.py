"""@distributed: decorator that runs each call of a function on all requested devices.

Where a call runs:

    in another decorated function, or in a block    in the processes of these: see `_run_inside`
    in a process that torchrun or such has started  in this process, which is one of the ranks
    for one process                                 in this process
    else                                            in new processes: see `_launch`

Glossary:

    options    what the user has written, and variables that override it: a `Config`
    layout     the processes and devices of a call, as the config and this machine give them
    task       the function with its arguments and its layout, to be sent to a worker
    queue      a launcher that submits calls as jobs to a cluster
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload

import wrapt

from parallelize.call.importable import is_importable
from parallelize.call.returned import bring_back
from parallelize.call.task import Call, Task, name_of
from parallelize.call.tracebacks import folded_traceback
from parallelize.cluster.devices import Hardware, probe
from parallelize.cluster.environment import detect
from parallelize.cluster.world import Node
from parallelize.comparison.compare import Comparison, compare_runs
from parallelize.config.config import Config
from parallelize.config.explain import explain
from parallelize.config.layout import Layout, place
from parallelize.config.options import Options
from parallelize.errors import ConfigError
from parallelize.launchers.batch_launcher import BatchLauncher
from parallelize.launchers.local.calling_process import calling_process
from parallelize.launchers.slurm.job import Job
from parallelize.plugins import registry
from parallelize.plugins.base import Launcher
from parallelize.plugins.options import count
from parallelize.run.context import Runtime, active
from parallelize.run.user_line import user_stacklevel
from parallelize.worker.in_process import gather_values, run_as_rank, run_in_this_process
from parallelize.worker.main import refuse_during_task_load
from parallelize.worker.preemption import handle_stop_signals

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


@overload
def distributed(function: Callable[P, R], /) -> DistributedFunction[P, R]: ...
@overload
def distributed(
    **options: Unpack[Options],
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]: ...
def distributed(function: Callable[P, R] | None = None, /, **options: Unpack[Options]) -> Any:
    """Decorate a function so that each call runs on all requested devices.

    Decorating starts no process and initializes no device. At the call, environment variables
    named `PARALLELIZE_<OPTION>` override the options given here.

    Every rank begins with the caller's states of the global random generators (torch, random,
    numpy), and rank 0 gives them back as the function has left them: the next call, and the caller,
    go on with the next random numbers, as after a plain call of the function. With `seed=`, a call
    draws the same numbers each time, and the caller's generators are left alone, as they are with
    `update_modules=False` and by a call that raises.

    Args:
        function: the function, for `@distributed` without options.
        **options: each is optional:

            - backend (str | Backend, "ddp"): how a model runs in parallel: "ddp", "fsdp", "dp",
              "ddp2", "balanced", "auto" for the first of "ddp" and "fsdp" that fits, or an object
              with options, such as `DDPBackend(bucket_cap_mb=50)`.
            - gpus (int | str | list, None): the GPUs of each node: a number, indices, "0,2", "auto"
              for all; None: all of them, or the CPU on a node without GPUs.
            - processes (int, None): number of processes per node, on the CPU; with gpus="auto" only
              where there are no GPUs; None: run on `gpus`.
            - num_nodes (int, None): number of machines; None: from the launcher's environment, else
              1.
            - amp (bool | str | Amp, None): mixed precision: True, "bf16", "fp16", a level "O0" to
              "O3", or an `Amp`.
            - amp_engine (str, "native"): "native" (torch.amp) or "apex".
            - seed (int, None): seed of the global random generators in each call; None: they go on
              from the caller's.
            - timeout (seconds | str | timedelta, "30min"): of each collective and of the
              rendezvous.
            - max_restarts (int, 0): how often all workers are restarted after a failure.
            - launcher (str | Launcher, None): how processes are started: `SlurmLauncher(...)`,
              `LocalLauncher(...)`; None: on this machine.
            - hosts (list | str, None): machines to run on, by ssh: "gpu1", or "gpu1:8" for 8 GPUs;
              see `SSHLauncher`.
            - logs (str | path, "rank0"): whose output is shown: "rank0", "all", or a directory for
              a file per rank.
            - process_group_backend (str, None): torch's name, such as "nccl", "gloo" or
              "cpu:gloo,cuda:nccl"; None: chosen by device.
            - init_connection (function, None): called with the World instead of
              `init_process_group`.
            - wrap (function, None): called with the module and the World, returns the module to run
              in parallel.
            - verify_every (int, 0): number of steps between comparisons of the parameters across
              ranks; 0: never.
            - logical (int, None): number of parts of a batch, at any number of processes, so that
              ddp trains the same bits on 1, 2, 4, ... of them: a multiple of their number by 1, 2,
              4, ...
            - update_modules (bool, True): whether modules, optimizers and other objects of the
              caller with a state, and the states of the global random generators, come back; with
              False, other changes that stay behind are not named either.

    Returns:
        A decorator, or the decorated function, which keeps its signature, name and docstring.

    Raises:
        ConfigError: options are invalid or exclude each other, or the decorated object is not a
            plain function.
    """

    def decorate(function: Callable[P, R]) -> DistributedFunction[P, R]:
        with folded_traceback:
            _check_is_plain_function(function)
        return DistributedFunction(function, config)

    with folded_traceback:
        config = Config.parse(**options)
        if function is None:
            return decorate
        return decorate(function)


class DistributedFunction(wrapt.CallableObjectProxy[Any], Generic[P, R]):
    """Proxy of a decorated function: calls run on all requested devices.

    Its attributes are those of the function, but for what this class defines, and for attributes
    with the prefix `_self_`, by which wrapt knows the proxy's own.
    """

    def __init__(self, function: Callable[P, R], config: Config) -> None:
        super().__init__(function)
        # Not in the body of the class: the class would have `__annotations__` then, and the proxy
        # would show them in place of the function's, to whatever reads type hints.
        self.__wrapped__: Callable[P, R]
        self._self_config = config

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function in every process of the layout.

        Modules, optimizers, generators and whatever has state_dict and load_state_dict get rank 0's
        state, in place, if the function reaches them by arguments, attributes, closures or globals.
        Other objects are copies; a warning names those that the function changed.

        Returns:
            Rank 0's return value, in every process that makes the call.

        Raises:
            ConfigError: the options do not fit this machine, or an argument or the return value
                cannot be pickled.
            WorkerError: a worker ended without raising an exception. A worker's exception is
                re-raised as it is.
            SystemExit: the function has called sys.exit() on all ranks.
        """
        with _boundary():
            value: R = self._run(args, kwargs, all_ranks=False)
        return value

    def all_ranks(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run the function in every process; return the values of all ranks, in rank order."""
        with _boundary():
            values: list[R] = self._run(args, kwargs, all_ranks=True)
        return values

    def options(self, **changes: Unpack[Options]) -> DistributedFunction[P, R]:
        """Return a copy of this function with some options replaced.

        Raises:
            ConfigError: the new options are invalid, or exclude options that are kept.
        """
        with folded_traceback:
            return type(self)(self.__wrapped__, self._self_config.changed(**changes))

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Submit a call as a job to the cluster's queue, and return immediately.

        The caller's modules and optimizers are not updated; to get trained weights, return them
        from the function.

        Raises:
            ConfigError: the launcher has no queue, an option that the job needs is missing, the
                queue refuses the job, or an argument cannot be pickled.
            LaunchError: the queue cannot be reached from this machine.
        """
        with folded_traceback:
            return self._submit([(args, kwargs)])[0]

    def submit_many(
        self, calls: Iterable[Mapping[str, Any]], *, at_most: int | None = None
    ) -> list[Job[R]]:
        """Submit several calls as one job array; raise the same errors as `submit`.

        Args:
            calls: keyword arguments of each call.
            at_most: how many jobs may run at the same time; None: no limit.
        """
        with folded_traceback:
            return self._submit([((), dict(kwargs)) for kwargs in calls], at_most=at_most)

    def sbatch_script(
        self, path: str | os.PathLike[str], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Write the job script that `submit(*args, **kwargs)` would submit.

        Raises the same errors as `submit`.
        """
        with folded_traceback:
            queue, (task,) = self._jobs([(args, kwargs)])
            queue.write_script(task, Path(path))

    def explain(self, *, gpus: int | None = None) -> str:
        """Return a text with the processes, devices and options of a call made now.

        It starts no process.

        Args:
            gpus: explain a call on a machine with so many GPUs; None: on this one.

        Raises:
            ConfigError: the call would be refused, or `gpus` is not a number of GPUs.
        """
        with folded_traceback:
            hardware = None if gpus is None else Hardware("cuda", count(0)("gpus", gpus))
            layout, queue = self._plan(hardware)
        return explain(layout, name=self._name, queue=queue.name if queue else None)

    def compare(self, steps: int, /, *args: P.args, **kwargs: P.kwargs) -> Comparison:
        """Run the first optimizer steps with one process and with the call's own, and compare them.

        Losses and weights are compared. Both runs use new processes, the same seed (0 if the
        function has none) and the same global batches: one process reads the batches of all ranks,
        merged by shard_loader. Until the last step, the function writes files as usual.

        Raises:
            ConfigError: the call would use one device or several nodes, or this process is part of
                a run.
            WorkerError: the function made no optimizer step.
        """
        with folded_traceback:
            refuse_during_task_load(self._name)
            layout = place(self._self_config.merged(os.environ), probe(), os.environ)
            launch = functools.partial(
                _worker_launcher(layout).launch, node=None, environ=os.environ
            )
            return compare_runs(self._call(args, kwargs, layout), steps=steps, launch=launch)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> DistributedFunction[P, R]: ...
    @overload
    def __get__(
        self: DistributedFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> DistributedFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a method to its instance or class, as plain functions do."""
        return type(self)(self.__wrapped__.__get__(instance, owner), self._self_config)

    def __copy__(self) -> DistributedFunction[P, R]:
        """Return this function itself, as a copy of a plain function does."""
        return self

    def __deepcopy__(self, _memo: object) -> DistributedFunction[P, R]:
        """Return this function itself, as a copy of a plain function does."""
        return self

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Pickle this function like a plain one: by its name, if this leads to it."""
        module = sys.modules.get(self.__module__)
        name = (self.__module__, self.__qualname__)
        if module is not None and self._is_equal_to(_resolve(*name)):
            return _resolve, name
        return DistributedFunction, (self.__wrapped__, self._self_config)

    def reduce_for_worker(self) -> tuple[Any, ...]:
        """Return how a call pickles it: by its name only if a worker can import the module."""
        if is_importable(sys.modules.get(self.__module__)):
            reduction: tuple[Any, ...] = self.__reduce_ex__(None)
            return reduction
        return DistributedFunction, (self.__wrapped__, self._self_config)

    def _is_equal_to(self, candidate: Any) -> bool:
        """Whether another function has the same function and options.

        They are compared by ==, because each access to a method of a class makes a new object.
        """
        if not isinstance(candidate, DistributedFunction):
            return False
        has_same_function: bool = candidate.__wrapped__ == self.__wrapped__
        return has_same_function and candidate._self_config == self._self_config

    def __dir__(self) -> list[str]:
        """List the attributes of the function, and what decorated functions have."""
        return sorted({*dir(self.__wrapped__), *vars(DistributedFunction)})

    @property
    def _name(self) -> str:
        """The name of the function, for messages."""
        return name_of(self.__wrapped__)

    def _plan(self, hardware: Hardware | None = None) -> tuple[Layout, BatchLauncher | None]:
        """Return the layout of a call made now, and the queue that it is submitted to, if any."""
        config = self._self_config.merged(os.environ)
        launcher = config.starter
        if isinstance(launcher, BatchLauncher) and detect(os.environ) is None:
            return launcher.plan(config), launcher
        return place(config, hardware or probe(), os.environ), None

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layout: Layout,
        *,
        all_ranks: bool = False,
    ) -> Call:
        """Return the call of this function with these arguments.

        A bound method is split into its function, which a worker can import by name, and its
        arguments including self.
        """
        function: Any = self.__wrapped__
        if isinstance(function, types.MethodType):
            args = (function.__self__, *args)
            function = function.__func__
        return Call(function, args, kwargs, layout, all_ranks)

    def _jobs(self, calls: Sequence[tuple[Any, Any]]) -> tuple[BatchLauncher, list[Task]]:
        """Return the queue, and the tasks of the jobs.

        Args:
            calls: positional and keyword arguments of each job.
        """
        config = self._self_config.merged(os.environ)
        queue = config.starter
        if not isinstance(queue, BatchLauncher):
            raise ConfigError(
                f"no queue for {self._name}: launcher={queue and queue.name!r}",
                why="only a batch launcher can submit a call as a job",
                fix="use @distributed(launcher=SlurmLauncher(partition=...)), or call it without "
                "submit",
            )
        layout = queue.plan(config)
        _warn(layout.warnings)
        return queue, [Task.of(self._call(args, kwargs, layout)) for args, kwargs in calls]

    def _submit(
        self, calls: Sequence[tuple[Any, Any]], *, at_most: int | None = None
    ) -> list[Job[R]]:
        refuse_during_task_load(self._name)
        if at_most is not None:
            at_most = count(1)("at_most", at_most)
        queue, tasks = self._jobs(calls)
        if not tasks:
            return []
        return queue.submit(tasks, at_most=at_most, environ=os.environ)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, all_ranks: bool) -> Any:
        """Make a call; return rank 0's value, or the list of all ranks' values."""
        run = active()
        if run is not None:
            return self._run_inside(run, args, kwargs, all_ranks=all_ranks)
        refuse_during_task_load(self._name)
        layout, queue = self._plan()
        _warn(layout.warnings)
        call = self._call(args, kwargs, layout, all_ranks=all_ranks)
        if queue is not None:
            return _launch(call, by=queue)
        with handle_stop_signals():
            if layout.world is not None:
                return run_as_rank(call, layout.world)
            if layout.world_size == 1:
                return run_in_this_process(call)
            return _launch(call, by=_worker_launcher(layout), node=layout.node)

    def _run_inside(
        self, run: Runtime, args: tuple[Any, ...], kwargs: dict[str, Any], *, all_ranks: bool
    ) -> Any:
        """Make a call in the processes of an active run, whatever the options of this function."""
        if run.state.is_in_block and run.world.world_size == 1:
            size = self._plan()[0].world_size
            if size > 1:
                raise ConfigError(
                    f"{self._name}, for {size} processes, in a parallel_model block of one process",
                    why="inside of a block a call runs where the block is",
                    fix="call it outside of the block, and write `with parallel_model(model):` "
                    "inside of the function",
                )
        function: Any = self.__wrapped__
        with run.ending_blocks():
            value = function(*args, **kwargs)
        if all_ranks:
            return gather_values(value)
        return value


# The names of options whose values users write without a name, in the order of the answer.
_NAMES_OF_VALUES = ("processes", "gpus", "backend", "launcher", "amp")
# What a function must not be, and how it is called in the message.
_NOT_PLAIN: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (inspect.iscoroutinefunction, "an async function"),
    (inspect.isasyncgenfunction, "an async function"),
    (inspect.isgeneratorfunction, "a generator function"),
    (inspect.isclass, "a class"),
)


def _check_is_plain_function(function: object) -> None:
    """Refuse what is no function, or one whose call returns no value from another process.

    Raises:
        ConfigError: it is no plain function. An option's value gets the name of the option.
    """
    inner = inspect.unwrap(function) if callable(function) else function
    inner = getattr(inner, "__func__", inner)  # of a class method
    for is_refused, description in _NOT_PLAIN:
        if is_refused(inner):
            raise ConfigError(
                f"@distributed on {description}: {getattr(inner, '__qualname__', inner)!r}",
                why="a call must run to completion in another process and return one value",
                fix="decorate a plain function (def) that returns its result",
            )
    if callable(inner):
        return
    written = []
    for name in _NAMES_OF_VALUES:
        with contextlib.suppress(ConfigError):
            Config.parse(**{name: inner})
            written.append(f"@distributed({name}={inner!r})")
    raise ConfigError(
        f"@distributed({inner!r:.80})",
        why="it is no function, and an option needs its name",
        fix=f"write {' or '.join(written) or '@distributed(name=value), above a function (def)'}",
    )


def _warn(texts: Iterable[str]) -> None:
    """Warn at the line of the user that has made the call."""
    for text in texts:
        warnings.warn(text, stacklevel=user_stacklevel())


def _boundary() -> contextlib.AbstractContextManager[None]:
    """Return the context of a call, which folds the tracebacks of exceptions that users see.

    Inside a run, hang detection reads the full traceback.
    """
    if active() is None:
        return folded_traceback
    return contextlib.nullcontext()


def _resolve(module: str, qualname: str) -> Any:
    """Return the object with a dotted name in a module; None if it does not exist."""
    resolved: Any = import_module(module)
    for part in qualname.split("."):
        resolved = getattr(resolved, part, None)
    return resolved


def _worker_launcher(layout: Layout) -> Launcher:
    """Return the launcher that starts workers on this node: no batch launcher, which queues."""
    launcher = layout.config.launcher
    if launcher is not None and not isinstance(launcher, BatchLauncher):
        return launcher
    local: Launcher = registry.find("launchers", "local")()
    return local


def _launch(call: Call, *, by: Launcher, node: Node | None = None) -> Any:
    """Make a call in new processes; what they have left comes back to the caller.

    Returns:
        Rank 0's value, or the list of all ranks' values.
    """
    _warn(
        f"{path} was edited after this program imported it: workers run the new code; start the "
        "program again"
        for path in calling_process.imported_files.edited()
    )
    task = Task.of(call)
    outcomes = by.launch(task, node=node, environ=os.environ)
    _warn(bring_back(task, outcomes))
    first = outcomes[0]
    # The program is interrupted, or ends, only now that what was trained has come back.
    if first.is_interrupted:
        signal.raise_signal(signal.SIGINT)
    if first.has_exited:
        raise SystemExit(0)
    if task.all_ranks:
        return [outcome.value for outcome in outcomes]
    return first.value
