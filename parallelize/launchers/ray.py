"""The Ray launcher: runs calls on a Ray cluster, with one actor per node.

    caller      a placement group, with a bundle for each node; an actor in each bundle
      │         the call, the address of node 0, and a key
    node 0..n   the default launcher: a process for each device, on all nodes
      │         its output, which Ray shows as that of actors
    caller      outcomes, or the exception of the first rank to fail

If a node is lost, the call is made again, on a new placement group, as often as `max_restarts=`.
"""

from __future__ import annotations

import logging
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from parallelize.call.outcome import Outcome
from parallelize.call.task import Task
from parallelize.cluster.store import free_port
from parallelize.cluster.world import Node
from parallelize.errors import ConfigError, LaunchError, MissingDependencyError, WorkerError
from parallelize.launchers.batch_launcher import BatchJob, BatchLauncher, NodeCall, outcomes_of
from parallelize.plugins.options import (
    Parse,
    choice,
    count,
    invalid,
    number,
    text,
    values_by_name,
    variables,
)

_POLL_EVERY_S = 0.1
_STOP_TIMEOUT_S = 10.0
"""For the actors of the other nodes, after the first one has returned."""

_log = logging.getLogger("parallelize")


def _runtime_env(name: str, value: Any) -> dict[str, Any]:
    """Parse a runtime environment, whose variables the launcher adds to; Ray checks the rest."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        fix = f"use {name}={{'working_dir': '.'}}"
        raise invalid(name, value, "it is no runtime environment", fix)
    environment = dict(value)
    if "env_vars" in environment:
        environment["env_vars"] = variables(f"{name}['env_vars']", environment["env_vars"])
    return environment


@dataclass(frozen=True, kw_only=True)
class RayLauncher(BatchLauncher):
    """Runs each call on `num_nodes` nodes of a Ray cluster, with `gpus` GPUs each.

    `submit` does not wait for the call. The nodes need this package, and the modules that the
    function imports: see `runtime_env`. A job ends with the process that has submitted it; to
    outlive that one, submit the script itself: `ray job submit -- python train.py`.

    Args:
        address: address of the cluster, as for ray.init: "auto" (the one that this machine belongs
            to) or `"ray://<head>:10001"` (from a laptop or a notebook, also to KubeRay). A
            connection that exists is used.
        cpus_per_task: cores of each process.
        resources: other resources of each node, as for Ray, such as
            {"accelerator_type:A100": 0.001}.
        strategy: Ray's placement strategy; "STRICT_SPREAD" uses a machine per node, "PACK" as few
            as possible.
        runtime_env: Ray's runtime environment of the nodes, such as {"working_dir": "."} or
            {"env_vars": {...}}.
    """

    name = "ray"
    option_parsers: ClassVar[Mapping[str, Parse]] = {
        "address": text,
        "cpus_per_task": count(1),
        "resources": values_by_name(number(0), "{'accelerator_type:A100': 0.001}"),
        "strategy": choice("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
        "runtime_env": _runtime_env,
    }

    address: str | None = "auto"
    cpus_per_task: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: str = "STRICT_SPREAD"
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Submit the call, show the states of its job until it ends, and return the outcomes."""
        # Ray chooses the nodes, and runtime_env sets their variables.
        del node, environ
        job = _RayJob(task, self, shows=True)
        try:
            return job._wait(None)
        finally:
            job.cancel()

    def submit(
        self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]
    ) -> list[Any]:
        """Submit the calls; each waits in Ray's queue until the cluster has the resources."""
        # As in `launch`.
        del environ
        if at_most is not None and at_most < len(tasks):
            raise ConfigError(
                f"at_most={at_most} with launcher='ray'",
                why="Ray starts each job as soon as the cluster has its resources",
                fix="omit it, or limit the jobs by a resource of the cluster: "
                "RayLauncher(resources={'jobs': 1})",
            )
        return [_RayJob(task, self) for task in tasks]


