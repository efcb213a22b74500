"""The Slurm launcher: submits calls as jobs from a login node and returns their values.

    login node      train.submit(...)  ── sbatch job.sh ──>  queue
                    Job.result()       <── result ──┐           │
    shared folder   task, log, result, stop         │           v
    node 0..n       srun, one task per node: step ──┴── elastic launcher: a process per GPU, on all nodes

`submit` and `sbatch_script` write the same script. submitit is not used: it finds a call by its job ID, but a script
that is submitted later has no ID yet. It also saves checkpoints inside a signal handler, and on a cluster without
accounting it waits forever for a killed task.
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
from parallelize.cluster.world import Node
from parallelize.config.layout import Layout
from parallelize.config.options import duration
from parallelize.errors import ConfigError, Fault
from parallelize.launchers.batch_launcher import BatchLauncher
from parallelize.launchers.slurm import commands
from parallelize.launchers.slurm.follow import follow
from parallelize.launchers.slurm.job import Job
from parallelize.launchers.slurm.job_folder import JobFolder
from parallelize.launchers.slurm.job_script import WRAPPER, JobScript, format_memory, format_time_limit

__all__ = ["PLUGIN", "SlurmLauncher"]

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED_OPTIONS = frozenset(
    {"nodes", "ntasks", "ntasks-per-node", "array", "output", "signal", "open-mode", "parsable", "wrap"}
)


@dataclass(frozen=True, kw_only=True)
class SlurmLauncher(BatchLauncher):
    """Runs each call as a Slurm job on `num_nodes` nodes with `gpus` GPUs each; `submit` does not wait for it.

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
        folder: for logs and results, on a file system that all nodes share. "~" is the home folder.
        partition: partition of the cluster, as for sbatch.
        account: account that the job is charged to.
        qos: quality of service, as for sbatch.
        constraint: required features of the nodes, such as "a100&ib".
        time: time limit: "4:00:00", "1-02:00:00", "4h", minutes, or a timedelta; None: the partition's limit.
        mem: memory of each node, "64G" or megabytes; None: the cluster's default.
        cpus_per_task: cores of each process (each GPU); None: the cluster's default.
        gpu_type: type of the GPUs, such as "a100"; None: any.
        modules: environment modules to load, after a purge, such as "NCCL/2.4.7-1-cuda.10.0".
        env: environment variables of the job, in addition to the caller's.
        setup: shell lines to run before the processes start, such as "source env.sh".
        sbatch: other options of sbatch, by long name; True: a flag without a value.
        mail_user: e-mail address that Slurm notifies.
        mail_type: events to notify about, as for sbatch, such as "END,FAIL".
        stop_before: how long before the time limit `should_stop()` becomes true, such as "5min"; Slurm may signal a
            minute early.
        max_requeues: how often to requeue a job whose function returns after `should_stop()` was true; 0: never.
        python: command that starts Python on the nodes; None: this interpreter.

    Raises:
        ConfigError: options are invalid; the error lists all of them.
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
    stop_before: timedelta | str = timedelta(minutes=5)
    max_requeues: int = 100
    python: Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_before", duration(self.stop_before) or self.stop_before)
        faults = list(self._faults())
        if faults:
            raise ConfigError.of(faults)

    def _faults(self) -> Iterator[Fault]:
        values = {format_time_limit: self.time, format_memory: self.mem}
        formatted = [convert(value) for convert, value in values.items() if value is not None]
        yield from (each for each in formatted if isinstance(each, Fault))
        for name, minimum in (("cpus_per_task", 1), ("max_requeues", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
                yield Fault(f"{name}={value!r}", f"it must be an integer >= {minimum}", f"use {name}={minimum} or more")
        stop_before: object = self.stop_before
        if not isinstance(stop_before, timedelta) or stop_before < timedelta(seconds=1):
            yield Fault(f"stop_before={stop_before!r}", "it must be at least 1 s", "use '5min', or a timedelta")
        for name in ("modules", "setup"):
            if isinstance(value := getattr(self, name), str):
                yield Fault(f"{name}={value!r}", "it must be a list of strings", f"use {name}=[{value!r}]")
        for name in self.env:
            if not _VARIABLE_NAME.fullmatch(name):
                yield Fault(f"env={{{name!r}: ...}}", "it is not a valid variable name", "use letters, digits and _")
        for name in self.sbatch:
            if name.lstrip("-").replace("_", "-") in _RESERVED_OPTIONS:
                fix = "use num_nodes=, gpus=, processes=, folder=, stop_before= or submit_many() instead"
                yield Fault(f"sbatch={{{name!r}: ...}}", "the launcher sets this option itself", fix)

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Submit the call, show the state and output of its job until the job ends, and return the outcomes."""
        del node  # Slurm chooses the nodes
        (job,) = self.submit([task], at_most=None, environ=environ)
        return follow(job)

    def submit(self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]) -> list[Job[Any]]:
        """Submit the calls: one as a job, several as a job array."""
        folder = JobFolder.make(self._jobs_folder(), tasks[0].name)
        folder.write_calls(tasks, wrapper=WRAPPER)
        folder.script.write_text(str(self._script(tasks[0], folder, is_array=len(tasks) > 1)))
        limit = "" if at_most is None else f"%{at_most}"
        array = [f"--array=0-{len(tasks) - 1}{limit}"] if len(tasks) > 1 else []
        job_id = commands.submit_script(folder.script, options=array, environ=environ)
        folder.link(job_id)
        ids = [f"{job_id}_{index}" for index in range(len(tasks))] if array else [job_id]
        return [Job(each, folder, all_ranks=task.all_ranks) for each, task in zip(ids, tasks, strict=True)]

    def write_script(self, task: Task, path: Path) -> None:
        """Write the job script to `path`, and the job's files to the folder `path` + ".job"."""
        folder = JobFolder(path.resolve().with_name(path.name + ".job"))
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.write_calls([task], wrapper=WRAPPER)
        path.write_text(str(self._script(task, folder, is_array=False)))

    def _jobs_folder(self) -> Path:
        return Path(self.folder).expanduser().resolve()

    def _script(self, task: Task, folder: JobFolder, *, is_array: bool) -> JobScript:
        layout = task.layout
        cores = None if self.cpus_per_task is None else self.cpus_per_task * layout.local_world_size
        output = folder.log_file("%A_%a" if is_array else "%j")
        python = self.python or [sys.executable]
        return JobScript(
            options={**self._sbatch_options(task.name, layout, cores), "output": str(output), "open-mode": "append"},
            modules=self.modules,
            env=self.env,
            setup=self.setup,
            # Since Slurm 22.05 srun does not inherit --cpus-per-task from the job.
            srun=["--kill-on-bad-exit=1", *([] if cores is None else [f"--cpus-per-task={cores}"])],
            step=[*python, "-u", "-m", "parallelize.launchers.slurm.step", "--max-requeues", str(self.max_requeues)],
            folder=folder.path,
        )

    def _stop_before_s(self) -> int:
        assert isinstance(self.stop_before, timedelta)  # since __post_init__
        return int(self.stop_before.total_seconds())

    def _sbatch_options(self, name: str, layout: Layout, cores: int | None) -> dict[str, str | int | bool]:
        gpus = len(layout.indices)
        options: dict[str, str | int | None] = {
            "job-name": re.sub(r"[^\w.-]+", "-", name),
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "nodes": layout.num_nodes,
            "ntasks-per-node": 1,  # this task starts all processes of its node
            "cpus-per-task": cores,
            "gres": (f"gpu:{self.gpu_type}:{gpus}" if self.gpu_type else f"gpu:{gpus}") if gpus else None,
            "mem": None if self.mem is None else str(format_memory(self.mem)),
            "time": None if self.time is None else str(format_time_limit(self.time)),
            "signal": f"B:USR2@{self._stop_before_s()}",
            "mail-user": self.mail_user,
            "mail-type": self.mail_type if self.mail_user else None,
        }
        extra = {name.lstrip("-").replace("_", "-"): value for name, value in self.sbatch.items()}
        return {**{name: value for name, value in options.items() if value is not None}, "requeue": True, **extra}


PLUGIN = SlurmLauncher
