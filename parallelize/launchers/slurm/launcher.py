"""The Slurm launcher: submits calls as jobs from a login node and returns their values.

    login node      train.submit(...)  ── sbatch job.sh ──>  queue
                    Job.result()       <── outcomes ──┐         │
    shared folder   call, log, outcomes, stop         │         v
    node 0..n       srun, one task per rank ──────────┴── train(...)

`submit` and `sbatch_script` write the same script. submitit is not used: it finds a call by its job
ID, but a script that is submitted later has no ID yet. It also saves checkpoints inside a signal
handler, and on a cluster without accounting it waits forever for a killed task.

The words of this room:

    submission    one or several calls of one function, with a folder and a job script of its own
    job           what Slurm queues and runs; each call is a job, or one job of a job array
    run           one attempt of a job: Slurm may requeue it
    step          the tasks that srun starts in a job, one per rank
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from parallelize.call.outcome import Outcome
from parallelize.call.task import Task
from parallelize.cluster.world import Node
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.config.options import duration
from parallelize.errors import ConfigError, Fault
from parallelize.launchers.batch_launcher import BatchLauncher
from parallelize.launchers.slurm.job import USERS_DEFAULTS, Job, submit_script
from parallelize.launchers.slurm.script import RANK_SCRIPT, job_script
from parallelize.launchers.slurm.step import write_call
from parallelize.plugins.options import (
    Parse,
    command,
    count,
    either,
    invalid,
    path,
    text,
    texts,
    values_by_name,
    variables,
)

# Options of sbatch that the launcher sets itself, or that would contradict those that it sets.
_RESERVED_OPTIONS = frozenset(
    {
        *("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "gpus-per-task", "gpu-bind"),
        *("array", "output", "signal", "open-mode", "parsable", "wrap"),
    }
)
_TIME_LIMIT = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


def _time_limit(name: str, value: Any) -> str | int | timedelta:
    """Parse a text of Slurm or with a unit, minutes, or a timedelta; 0 minutes: no limit."""
    limit = duration(value) or value
    if isinstance(limit, timedelta) and limit > timedelta(0):
        return limit
    if isinstance(limit, str) and _TIME_LIMIT.fullmatch(limit.strip()):
        return limit.strip()
    if isinstance(limit, (str, timedelta)):
        fix = f"use {name}='4:00:00', '1-02:00:00', '4h', minutes, or a timedelta"
        raise invalid(name, value, "it is not a time limit of Slurm", fix)
    return int(count(0)(name, limit))


def _stop_before(name: str, value: Any) -> timedelta:
    """Parse how long before the time limit a job is told to stop."""
    lead = duration(value) or value
    if isinstance(lead, timedelta) and lead >= timedelta(seconds=1):
        return lead
    raise invalid(name, value, "it must be at least 1 s", "use '5min', or a timedelta")


def _sbatch_options(name: str, value: Any) -> dict[str, Any]:
    """Parse other options of sbatch, none of which the launcher sets itself."""
    options: dict[str, Any] = values_by_name(_sbatch_value, "{'exclusive': True}")(name, value)
    faults = list[Fault]()
    for option in options:
        if _long_name(option) in _RESERVED_OPTIONS:
            fault = Fault(
                f"{name}={{{option!r}: ...}}",
                "the launcher sets this option itself",
                "use num_nodes=, gpus=, processes=, folder=, stop_before= or submit_many() instead",
            )
            faults.append(fault)
    if faults:
        raise ConfigError.of(faults)
    return options


def _long_name(option: str) -> str:
    """Return how a job script writes an option: ntasks-per-node for "--ntasks_per_node", too."""
    return option.lstrip("-").replace("_", "-")


def _sbatch_value(name: str, value: Any) -> str | int | bool | None:
    """Parse the value of an option of sbatch; True: a flag; False and None: it is omitted."""
    if value is None or isinstance(value, bool):
        return value
    return either(text, count(0))(name, value)  # type: ignore[no-any-return]  # a text or an int


@dataclass(frozen=True, kw_only=True)
class SlurmLauncher(BatchLauncher):
    """Runs each call as a Slurm job on `num_nodes` nodes with `gpus` GPUs each.

    Each process is a task of srun. A call waits for its job; `submit` does not. The job's log has
    the output of rank 0 (of all ranks with logs="all"); that of the other ranks is in files beside
    it, or in the folder that `logs` names.

    | test-tube's SlurmCluster              | here                                               |
    |---------------------------------------|----------------------------------------------------|
    | per_experiment_nb_nodes               | `@distributed(num_nodes=)`                         |
    | per_experiment_nb_gpus, gpu_type      | `@distributed(gpus=)`, `gpu_type=`                 |
    | per_experiment_nb_cpus                | `cpus_per_task=`                                   |
    | memory_mb_per_node                    | `mem=`                                             |
    | job_time                              | `time=`                                            |
    | minutes_to_checkpoint_before_walltime | `stop_before=`, and `should_stop()` in the loop    |
    | add_command                           | `setup=`; an export: `env=`                        |
    | load_modules                          | `modules=`                                         |
    | add_slurm_cmd                         | `sbatch=`; ntasks-per-node is the number of GPUs   |
    | notify_job_status                     | `mail_user=`, `mail_type=`                         |
    | log_path, enable_log_out/err          | `folder=`; the job's output is in `<id>.log` there |
    | optimize_parallel_cluster_gpu         | `train.submit_many([...])`                         |
    | enable_auto_resubmit                  | `max_requeues=`                                    |
    | python_cmd                            | `python=`                                          |

    Args:
        folder: for logs and results, on a file system that all nodes share. "~" is the home folder.
        partition: partition of the cluster, as for sbatch.
        account: account that the job is charged to.
        qos: quality of service, as for sbatch.
        constraint: required features of the nodes, such as "a100&ib".
        time: time limit: "4:00:00", "1-02:00:00", "4h", minutes, or a timedelta; None: the
            partition's limit.
        mem: memory of each node, "64G" or megabytes; None: the cluster's default.
        cpus_per_task: cores of each process (each GPU); None: its part of the cores that the
            cluster gives the job.
        gpu_type: type of the GPUs, such as "a100"; None: any.
        modules: environment modules to load, after a purge, such as "NCCL/2.4.7-1-cuda.10.0".
        env: environment variables of the job, in addition to the caller's.
        setup: shell lines to run before the processes start, such as "source env.sh".
        sbatch: other options of sbatch, by long name; True: a flag without a value; False, None:
            omitted.
        mail_user: e-mail address that Slurm notifies; None: that of the user who submits.
        mail_type: events to notify about, as for sbatch, such as "ALL"; None: "END,FAIL" for a
            mail_user, else none.
        stop_before: how long before the time limit `should_stop()` becomes true, such as "5min";
            Slurm may signal a minute early.
        max_requeues: how often to requeue a job whose function returns after `should_stop()` was
            true; 0: never. A job that fails is requeued if it was requeued less often than
            `@distributed(max_restarts=)`.
        python: command that starts Python on the nodes, "python3 -u" or its words; None: this
            interpreter.

    Raises:
        ConfigError: options are invalid; the error lists all of them.
    """

    name = "slurm"
    option_parsers: ClassVar[Mapping[str, Parse]] = {
        "folder": path,
        "partition": text,
        "account": text,
        "qos": text,
        "constraint": text,
        "time": _time_limit,
        "mem": either(text, count(0)),
        "cpus_per_task": count(1),
        "gpu_type": text,
        "modules": texts,
        "env": variables,
        "setup": texts,
        "sbatch": _sbatch_options,
        "mail_user": text,
        "mail_type": text,
        "stop_before": _stop_before,
        "max_requeues": count(0),
        "python": command,
    }

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
    sbatch: Mapping[str, str | int | bool | None] = field(default_factory=dict)
    mail_user: str | None = None
    mail_type: str | None = None
    stop_before: timedelta | str = timedelta(minutes=5)
    max_requeues: int = 100
    python: str | Sequence[str] | None = None

    def plan(self, config: Config) -> Layout:
        """Return the layout of a job, as every launcher of a cluster does.

        Raises:
            ConfigError: as for BatchLauncher; or gpu_type= for a job that requests no GPU.
        """
        layout = super().plan(config)
        if self.gpu_type is not None and not layout.indices:
            raise ConfigError(
                f"gpu_type={self.gpu_type!r} for {layout.local_world_size} process(es) on the CPU",
                why="a job without gpus= requests no GPU, of whatever type",
                fix="use gpus=<number on each node>, or omit gpu_type=",
            )
        return layout

    def launch(self, task: Task, *, node: Node | None, environ: Mapping[str, str]) -> list[Outcome]:
        """Submit the call, show its job's state and output, and return the outcomes at its end."""
        del node  # Slurm chooses the nodes
        (job,) = self.submit([task], at_most=None, environ=environ)
        return job.follow()

    def submit(
        self, tasks: Sequence[Task], *, at_most: int | None, environ: Mapping[str, str]
    ) -> list[Job[Any]]:
        """Submit the calls: one as a job, several as a job array."""
        parent = Path(self.folder).expanduser().resolve()
        parent.mkdir(parents=True, exist_ok=True)
        # Only this user can access the folder.
        folder = Path(tempfile.mkdtemp(prefix=f"{_safe(tasks[0].name)}-", dir=parent))
        self._write(tasks, folder, folder / "job.sh")
        arguments = self._overriding_arguments(tasks[0])
        is_array = len(tasks) > 1
        if is_array:
            elements = f"--array=0-{len(tasks) - 1}"
            arguments.append(elements if at_most is None else f"{elements}%{at_most}")
        job_id = submit_script(folder / "job.sh", *arguments, environ=environ)
        link = folder / "link"
        link.symlink_to(folder.name)
        # An older job may have had the same ID, on a cluster that was set up anew.
        link.replace(parent / job_id)
        if not is_array:
            return [Job(job_id, folder, all_ranks=tasks[0].all_ranks)]
        jobs: list[Job[Any]] = []
        for index, task in enumerate(tasks):
            job: Job[Any] = Job(f"{job_id}_{index}", folder, all_ranks=task.all_ranks)
            jobs.append(job)
        return jobs

    def _overriding_arguments(self, task: Task) -> list[str]:
        """Return options as arguments of sbatch, which the user's variables must not change.

        For sbatch, a variable such as SBATCH_PARTITION wins over a line of the script, and an
        argument over both.
        """
        options = self._options(task)
        arguments = []
        for name in USERS_DEFAULTS:
            value = options.get(name)
            if value is not None and value is not False:
                arguments.append(f"--{name}={value}")
        return arguments

    def write_script(self, task: Task, path: Path) -> None:
        """Write the job script to `path`, and the job's files to the folder `path` + ".job"."""
        folder = path.resolve().with_name(path.name + ".job")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write([task], folder, path)

    def _write(self, tasks: Sequence[Task], folder: Path, path: Path) -> None:
        """Write the calls and the script of a rank to `folder`, and the job script to `path`."""
        for index, task in enumerate(tasks):
            write_call(task, folder / f"call.{index}")
        (folder / "rank.sh").write_text(RANK_SCRIPT)
        options = self._options(tasks[0])
        # Slurm puts the numbers of the job in place of these letters, and "%" in place of "%%".
        name_of_log = "%j.log"
        if len(tasks) > 1:
            name_of_log = "%A_%a.log"
        folder_of_logs = str(folder).replace("%", "%%")
        options["output"] = f"{folder_of_logs}/{name_of_log}"
        options["open-mode"] = "append"
        lines = [*self._setup_lines(), *self._settings_lines(tasks[0].layout, folder)]
        path.write_text(job_script(options, lines))

    def _setup_lines(self) -> list[str]:
        """Return the lines that set up the environment of the job, as the user has asked for it."""
        purge = ["module purge"] if self.modules else []
        modules = [f"module load {shlex.quote(module)}" for module in self.modules]
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        return [*purge, *modules, *exports, *self.setup]

    def _settings_lines(self, layout: Layout, folder: Path) -> list[str]:
        """Return the lines that set the variables of the rest of the job script, see script.py."""
        python = self.python or (sys.executable,)
        command_of_rank = [*python, "-m", "parallelize.launchers.slurm.step"]
        return [
            f"folder={shlex.quote(str(folder))} logs={shlex.quote(str(layout.config.logs))}",
            f"tasks={layout.local_world_size} max_restarts={layout.config.max_restarts}",
            f"max_requeues={self.max_requeues}",
            f"command=({shlex.join(command_of_rank)})",
        ]

    def _options(self, task: Task) -> dict[str, Any]:
        """Return the options of sbatch by their long names; None: the option is omitted."""
        layout = task.layout
        assert isinstance(self.stop_before, timedelta)  # since __post_init__
        gpus = None
        if layout.indices:
            gpus = f"gpu:{len(layout.indices)}"
        if layout.indices and self.gpu_type:
            gpus = f"gpu:{self.gpu_type}:{len(layout.indices)}"
        mail_type = self.mail_type
        if mail_type is None and self.mail_user is not None:
            mail_type = "END,FAIL"
        time_limit = self.time
        if isinstance(time_limit, timedelta):
            # Slurm counts in minutes; the limit is rounded up.
            time_limit = -(-time_limit // timedelta(minutes=1))
        options = {
            "job-name": _safe(task.name),
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "nodes": layout.num_nodes,
            "ntasks-per-node": layout.local_world_size,
            "cpus-per-task": self.cpus_per_task,
            "gres": gpus,
            "mem": self.mem,
            "time": time_limit,
            "signal": f"B:USR2@{int(self.stop_before.total_seconds())}",
            "mail-user": self.mail_user,
            "mail-type": mail_type,
            "requeue": True,
        }
        for option, value in self.sbatch.items():
            options[_long_name(option)] = value
        return options


def _safe(name: str) -> str:
    """Return a name for a file and a job."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "job"
