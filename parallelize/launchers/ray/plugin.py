"""The Ray launcher: runs calls on a Ray cluster, with one actor per node.

caller      placement group, one bundle per node   task, settings
              │                                      │
node 0..n   actor ── rendezvous at node 0's actor ── elastic launcher: a process per device, on all nodes
              │                                      │
caller      output of rank 0, shown live           outcomes, or the exception; a lost node restarts the call
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallelize.call.task import Outcome, Task
from parallelize.cluster.world import Node
from parallelize.errors import ConfigError
from parallelize.launchers.batch_launcher import BatchLauncher
from parallelize.launchers.ray.job import Needs, RayJob, connect

__all__ = ["PLUGIN", "RayLauncher"]


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

    Raises:
        ConfigError: `cpus_per_task` is no positive integer.
    """

    name = "ray"

    address: str | None = "auto"
    cpus_per_task: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: str = "STRICT_SPREAD"
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cores: object = self.cpus_per_task
        if not isinstance(cores, int) or cores < 1:
            why, fix = "it must be an integer >= 1", "use cpus_per_task=1 or more"
            raise ConfigError(f"cpus_per_task={cores!r}", why=why, fix=fix)

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Submit the call, show the state and output of its job until the job ends, and return the outcomes."""
        del node  # Ray chooses the nodes
        del environ  # of another machine; runtime_env sets variables
        connect(self.address)
        job: RayJob[Any] = RayJob(task, self._needs(task), shows=True)
        try:
            return job.outcomes()
        except BaseException:
            job.cancel()
            raise

    def submit(self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]) -> list[Any]:
        """Submit the calls; each waits in Ray's queue until the cluster has the resources."""
        del environ  # as in launch
        if at_most is not None and at_most < len(tasks):
            raise ConfigError(
                f"at_most={at_most} with launcher='ray'",
                why="Ray starts each job as soon as the cluster has its resources",
                fix="omit it, or limit the jobs by a resource of the cluster: RayLauncher(resources={'jobs': 1})",
            )
        connect(self.address)
        return [RayJob(task, self._needs(task)) for task in tasks]

    def _needs(self, task: Task) -> Needs:
        layout, variables = task.layout, self.runtime_env.get("env_vars", {})
        gpus = {"GPU": len(layout.indices)} if layout.indices else {}
        bundle = {"CPU": self.cpus_per_task * layout.local_world_size, **gpus, **self.resources}
        # Ray sets OMP_NUM_THREADS to all cores of a node, which its workers share.
        threads = variables.get("OMP_NUM_THREADS", self.cpus_per_task)
        return Needs(bundle, self.strategy, self.runtime_env, str(threads))


PLUGIN = RayLauncher
