"""A real Slurm cluster on one machine: a controller, and two nodes with their own addresses, names and daemons.

    controller (this machine's namespace) ── bridge 10.77.x.1 ──┬── n1 10.77.x.11 slurmd
                                                                └── n2 10.77.x.12 slurmd

Configuration, keys, sockets, state and logs are in one private folder. The nodes' names do not resolve, as on many
clusters.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ADDRESSES", "Cluster", "missing", "running", "wait_for"]

_TAG = os.getpid() % 10000  # separates two test runs on one machine
_NETWORK = f"10.77.{_TAG % 250}"
ADDRESSES = {"n1": f"{_NETWORK}.11", "n2": f"{_NETWORK}.12"}
_GATEWAY = f"{_NETWORK}.1"
_BRIDGE = f"plzbr{_TAG}"
_TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "nsenter", "unshare")

_UNFINISHED = ("", "PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

_CONF = """\
ClusterName=lab
SlurmctldHost={host}({gate})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=5,sched_min_interval=100000,bf_interval=5
MailProg=/bin/true
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n1 NodeAddr={n1} CPUs=8 RealMemory=32768 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeAddr={n2} CPUs=8 RealMemory=32768 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4 GraceTime=30 PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Return what this machine lacks to run a cluster; None: nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux to make network namespaces"
    for tool in _TOOLS:
        if shutil.which(tool, path=_path()) is None:
            return f"needs the command {tool!r}: apt-get install slurm-wlm munge iproute2"
    probe = f"plz-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True).returncode:
        return "may not make network namespaces here"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def wait_for(fact: Callable[[], object], timeout_s: float, what: str | Callable[[], str]) -> None:
    """Poll until `fact` is true."""
    end = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.1)


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Args:
        folder: its configuration, state and logs.
    """

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """The variables with which Slurm's commands use this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = 250.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node."""
        return subprocess.run(
            command,
            env={**os.environ, **self.environ, **(env or {})},
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def sbatch(self, *arguments: str, timeout_s: float = 250.0, **options: Any) -> str:
        """Submit a job script, wait for its end, return its state. `sbatch --wait` polls only every 2, 4, 8, ... s."""
        submitted = self.run("sbatch", "--parsable", *arguments, **options)
        job = submitted.stdout.strip()
        assert job.isdigit(), submitted.stderr

        def state() -> str:
            shown = self.run("scontrol", "show", "job", job).stdout.partition("JobState=")[2]
            return shown.split()[0] if shown else ""

        wait_for(lambda: state() not in _UNFINISHED, timeout_s, lambda: f"job {job} is {state()}\n{self.logs()}")
        return state()

    def cancel_all(self) -> None:
        """Cancel every job, and wait until all are gone."""
        jobs = self.run("squeue", "-h", "-o", "%A").stdout.split()
        if jobs:
            self.run("scancel", "--signal=KILL", "--full", *jobs)
            self.run("scancel", *jobs)
        wait_for(lambda: not self.run("squeue", "-h").stdout.strip(), 200, lambda: self.run("squeue").stdout)

    def logs(self) -> str:
        """Return the end of the daemons' logs, for a failing test."""
        texts = [f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log"))]
        return "\n".join(texts)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Start a cluster and wait until it is ready for jobs; remove it at the end."""
    cluster = Cluster(folder)
    with contextlib.ExitStack() as stack:
        _create_network(stack)
        _write_configuration(folder)
        _daemon(stack, cluster, "munge", _munged(folder))
        _run("munge", "-S", str(folder / "munge.socket"), "-n")
        _daemon(stack, cluster, "slurmctld", ["slurmctld", "-D"])
        for name in ADDRESSES:
            inside = f"hostname {name}; exec slurmd -D -N {name}"
            # Not `ip netns exec`: it remounts /sys, and slurmd then finds no cgroup.
            namespace = f"--net=/var/run/netns/{_namespace(name)}"
            _daemon(stack, cluster, f"slurmd.{name}", ["nsenter", namespace, "unshare", "--uts", "sh", "-c", inside])
        wait_for(
            lambda: cluster.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T").stdout.split() == ["idle"] * 2,
            30,
            lambda: cluster.run("sinfo", "-N").stdout + cluster.logs(),
        )
        stack.callback(cluster.cancel_all)
        yield cluster


def _namespace(name: str) -> str:
    return f"plz{_TAG}-{name}"


def _create_network(stack: contextlib.ExitStack) -> None:
    stack.callback(_run_unchecked, "ip", "link", "del", _BRIDGE)
    _run_unchecked("ip", "link", "del", _BRIDGE)  # of a run that was killed
    _run("ip", "link", "add", _BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", f"{_GATEWAY}/24", "dev", _BRIDGE)
    _run("ip", "link", "set", _BRIDGE, "up")
    for name, address in ADDRESSES.items():
        namespace = _namespace(name)
        _run_unchecked("ip", "netns", "del", namespace)
        _run("ip", "netns", "add", namespace)
        stack.callback(_run_unchecked, "ip", "netns", "del", namespace)
        _run("ip", "link", "add", f"plz{_TAG}{name}", "type", "veth", "peer", "name", "e0", "netns", namespace)
        _run("ip", "link", "set", f"plz{_TAG}{name}", "master", _BRIDGE, "up")
        for command in (f"addr add {address}/24 dev e0", "link set e0 up", "link set lo up"):
            _run("ip", "-n", namespace, *command.split())


def _write_configuration(folder: Path) -> None:
    (folder / "state").mkdir()
    host = os.uname().nodename
    text = _CONF.format(folder=folder, host=host, gate=_GATEWAY, port=_free_port(), **ADDRESSES)
    (folder / "slurm.conf").write_text(text)
    for gpu in ("gpu0", "gpu1"):
        (folder / gpu).touch()
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-1]\n")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\nConstrainCores=no\nConstrainDevices=no\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)


def _free_port() -> int:
    # The controller listens on all interfaces, and Slurm's default port may be in use.
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _munged(folder: Path) -> list[str]:
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    return ["munged", "--foreground", "--force", *(f"--{option}={folder / name}" for option, name in files.items())]


def _daemon(stack: contextlib.ExitStack, cluster: Cluster, name: str, command: list[str]) -> None:
    """Start a daemon in the foreground: it is a child process and ends with the test run."""
    with (cluster.folder / f"{name}.output.log").open("wb") as output:
        # Root's environment only: jobs inherit that of the daemons.
        environ = {**cluster.environ, "HOME": "/root", "LANG": "C.UTF-8"}
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    stack.callback(_terminate, process)
    if name == "munge":
        wait_for((cluster.folder / "munge.socket").exists, 200, cluster.logs)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _run_unchecked(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)
