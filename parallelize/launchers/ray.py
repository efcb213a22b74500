"""The Ray launcher: runs calls on a Ray cluster, with one actor per node.

caller      placement group, one bundle per node     task                   output
              │                                        │                      │
node 0..n   actor ── the default launcher: a process per device, on all nodes ┘
              │
caller      outcomes, or the exception of the first rank to fail; a lost node restarts the call
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import logging
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parallelize.call.settings import LogSettings, Settings
from parallelize.call.task import Outcome, Task
from parallelize.cluster.devices import probe
from parallelize.cluster.world import Node, World
from parallelize.config.layout import compute_layout
from parallelize.errors import ConfigError, LaunchError, MissingDependencyError, WorkerError
from parallelize.launchers.batch_launcher import BatchJob, BatchLauncher
from parallelize.plugins import registry

__all__ = ["RayLauncher"]

_POLL_EVERY_S = 0.1
_STOP_TIMEOUT_S = 10.0  # for the actors of the other nodes, after the first one has returned

_log = logging.getLogger("parallelize")


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

    address: str | None = "auto"
    cpus_per_task: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: str = "STRICT_SPREAD"
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Submit the call, show the state and output of its job until the job ends, and return the outcomes."""
        del node, environ  # Ray chooses the nodes; runtime_env sets their variables
        job = _RayJob(task, self, shows=True)
        try:
            return job._wait(None)
        finally:
            job.cancel()

    def submit(self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]) -> list[Any]:
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
        shows: whether its states and its output are shown.

    Attributes:
        state: PENDING, while the cluster lacks the resources; RUNNING, COMPLETED, FAILED or CANCELLED.
    """

    def __init__(self, task: Task, launcher: RayLauncher, *, shows: bool = False) -> None:
        super().__init__(f"{task.name}-{secrets.token_hex(3)}", all_ranks=task.all_ranks)
        self.state, self._layout, self._launcher, self._shows, self._text = "PENDING", task.layout, launcher, shows, ""
        self._ray = _connected(launcher.address)
        with tempfile.NamedTemporaryFile() as file:
            task.write(Path(file.name))
            self._call = Path(file.name).read_bytes(), Settings.capture(), LogSettings.capture()
        self._future, self._is_cancelled = concurrent.futures.Future[list[Outcome]](), threading.Event()
        threading.Thread(target=self._run, name="parallelize-ray", daemon=True).start()

    def done(self) -> bool:
        """Return whether the job has ended."""
        return self._future.done()

    def logs(self) -> str:
        """Return the job's output so far."""
        return self._text

    def cancel(self) -> None:
        """Stop the job, waiting or running; do nothing if it has ended."""
        self._is_cancelled.set()
        concurrent.futures.wait([self._future])

    def _wait(self, timeout_s: float | None) -> list[Outcome]:
        if not concurrent.futures.wait([self._future], timeout_s).done:
            raise TimeoutError(f"job {self.id} has no result after {timeout_s:g} s; it is {self.state}")
        return self._future.result()

    def _run(self) -> None:
        """Make the call, again after a node was lost; in a thread of its own."""
        most = self._layout.config.max_restarts
        for restart in range(1, most + 2):
            try:
                outcomes = self._attempt()
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for the result
                if isinstance(error, LaunchError) and restart <= most:
                    _log.warning("restart %d of %d after LaunchError: %s", restart, most, error)
                    continue
                self._show("CANCELLED" if self._is_cancelled.is_set() else "FAILED")
                self._future.set_exception(error)
            else:
                self._show("COMPLETED")
                self._future.set_result(outcomes)
            return

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
            max_concurrency=2,  # `run` and `read`
        )(_NodeActor)
        actors = [kind.options(scheduling_strategy=place(group, node)).remote() for node in range(layout.num_nodes)]
        try:
            address = actors[0].rendezvous.remote()
            runs = [each.run.remote(*self._call, address, node) for node, each in enumerate(actors)]
            outcome = Outcome.read(self._follow(runs, actors, address))
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
        if outcome.error is not None:
            raise outcome.error
        outcomes: list[Outcome] = outcome.value
        return outcomes

    def _follow(self, runs: Sequence[Any], actors: Sequence[Any], address: Any) -> bytes:
        """Show the output until the first node returns: all nodes return the same outcomes, or the same error."""
        wait, shown, is_over = self._ray.wait, [0] * len(actors), False
        while not is_over:
            is_over = bool(wait(runs, timeout=_POLL_EVERY_S)[0])
            if is_over:
                wait(runs, num_returns=len(runs), timeout=_STOP_TIMEOUT_S)
            elif self._is_cancelled.is_set():
                what = f"job {self.id} was cancelled and left no result"
                raise WorkerError(what, why="by cancel() or Ctrl-C", fix="submit it again")
            elif not wait([address], timeout=0)[0]:
                continue
            self._show("RUNNING")
            for node, actor in enumerate(actors):
                text = self._ray.get(actor.read.remote(shown[node]))
                shown[node] += len(text)
                self._text += text
                if self._shows:
                    sys.stdout.write(text)
                    sys.stdout.flush()
        result: bytes = self._ray.get(wait(runs)[0][0])
        return result

    def _show(self, state: str, needs: str = "") -> None:
        if self._shows and (state != self.state or needs):
            sys.stderr.write(f"ray job {self.id}: {state}{needs}\n")
        self.state = state


class _NodeActor:
    """Runs the call on one node of the cluster, by the default launcher."""

    def __init__(self) -> None:
        sys.stdout = sys.stderr = self._output = io.StringIO()

    def rendezvous(self) -> tuple[str, int]:
        """Return this node's address and a free port."""
        import ray

        address = str(ray.util.get_node_ip_address())
        with socket.create_server((address, 0)) as free:
            return address, int(free.getsockname()[1])

    def read(self, start: int) -> str:
        """Return the output of the ranks that are shown, from character `start` on."""
        return self._output.getvalue()[start:]

    def run(self, call: bytes, settings: Settings, logs: LogSettings, address: tuple[str, int], node: int) -> bytes:
        """Run the call; return an outcome, whose value is the list of the ranks' outcomes."""
        settings.apply()
        settings.apply_default_device()
        logs.apply()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "call")
            path.write_bytes(call)
            try:
                task = Task.read(path, device=torch.device("cpu"))
                task = dataclasses.replace(task, layout=compute_layout(task.layout.config, probe()))
                local = registry.find("launchers", "local")()
                outcome = Outcome.returned(World(), local.launch(task, node=Node(*address, node), environ=os.environ))
            except BaseException as error:  # noqa: BLE001 - any error is the result of the call
                outcome = Outcome.raised(World(), error)
            outcome.write(path)
            return path.read_bytes()


def _connected(address: str | None) -> Any:
    """Return Ray's package, connected to a cluster."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as exc:
        raise MissingDependencyError(
            "ray is not installed", why="launcher='ray' runs calls on Ray", fix="pip install 'parallelize[ray]'"
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