class _RayJob(BatchJob[Any]):
    """A call that waits for the resources of a Ray cluster, or runs there.

    It ends with this process. A thread makes it:

        PENDING ──> RUNNING ──> COMPLETED     the call has returned
           ^           │  └───> FAILED        it has raised an exception
           └───────────┘                      a node is lost, and a restart is left
        PENDING, RUNNING ─────> CANCELLED

    Args:
        task: the call.
        launcher: what the call needs of the cluster.
        shows: whether its states are shown.

    Attributes:
        state: one of these. PENDING: the cluster lacks the resources.
    """

    def __init__(self, task: Task, launcher: RayLauncher, *, shows: bool = False) -> None:
        super().__init__(f"{task.name}-{secrets.token_hex(3)}", all_ranks=task.all_ranks)
        self.state = "PENDING"
        self._layout = task.layout
        self._launcher = launcher
        self._shows = shows
        self._ray = _connected(launcher.address)
        self._call = NodeCall.of(task)
        self._outcomes = list[Outcome]()
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._thread = threading.Thread(target=self._run, name="parallelize-ray", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Return whether the job has ended."""
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Stop the job, waiting or running; do nothing if it has ended."""
        self._is_cancelled = True
        self._thread.join()

    def _wait(self, timeout_s: float | None) -> list[Outcome]:
        self._thread.join(timeout_s)
        if not self.done():
            raise TimeoutError(
                f"job {self.id} has no result after {timeout_s:g} s; it is {self.state}"
            )
        if self._error is not None:
            raise self._error
        return self._outcomes

    def _run(self) -> None:
        """Make the call, again after a node was lost; the thread does this."""
        max_restarts = self._layout.config.max_restarts
        restarts = 0
        while True:
            try:
                self._outcomes = self._attempt()
            except BaseException as error:  # noqa: BLE001 - `_wait` raises it again
                self._error = error
            else:
                self._show("COMPLETED")
                return
            if not isinstance(self._error, LaunchError) or restarts == max_restarts:
                break
            restarts += 1
            _log.warning(
                "restart %d of %d after LaunchError: %s", restarts, max_restarts, self._error
            )
            self._error = None
        self._show("CANCELLED" if self._is_cancelled else "FAILED")

    def _attempt(self) -> list[Outcome]:
        """Run the call on actors of its own; return the outcomes, or raise what has ended it."""
        ray = self._ray
        strategy_class = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        bundle = self._bundle()
        num_nodes = self._layout.num_nodes
        self._show("PENDING", f", for {num_nodes} x {bundle}")
        group = ray.util.placement_group([bundle] * num_nodes, strategy=self._launcher.strategy)
        actors: list[Any] = []
        try:
            actor_class = self._actor_class()
            for node in range(num_nodes):
                in_bundle = actor_class.options(scheduling_strategy=strategy_class(group, node))
                actors.append(in_bundle.remote())
            results = self._results(actors)
        except ray.exceptions.RayError as error:
            raise LaunchError(
                f"a node of job {self.id} is gone",
                why=" ".join(str(error).split())[:500],
                fix="see Ray's dashboard and logs; max_restarts= starts the call again on another "
                "node",
            ) from None
        finally:
            # The ranks of an actor end with it.
            for actor in actors:
                ray.kill(actor)
            ray.util.remove_placement_group(group)
        return outcomes_of(results)

    def _bundle(self) -> dict[str, float]:
        """Return what each node needs of the cluster."""
        bundle: dict[str, float] = {"CPU": self._cores()}
        gpus = len(self._layout.indices)
        if gpus:
            bundle["GPU"] = gpus
        return {**bundle, **self._launcher.resources}

    def _cores(self) -> int:
        return self._launcher.cpus_per_task * self._layout.local_world_size

    def _actor_class(self) -> Any:
        """Return Ray's class of the actors, with what each of them needs."""
        launcher = self._launcher
        # By itself, Ray sets OMP_NUM_THREADS to all cores of a node, which its ranks share; and
        # with an actor it kills the fork server, which would end the ranks.
        environment = {
            "OMP_NUM_THREADS": str(launcher.cpus_per_task),
            "RAY_kill_child_processes_on_worker_exit": "false",
            **launcher.runtime_env.get("env_vars", {}),
        }
        ray_class: Any = self._ray.remote(
            num_cpus=self._cores(),
            num_gpus=len(self._layout.indices),
            resources=dict(launcher.resources),
            runtime_env={**launcher.runtime_env, "env_vars": environment},
        )
        return ray_class(_NodeActor)

    def _results(self, actors: Sequence[Any]) -> list[bytes]:
        """Make the call on the actors; return the results of those that have ended.

        Raises:
            WorkerError: the job was cancelled.
        """
        ray = self._ray
        address = actors[0].rendezvous.remote()
        # The ranks sign with this key what they send each other. Ray carries it with the call.
        key = secrets.token_hex(16)
        runs = []
        for node, actor in enumerate(actors):
            runs.append(actor.run.remote(self._call, address, node, key))
        while not ray.wait(runs, timeout=_POLL_EVERY_S)[0]:
            if self._is_cancelled:
                raise WorkerError(
                    f"job {self.id} was cancelled and left no result",
                    why="by cancel() or Ctrl-C",
                    fix="submit it again",
                )
            if ray.wait([address], timeout=0)[0]:
                self._show("RUNNING")
        ended, _running = ray.wait(runs, num_returns=len(runs), timeout=_STOP_TIMEOUT_S)
        # A node that is gone raises a RayError here, if it was the first to end.
        results: list[bytes] = ray.get(ended)
        return results

    def _show(self, state: str, needs: str = "") -> None:
        if self._shows and (state != self.state or needs):
            sys.stderr.write(f"ray job {self.id}: {state}{needs}\n")
        self.state = state


class _NodeActor:
    """Runs the call on one node of the cluster, by the default launcher."""

    def rendezvous(self) -> tuple[str, int]:
        """Return this node's address and a free port."""
        import ray

        address = str(ray.util.get_node_ip_address())
        return address, free_port(address)

    def run(self, call: NodeCall, address: tuple[str, int], node: int, key: str) -> bytes:
        """Make the call; return what `outcomes_of` reads.

        Values that ranks send each other are not read if they were not sent with the key.
        """
        return call.run(Node(*address, node), key=key)


def _connected(address: str | None) -> Any:
    """Return Ray's package, connected to a cluster."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as exc:
        raise MissingDependencyError(
            "ray is not installed",
            why="launcher='ray' runs calls on Ray",
            fix="pip install 'parallelize[ray]'",
        ) from exc
    try:
        if not ray.is_initialized():
            ray.init(address=address, logging_level="warning")
    except (ConnectionError, ValueError) as exc:
        raise LaunchError(
            f"no Ray cluster at address={address!r}",
            why=str(exc).partition("\n")[0],
            fix="start one, `ray start --head`, or use "
            "RayLauncher(address='ray://<head node>:10001')",
        ) from exc
    return ray
