"""Calls with hosts=: agents on two hosts that a real sshd serves, their failures, and what is left of them."""

import importlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sshd import Hosts
from torch import nn

from parallelize import ConfigError, LaunchError, SSHLauncher, distributed, parallel_model, rank, world_size

PACKAGE = Path(__file__).resolve().parents[2] / "parallelize"
PARENT = PACKAGE.parent


def launcher(hosts: Hosts, names: Any = ("gpu1", "gpu2"), **options: Any) -> SSHLauncher:
    env = {"PYTHONPATH": str(PARENT), "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return SSHLauncher(hosts=names, ssh=hosts.ssh, env=env, **options)


def train(model: nn.Module, x: torch.Tensor) -> tuple[int, str, str]:
    """Make a step on each rank's part of x; return the rank, its host's address, and a variable."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel_model(model):
        model(x.chunk(world_size())[rank()]).mean().backward()
        optimizer.step()
    print("trained by rank", rank())
    return rank(), os.environ["SSH_CONNECTION"].split()[2], os.environ["ANSWER"]


@pytest.mark.slow
def test_a_call_runs_on_both_hosts_as_in_one_process(hosts: Hosts, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights come back in place, values of all ranks and the output to the caller; env= reaches the ranks."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    expected = model.weight.detach() - 0.1 * x.mean(0)
    run = distributed(launcher=launcher(hosts, env={"ANSWER": "42"}), processes=2, logs="all")(train)
    found = run.all_ranks(model, x)
    places = ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"]
    assert found == [(number, place, "42") for number, place in enumerate(places)]
    torch.testing.assert_close(model.weight.detach(), expected)
    assert set(re.findall(r"trained by rank \d", capfd.readouterr().out)) == {f"trained by rank {n}" for n in range(4)}


def log() -> None:
    logging.getLogger("mine").log(logging.WARNING if rank() else logging.INFO, "from rank %d", rank())


@pytest.mark.slow
def test_the_callers_loggers_handle_the_records(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    """As on one machine: rank 0's, and warnings of other ranks."""
    caplog.set_level(logging.INFO, "mine")
    distributed(launcher=launcher(hosts), processes=1)(log)()
    found = {(each.levelno, each.getMessage()) for each in caplog.records if each.name == "mine"}
    assert found == {(logging.INFO, "from rank 0"), (logging.WARNING, "[rank 1] from rank 1")}


def fail() -> None:
    if rank() == 1:
        raise ValueError("of rank 1")


@pytest.mark.slow
def test_an_error_of_a_rank_is_the_callers(hosts: Hosts) -> None:
    """It has its type, and the rank's traceback in its notes."""
    with pytest.raises(ValueError, match="of rank 1") as caught:
        distributed(launcher=launcher(hosts), processes=1)(fail)()
    assert any("rank 1 of 2" in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_modules_that_hosts_lack_travel_with_the_call(
    hosts: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the caller whose file no host has is sent, with the values of its variables, and named."""
    (tmp_path / "only_here.py").write_text("factor = 2\ndef times(x):\n    return factor * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    only_here: Any = importlib.import_module("only_here")
    only_here.factor = 3
    (tmp_path / "only_here.py").unlink()
    caplog.set_level(logging.INFO, "parallelize")
    assert distributed(launcher=launcher(hosts, ["gpu1"]), processes=2)(only_here.times)(7) == 21
    assert "sent to host gpu1, which lacks them: only_here" in caplog.text
    monkeypatch.delitem(sys.modules, "only_here")


@pytest.mark.parametrize(
    ("names", "options", "match"),
    [
        (["nowhere.invalid"], {}, r"host nowhere\.invalid has ended\n.*not resolve"),
        (["gpu1"], {"python": "/no/python"}, r"host gpu1 has ended\n.*/no/python"),
        (["gpu1"], {"env": {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}}, "No module named .*parallelize"),
    ],
)
def test_a_host_without_an_agent_is_named_with_the_words_of_ssh(
    hosts: Hosts, names: list[str], options: Any, match: str
) -> None:
    """A name that does not resolve, an interpreter that is not there, and one without this package."""
    if "env" in options:  # the environment of the tests may have the package installed
        options = {"python": "/usr/bin/python3"} if Path("/usr/bin/python3").exists() else options
        match = "No module named|no module named|ended"
    with pytest.raises(LaunchError, match=match):
        distributed(launcher=launcher(hosts, names, **options), processes=1)(fail)()


@pytest.mark.slow
def test_another_version_is_refused_before_the_call_is_sent(hosts: Hosts, tmp_path: Path) -> None:
    """The error names both versions."""
    copied = shutil.copytree(PACKAGE, tmp_path / "parallelize")
    (copied / "version.py").write_text('__version__ = "0.0.1"\n')
    run = distributed(launcher=launcher(hosts, ["gpu1"], env={"PYTHONPATH": str(tmp_path)}), processes=1)(fail)
    with pytest.raises(ConfigError, match=r"parallelize 0\.0\.1 on host gpu1"):
        run()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"hosts": []}, "hosts"),
        ({"hosts": ["gpu1:8", "gpu2:4"]}, "the same number of GPUs"),
        ({"hosts": ["gpu 1"], "gpus": 1}, "hosts="),
        ({"hosts": 3}, "does not name hosts"),
        ({"hosts": "gpu1,gpu2", "gpus": 1, "num_nodes": 3}, "num_nodes=3 with 2 hosts"),
        ({"hosts": ["gpu1"], "launcher": "local"}, r"hosts=\['gpu1'\] with launcher='local'"),
        ({"hosts": ["gpu1"]}, "gpus"),
    ],
)
def test_hosts_that_do_not_fit_the_options_are_refused(options: dict[str, Any], match: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=match):
        distributed(**options)(fail).explain()


@pytest.mark.parametrize(("command", "match"), [("no-such-ssh", "no no-such-ssh"), ("false", "ended with code 1")])
def test_an_ssh_that_does_not_run_is_named(command: str, match: str) -> None:
    """One that is not installed, and one that ends at once; no socket stays open."""
    with pytest.raises(LaunchError, match=match):
        distributed(launcher=SSHLauncher(hosts=["gpu1"], ssh=(command,)), processes=1)(fail)()


def test_hosts_give_the_layout() -> None:
    """A text with commas, as in PARALLELIZE_HOSTS, and the number of GPUs of each host."""
    text = distributed(hosts="gpu1:8,gpu2:8")(fail).explain()
    assert "2 node(s) x 8 = 16" in text
    with pytest.raises(ConfigError, match="hosts have no queue"):
        distributed(hosts="gpu1:8,gpu2:8")(fail).submit()


SCRIPT = """
import os, sys, time
from parallelize import SSHLauncher, distributed, rank

@distributed(launcher=SSHLauncher(hosts=["gpu1", "gpu2"], ssh={ssh!r}, env={env!r}), processes=1)
def wait(folder):
    open(f"{{folder}}/pid{{rank()}}", "w").write(str(os.getpid()))
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        open(f"{{folder}}/interrupted{{rank()}}", "w").close()
        return "saved"

if __name__ == "__main__":
    wait(sys.argv[1])
"""


class Waiting:
    """A script in whose call both ranks wait."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        env = {"PYTHONPATH": str(PARENT), "OMP_NUM_THREADS": "1"}
        (folder / "script.py").write_text(SCRIPT.format(ssh=hosts.ssh, env=env))
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, folder / "script.py", folder], stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        self.pids = [int(self.text_of(f"pid{number}")) for number in range(2)]

    def text_of(self, name: str) -> str:
        """Return the text of a file that a rank writes."""
        end = time.monotonic() + 120
        while not ((self.folder / name).exists() and (text := (self.folder / name).read_text())):
            assert time.monotonic() < end, name
            time.sleep(0.1)
        return text

    def require_gone(self) -> None:
        """Wait until no rank is left."""
        end = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in self.pids):
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.mark.slow
def test_ctrl_c_is_a_keyboard_interrupt_in_every_rank(hosts: Hosts, tmp_path: Path) -> None:
    """The function may go on; then the caller gets its KeyboardInterrupt."""
    waiting = Waiting(hosts, tmp_path)
    waiting.process.send_signal(signal.SIGINT)
    _, err = waiting.process.communicate(timeout=120)
    assert "KeyboardInterrupt" in err
    assert {each.name for each in tmp_path.glob("interrupted*")} == {"interrupted0", "interrupted1"}
    waiting.require_gone()


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_caller(hosts: Hosts, tmp_path: Path) -> None:
    """The agents end with their connections, and the ranks with the agents."""
    waiting = Waiting(hosts, tmp_path)
    waiting.process.kill()
    waiting.process.communicate(timeout=60)
    waiting.require_gone()


@pytest.mark.slow
def test_a_lost_connection_ends_the_call_on_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """The error names the host."""
    waiting = Waiting(hosts, tmp_path)
    children = Path(f"/proc/{waiting.process.pid}/task/{waiting.process.pid}/children").read_text().split()
    lost = next(each for each in children if b"gpu2" in Path(f"/proc/{each}/cmdline").read_bytes())
    os.kill(int(lost), signal.SIGKILL)
    _, err = waiting.process.communicate(timeout=120)
    assert "LaunchError: the connection to host gpu2 has ended" in err
    waiting.require_gone()


AGENT = """
import os, signal, struct, sys
from multiprocessing.connection import Connection
from parallelize.launchers.ssh import _versions

open(0, "rb", 0, closefd=False).readline()  # the variables
Connection(os.dup(0), writable=False).recv()
Connection(os.dup(1), readable=False).send((_versions(), ("127.0.0.1", 1), set()))
call = open(0, "rb", 0, closefd=False)
size, = struct.unpack("!i", call.read(4))
os.kill(os.getppid(), signal.SIGINT)
received = b""
while len(received) < size and (part := call.read(size - len(received))):
    received += part
with open(os.environ["RECEIVED"], "w") as file:
    file.write("whole" if len(received) == size else "part")
"""

SENDING = """
import sys
from parallelize import SSHLauncher, distributed

@distributed(launcher=SSHLauncher(hosts=["gpu1"], ssh=sys.argv[1:]), processes=1)
def size_of(data):
    return len(data)

if __name__ == "__main__":
    size_of(bytes(1 << 24))
"""


def test_ctrl_c_while_a_call_is_sent_ends_it(tmp_path: Path) -> None:
    """A word to the agent would stand in the middle of the pickled call, which the agent could not read then."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "sending.py").write_text(SENDING)
    env = {**os.environ, "PYTHONPATH": str(PARENT), "RECEIVED": str(tmp_path / "received")}
    command = [sys.executable, tmp_path / "sending.py", sys.executable, tmp_path / "agent.py"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert (tmp_path / "received").read_text() == "part", ended.stderr
    assert "KeyboardInterrupt" in ended.stderr
