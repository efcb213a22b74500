"""Calls as jobs of a Slurm cluster: from the login node to a returned value.

    login node      train.submit(...)  ── sbatch job.sh ──>  queue
                    Job.result()       <── result ──┐           │
    shared folder   task, log, result, stop         │           v
    node 0..n       srun, one task per node: step ──┴── elastic starts a process per GPU, joins the other nodes

One script serves `submit` and `sbatch_script`. Slurm's own commands suffice: submitit, which was tried first, finds a
call by a job number that a script to keep does not have yet, saves checkpoints inside a signal handler, and waits for
ever for a killed task where a cluster has no accounting.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from parallelize.call.task import Outcome, Task
from parallelize.cluster.devices import Gpus, Hardware
from parallelize.cluster.world import Node
from parallelize.config.config import Config
from parallelize.config.layout import Layout, lay_out
from parallelize.errors import ConfigError, Fault
from parallelize.launchers.batch_launcher import Queue
from parallelize.launchers.slurm import commands, value_formats
from parallelize.launchers.slurm.follow import watched
from parallelize.launchers.slurm.job import Job
from parallelize.launchers.slurm.job_folder import JobFolder
from parallelize.launchers.slurm.job_script import GUARD, Script

__all__ = ["PLUGIN", "SlurmLauncher"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = frozenset({"nodes", "ntasks", "ntasks-per-node", "array", "output", "signal", "open-mode", "parsable", "wrap"})


@dataclass(frozen=True, kw_only=True)
class SlurmLauncher(Queue):
    """Each call is a job: `num_nodes` nodes, `gpus` of each; a call waits for its job, `submit` does not.

    | test-tube's SlurmCluster               | here                                                          |
    |----------------------------------------|---------------------------------------------------------------|
    | per_experiment_nb_nodes                | `@distributed(num_nodes=)`                                    |
    | per_experiment_nb_gpus, gpu_type       | `@distributed(gpus=)`, `gpu_type=`                            |
    | per_experiment_nb_cpus                 | `cpus_per_task=`                                              |
    | memory_mb_per_node                     | `mem=`                                                        |
    | job_time                               | `time=`                                                       |
    | minutes_to_checkpoint_before_walltime  | `stop_before=`, and `should_stop()` in the loop               |
    | add_command                            | `setup=`; an export: `env=`                                   |
    | load_modules                           | `modules=`                                                    |
    | add_slurm_cmd                          | `sbatch=`; ntasks-per-node is not needed                      |
    | notify_job_status                      | `mail_user=`, `mail_type=`                                    |
    | log_path, enable_log_out/err           | `folder=`; the output of all nodes is in `<id>.log` there     |
    | optimize_parallel_cluster_gpu          | `train.submit_many([...])`                                    |
    | enable_auto_resubmit                   | `max_requeues=`                                               |
    | python_cmd                             | `python=`                                                     |

    Args:
        folder: where jobs leave logs and results; all nodes must see it. "~" is the home folder.
        partition: as sbatch has it, like the next three.
        account: who pays.
        qos: quality of service.
        constraint: features of the nodes, as "a100&ib".
        time: limit: "4:00:00", "1-02:00:00", minutes, or a timedelta; None: the partition's.
        mem: memory of each node, "64G" or megabytes; None: the cluster's default.
        cpus_per_task: cores for each process (each GPU); None: the cluster's default.
        gpu_type: of the GPUs, as "a100"; None: any.
        modules: environment modules to load, after a purge, as "NCCL/2.4.7-1-cuda.10.0".
        env: variables for the job, beside the caller's.
        setup: shell lines before the start, as "source env.sh".
        sbatch: any other option of sbatch by its long name; True: a flag without a value.
        mail_user: address that gets `mail_type` mails.
        mail_type: events, as sbatch has them.
        stop_before: how long before the time limit `should_stop()` turns true; Slurm may be a minute early.
        max_requeues: how often a job that was told to stop, and has stopped, goes on; 0: never.
        python: the interpreter on the nodes, with its arguments; None: this one.

    Raises:
        ConfigError: every fault of the options at once.
    """

    name = "slurm"

    folder: str | Path = "slurm_jobs"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | int | timedelta | None = None
    mem: str | int | None = None
    cpus_per_task: int | None = None
    gpu_type: str | None = None
    modules: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    setup: Sequence[str] = ()
    sbatch: Mapping[str, str | int | bool] = field(default_factory=dict)
    mail_user: str | None = None
    mail_type: str = "END,FAIL"
    stop_before: timedelta = timedelta(minutes=5)
    max_requeues: int = 100
    python: Sequence[str] | None = None

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise ConfigError.of(faults)

    def _faults(self) -> Iterator[Fault]:
        limits = {value_formats.time_limit: self.time, value_formats.memory: self.mem}
        written = [write(value) for write, value in limits.items() if value is not None]
        yield from (each for each in written if isinstance(each, Fault))
        for name, least in (("cpus_per_task", 1), ("max_requeues", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                yield Fault(f"{name}={value!r}", f"it is a whole number from {least}", f"use {name}={least}, say")
        span: object = self.stop_before
        if not isinstance(span, timedelta) or span < timedelta(seconds=1):
            yield Fault(f"stop_before={span!r}", "it is a span of time", "use timedelta(minutes=5), say")
        for name in ("modules", "setup"):
            if isinstance(value := getattr(self, name), str):
                yield Fault(f"{name}={value!r}", "it is one text, where a list is read", f"use {name}=[{value!r}]")
        for name in self.env:
            if not _VARIABLE.fullmatch(name):
                yield Fault(f"env={{{name!r}: ...}}", "no variable has such a name", "use letters, digits and _")
        for name in self.sbatch:
            if name.lstrip("-").replace("_", "-") in _OURS:
                fix = "use num_nodes=, gpus=, processes=, folder=, stop_before= or submit_many() instead"
                yield Fault(f"sbatch={{{name!r}: ...}}", "the request decides it", fix)

    def plan(self, config: Config) -> Layout:
        """The processes of each node, were its GPUs those that the request names."""
        config = config.changed(launcher=None, num_nodes=config.num_nodes or 1)
        gpus = config.gpus
        if gpus is not None and gpus.indices is not None:
            raise ConfigError(
                f"{gpus.asked} with launcher='slurm'",
                why="Slurm decides which GPUs of a node a job gets",
                fix=f"use gpus={len(gpus.indices)}",
            )
        if gpus == Gpus.ALL or (gpus is None and config.processes is None):
            raise ConfigError(
                "neither gpus= nor processes= is a number" if gpus is None else f"{gpus.asked} with launcher='slurm'",
                why="Slurm has to be asked for so many, before anybody sees the node",
                fix="use gpus=4 (on each node), or processes=2 to run on CPUs",
            )
        count = 0 if gpus is None else gpus.count or 0
        return lay_out(config, Hardware("cuda", count) if count else Hardware())

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Queue the call, wait for its job with its state and output on the screen, and return its outcomes."""
        del node  # the job finds its own
        (job,) = self.submit([task], at_most=None, environ=environ)
        return watched(job)

    def submit(self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]) -> list[Job[Any]]:
        """Queue the calls; several are one job array."""
        folder = JobFolder.make(self._parent(), tasks[0].name)
        folder.write_calls(tasks, guard=GUARD)
        folder.script.write_text(str(self._script(tasks[0], folder, is_array=len(tasks) > 1)))
        limit = "" if at_most is None else f"%{at_most}"
        array = [f"--array=0-{len(tasks) - 1}{limit}"] if len(tasks) > 1 else []
        job_id = commands.queue(folder.script, options=array, environ=environ)
        folder.link(job_id)
        ids = [f"{job_id}_{index}" for index in range(len(tasks))] if array else [job_id]
        return [Job(each, folder, all_ranks=task.all_ranks) for each, task in zip(ids, tasks, strict=True)]

    def write_script(self, task: Task, path: Path) -> None:
        """Write the script to `path`; what it needs is in a folder beside it, `path` with ".job" at its end."""
        folder = JobFolder(path.resolve().with_name(path.name + ".job"))
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.write_calls([task], guard=GUARD)
        path.write_text(str(self._script(task, folder, is_array=False)))

    def _parent(self) -> Path:
        return Path(self.folder).expanduser().resolve()

    def _script(self, task: Task, folder: JobFolder, *, is_array: bool) -> Script:
        layout = task.layout
        cores = None if self.cpus_per_task is None else self.cpus_per_task * layout.local_world_size
        output = folder.log("%A_%a" if is_array else "%j")
        python = self.python or [sys.executable]
        return Script(
            flags={**self._flags(task.name, layout, cores), "output": str(output), "open-mode": "append"},
            modules=self.modules,
            env=self.env,
            setup=self.setup,
            # srun does not take --cpus-per-task from the job since Slurm 22.05.
            srun=["--kill-on-bad-exit=1", *([] if cores is None else [f"--cpus-per-task={cores}"])],
            step=[*python, "-u", "-m", "parallelize.launchers.slurm.step", "--max-requeues", str(self.max_requeues)],
            folder=folder.path,
        )

    def _flags(self, name: str, layout: Layout, cores: int | None) -> dict[str, str | int | bool]:
        gpus = len(layout.indices)
        flags: dict[str, str | int | None] = {
            "job-name": re.sub(r"[^\w.-]+", "-", name),
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "nodes": layout.num_nodes,
            "ntasks-per-node": 1,  # the task starts the node's processes
            "cpus-per-task": cores,
            "gres": (f"gpu:{self.gpu_type}:{gpus}" if self.gpu_type else f"gpu:{gpus}") if gpus else None,
            "mem": None if self.mem is None else str(value_formats.memory(self.mem)),
            "time": None if self.time is None else str(value_formats.time_limit(self.time)),
            "signal": f"B:USR2@{int(self.stop_before.total_seconds())}",
            "mail-user": self.mail_user,
            "mail-type": self.mail_type if self.mail_user else None,
        }
        asked = {name.lstrip("-").replace("_", "-"): value for name, value in self.sbatch.items()}
        return {**{name: value for name, value in flags.items() if value is not None}, "requeue": True, **asked}


PLUGIN = SlurmLauncher
