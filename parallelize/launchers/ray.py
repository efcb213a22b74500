"""The Ray launcher: runs calls on a Ray cluster, with one actor per node.

caller      placement group, one bundle per node     task
              │                                        │
node 0..n   actor ── the default launcher: a process per device, on all nodes
              │                                        │
caller      outcomes, or the exception of the first    output, as Ray shows that of actors
            rank to fail; a lost node restarts the call
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
from parallelize.cluster.store import listen
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
    texts_by_name,
    variables,
)

_POLL_EVERY_S = 0.1
_STOP_TIMEOUT_S = 10.0  # for the actors of the other nodes, after the first one has returned

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
    """Runs each call on `num_nodes` nodes of a Ray cluster, with `gpus` GPUs each; `submit` does not wait for it.

    The nodes need this package, and the modules that the function imports: see `runtime_env`. A job ends with the
    process that has submitted it; to outlive that one, submit the script itself: `ray job submit -- python train.py`.

    Args:
        address: address of the cluster, as for ray.init: "auto" (the one that this machine belongs to) or
            "ray://<head>:10001" (from a laptop or a notebook, also to KubeRay). A connection that exists is used.
        cpus_per_task: cores of each process.
        resources: other resources of each node, as for Ray, such as {"accelerator_type:A100": 0.001}.
        strategy: Ray's placement strategy; "STRICT_SPREAD" uses a machine per node, "PACK" as few as possible.
        runtime_env: Ray's runtime environment of the nodes, such as {"working_dir": "."} or {"env_vars": {...}}.
    """

    name = "ray"
    option_parsers: ClassVar[Mapping[str, Parse]] = {
        "address": text,
        "cpus_per_task": count(1),
        "resources": texts_by_name(number(0), "{'accelerator_type:A100': 0.001}"),
        "strategy": choice("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
        "runtime_env": _runtime_env,
    }

    address: str | None = "auto"
    cpus_per_task: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: str = "STRICT_SPREAD"
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Submit the call, show the states of its job until the job ends, and return the outcomes."""
        del node, environ  # Ray chooses the nodes; runtime_env sets their variables
        job = _RayJob(task, self, shows=True)
        try:
            return job._wait(None)
        finally:
            job.cancel()

    def submit(
        self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]
    ) -> list[Any]:
        """Submit the calls; each waits in Ray's queue until the cluster has the resources."""
        del environ  # as in launch
        if at_most is not None and at_most < len(tasks):
            raise ConfigError(
                f"at_most={at_most} with launcher='ray'",
                why="Ray starts each job as soon as the cluster has its resources",
                fix="omit it, or limit the jobs by a resource of the cluster: RayLauncher(resources={'jobs': 1})",
            )
        return [_RayJob(task, self) for task in tasks]


class _RayJob(BatchJob[Any]):
    """A call that waits for the resources of a Ray cluster, or runs there; it ends with this process.

    Args:
        task: the call.
        launcher: what the call needs of the cluster.
        shows: whether its states are shown.

    Attributes:
        state: PENDING, while the cluster lacks the resources; RUNNING, COMPLETED, FAILED or CANCELLED.
    """

    def __init__(self, task: Task, launcher: RayLauncher, *, shows: bool = False) -> None:
        super().__init__(f"{task.name}-{secrets.token_hex(3)}", all_ranks=task.all_ranks)
        self.state, self._layout, self._launcher, self._shows = (
            "PENDING",
            task.layout,
            launcher,
            shows,
        )
        self._ray = _connected(launcher.address)
        self._call = NodeCall.of(task)
        self._found: list[Outcome] | BaseException = []
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
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def _run(self) -> None:
        """Make the call, again after a node was lost; in a thread of its own."""
        most = self._layout.config.max_restarts
        for restart in range(1, most + 2):
            try:
                self._found = self._attempt()
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for the result
                self._found = error
                if isinstance(error, LaunchError) and restart <= most:
                    _log.warning("restart %d of %d after LaunchError: %s", restart, most, error)
                    continue
            break
        self._show(
            "COMPLETED"
            if isinstance(self._found, list)
            else "CANCELLED"
            if self._is_cancelled
            else "FAILED"
        )

    def _attempt(self) -> list[Outcome]:
        """Run the call on actors of its own; return the outcomes, or raise what has ended it."""
        ray, launcher, layout = self._ray, self._launcher, self._layout
        gpus, cores = len(layout.indices), launcher.cpus_per_task * layout.local_world_size
        bundle = {"CPU": cores, **({"GPU": gpus} if gpus else {}), **launcher.resources}
        self._show("PENDING", f", for {layout.num_nodes} x {bundle}")
        # By itself, Ray sets OMP_NUM_THREADS to all cores of a node, which its ranks share; and with an actor it kills
        # the fork server, which would end the ranks.
        variables = {
            "OMP_NUM_THREADS": str(launcher.cpus_per_task),
            "RAY_kill_child_processes_on_worker_exit": "false",
            **launcher.runtime_env.get("env_vars", {}),
        }
        group = ray.util.placement_group([bundle] * layout.num_nodes, strategy=launcher.strategy)
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        kind = ray.remote(
            num_cpus=cores,
            num_gpus=gpus,
            resources=dict(launcher.resources),
            runtime_env={**launcher.runtime_env, "env_vars": variables},
        )(_NodeActor)
        actors = [
            kind.options(scheduling_strategy=place(group, node)).remote()
            for node in range(layout.num_nodes)
        ]
        try:
            address = actors[0].rendezvous.remote()
            key = secrets.token_hex(16)
            runs = [
                each.run.remote(self._call, address, node, key) for node, each in enumerate(actors)
            ]
            while not ray.wait(runs, timeout=_POLL_EVERY_S)[0]:
                if self._is_cancelled:
                    what = f"job {self.id} was cancelled and left no result"
                    raise WorkerError(what, why="by cancel() or Ctrl-C", fix="submit it again")
                if ray.wait([address], timeout=0)[0]:
                    self._show("RUNNING")
            ended, _ = ray.wait(runs, num_returns=len(runs), timeout=_STOP_TIMEOUT_S)
            result: bytes = ray.get(ended)[
                0
            ]  # of all nodes it is the same, but one that is gone has none
        except ray.exceptions.RayError as error:
            raise LaunchError(
                f"a node of job {self.id} is gone",
                why=" ".join(str(error).split())[:500],
                fix="see Ray's dashboard and logs; max_restarts= starts the call again on another node",
            ) from None
        finally:
            for actor in actors:
                ray.kill(actor)  # its ranks end with it
            ray.util.remove_placement_group(group)
        return outcomes_of(result)

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
        with listen(address, 0) as free:
            return address, int(free.getsockname()[1])

    def run(self, call: NodeCall, address: tuple[str, int], node: int, key: str) -> bytes:
        """Make the call; return what `outcomes_of` reads. The nodes hear nobody who does not know the key."""
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
            fix="start one, `ray start --head`, or use RayLauncher(address='ray://<head node>:10001')",
        ) from exc
    return ray
