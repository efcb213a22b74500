"""`parallelize run`: scripts in real processes, their results, how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from ranks import without_leak_report

from parallelize.cli.run_script import _renumber_gpus
from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import compute_layout
from parallelize.runtime.context import Runtime, _active

Run = Callable[..., "subprocess.CompletedProcess[str]"]

CLEAN = {name: text for name, text in os.environ.items() if not name.startswith(("PARALLELIZE_", "SLURM_"))}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Write files, and run `parallelize run` in their folder."""

    def run(
        words: str, files: dict[str, str], *, env: dict[str, str] | None = None, before: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        command = [sys.executable, *(before or ("-m", "parallelize")), "run", *words.split()]
        environ = {**CLEAN, **(env or {})}
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False
        )

    return run


# Undecorated: a class of __main__ that is pickled, a loader with workers, every helper outside and inside of a block,
# an imported decorated function with its own options, an atexit handler.
PLAIN = """
    import atexit, io, json, pathlib, sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    from parallelize import all_gather, all_reduce, barrier, device, is_main
    from parallelize import parallel_model, rank, shard_loader, world_size
    from beside import train

    class Net(nn.Linear):
        pass

    class Numbers(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            return torch.full((1,), float(index))

    atexit.register(lambda: pathlib.Path(f"at_exit.{rank()}").touch())
    model = Net(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = shard_loader(DataLoader(Numbers(), batch_size=2, num_workers=1))
    with parallel_model(model):
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    seen = [None] * world_size()
    dist.all_gather_object(seen, model)
    barrier()
    said = {
        "main": __name__,
        "argv": sys.argv,
        "path": sys.path[0],
        "ranks": all_gather(rank()),
        "sum": all_reduce(1.0, "sum"),
        "steps": len(loader),
        "weight": round(model.weight.item(), 4),
        "is Net": [type(each) is Net for each in seen],
        "drawn": all_gather(torch.rand(1)).flatten().tolist(),
        "train": train(),
        "device": str(device()),
    }
    if is_main():
        print(json.dumps(said))
"""
DECORATED_IMPORT = """
    import torch
    from parallelize import distributed, parallel_model, rank

    @distributed(processes=2, amp="bf16", backend="fsdp")
    def train():
        from parallelize.runtime.context import current
        config = current().config
        return [rank(), str(config.amp.dtype), config.backend.name]
"""


def test_an_undecorated_script(run: Run, tmp_path: Path) -> None:
    """It runs as __main__ in every process, its helpers work everywhere in it, and a decorated import joins them."""
    done = run("--processes 2 --seed 5 plain.py -- --lr 0.1", {"plain.py": PLAIN, "beside.py": DECORATED_IMPORT})
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    drawn = said.pop("drawn")
    # Ranks 0 and 1 have the even and the odd numbers: the mean of their sums, 28 / 2, times 0.1.
    assert said == {
        "main": "__main__",
        "argv": ["plain.py", "--lr", "0.1"],
        "path": str(tmp_path),
        "ranks": [0, 1],
        "sum": 2.0,
        "steps": 2,
        "weight": -1.4,
        "is Net": [True, True],
        "train": [0, "torch.bfloat16", "fsdp"],
        "device": "cpu",
    }
    assert drawn[0] != drawn[1]  # a block under seed= gives each rank a separate RNG, as in a decorated call
    assert sorted(path.name for path in tmp_path.glob("at_exit.*")) == ["at_exit.0", "at_exit.1"]


@pytest.mark.slow
def test_the_same_script_in_one_process(run: Run) -> None:
    """With one process it runs in this process; -m runs it too."""
    plain = PLAIN.replace("from beside import train", "train = list")
    done = run("--processes 1 -m pkg.plain -- x", {"pkg/plain.py": plain})
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["main"], said["ranks"], said["sum"], said["weight"]) == ("__main__", [0], 1.0, -2.8)
    assert said["argv"][1:] == ["x"]


@pytest.mark.slow
def test_options_override_the_block_and_the_environment(run: Run) -> None:
    """Options of the command line override those of a block and those of the environment."""
    script = """
        import torch
        from parallelize import parallel_model
        from parallelize.runtime.context import current
        with parallel_model(torch.nn.Linear(1, 1), backend="ddp", amp="O0"):
            config = current().config
            print(config.backend.name, config.amp.level, config.verify_every, current().world.world_size)
    """
    done = run(
        "--backend fsdp --amp O1 --processes 2 s.py",
        {"s.py": script},
        env={"PARALLELIZE_GPUS": "4", "PARALLELIZE_AMP": "O2", "PARALLELIZE_VERIFY_EVERY": "0"},
    )
    assert (done.stdout, done.returncode) == ("fsdp O1 0 2\n", 0), done.stderr


DECORATED = """
    import sys
    from parallelize import distributed, rank
    def train():
        from parallelize.runtime.context import current
        return rank(), current().config.amp is not None
    train = distributed(gpus=8)(train)
    print("top", __name__, sys.argv, sys.flags.utf8_mode, train.all_ranks())
    sys.exit(7)
"""


@pytest.mark.slow
def test_a_decorated_script(run: Run) -> None:
    """It runs once, its calls have the options of the command line, and its exit code is the command's."""
    done = run("--processes 2 --amp bf16 s.py -- -x", {"s.py": DECORATED}, before=("-X", "utf8", "-m", "parallelize"))
    assert done.stdout == "top __main__ ['s.py', '-x'] 1 [(0, True), (1, True)]\n", done.stderr
    assert (done.returncode, without_leak_report(done.stderr)) == (7, "")


@pytest.mark.slow
def test_a_request_that_does_not_fit_this_machine(run: Run) -> None:
    """Refused before anything starts, without a traceback, with exit code 2."""
    done = run("--processes 2 --backend dp --num-nodes 3 s.py", {"s.py": "print('never')"})
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr.splitlines()[-2].startswith("  why: ")
    assert "Traceback" not in done.stderr


ENDINGS = """
    import os, signal, sys
    from parallelize import barrier, rank
    how = sys.argv[1]
    if rank() == int(sys.argv[2]):
        if how == "raise":
            raise LookupError("no such word")
        if how == "refuse":
            from parallelize import all_reduce
            all_reduce(1.0, "median")
        if how == "exit":
            sys.exit(9)
        if how == "message":
            sys.exit("out of data")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_how_a_script_ends(processes: int, run: Run) -> None:
    """An exception has the traceback of the rank without frames of ours; the exit code is that of the script."""
    script = {"s.py": ENDINGS}
    rank = processes - 1

    def ended(how: str) -> tuple[int, str]:
        done = run(f"--processes {processes} s.py -- {how} {rank}", script)
        assert done.stdout == ""
        return done.returncode, done.stderr

    code, said = ended("raise")
    assert code == 1
    trace = said[said.index("Traceback") :]
    assert trace.splitlines()[1].strip().startswith('File "s.py", line'), said
    assert said.count("LookupError: no such word") == 1
    assert "runpy" not in said
    assert (f"rank {rank} of 2" in said) == (processes == 2)

    code, said = ended("exit")
    assert (code, "Traceback" in said) == (9, False)

    if processes == 1:
        code, said = ended("refuse")
        assert (code, "Traceback" in said, "op='median'" in said) == (1, True, True)
        assert ended("message") == (1, "out of data\n")
    else:
        code, said = ended("kill")
        assert (code, "was ended by SIGKILL" in said) == (128 + signal.SIGKILL, True)


@pytest.mark.slow
def test_a_script_with_a_syntax_error(run: Run) -> None:
    """The SyntaxError is printed once."""
    done = run("--processes 2 s.py", {"s.py": "def f(:\n"})
    assert done.returncode == 1
    assert done.stderr.count("SyntaxError") == 1
    assert "runpy" not in done.stderr


@pytest.mark.slow
def test_torchrun_may_start_it(run: Run) -> None:
    """Under torchrun each process runs the script, and no other process is started."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "parallelize")
    script = "import sys\nfrom parallelize import all_gather, rank\nsys.stdout.write(f'{all_gather(rank())}\\n')\n"
    done = run("s.py", {"s.py": script}, before=torchrun)
    assert done.stdout.splitlines() == ["[0, 1]"] * 2, done.stderr


WAITING = """
    import pathlib, time
    from parallelize import rank
    try:
        pathlib.Path(f"ready.{rank()}").touch()
        time.sleep(300)
    finally:
        pathlib.Path(f"finally.{rank()}").touch()
"""


@pytest.mark.slow
def test_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C in a terminal runs the `finally` blocks of the script in every process, and ends all processes."""
    (tmp_path / "s.py").write_text(textwrap.dedent(WAITING))
    command = [sys.executable, "-m", "parallelize", "run", "--processes", "2", "s.py"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=CLEAN,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        end = time.monotonic() + 40
        while len(list(tmp_path.glob("ready.*"))) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.glob("finally.*")) == ["finally.0", "finally.1"]
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.slow
@pytest.mark.soak
def test_several_nodes(tmp_path: Path) -> None:
    """The same command on each node, with MASTER_ADDR and MASTER_PORT, is one world of all processes."""
    (tmp_path / "s.py").write_text("from parallelize import all_gather, rank\nprint(all_gather(rank()))\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-m", "parallelize", "run", "--num-nodes", "2", "--processes", "1", "s.py"]
    nodes = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**CLEAN, **address, "NODE_RANK": str(node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    ended = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ended
    assert [out for out, _ in ended] == ["[0, 1]\n", ""]  # rank 0's output, on its node


@pytest.mark.slow
def test_all_gpus_or_else_processes(run: Run) -> None:
    """On a machine without GPUs, `--gpus auto --processes 2` starts two processes, with and without a decorator."""
    plain = "from parallelize import all_gather, device, is_main, rank\nranks = all_gather(rank())\n"
    decorated = "from parallelize import distributed, world_size\nprint(distributed()(lambda: world_size())())\n"
    script = {"s.py": f"{plain}print(ranks, device()) if is_main() else None\n", "d.py": decorated}
    without_gpus = {"CUDA_VISIBLE_DEVICES": ""}
    assert run("--gpus auto --processes 2 s.py", script, env=without_gpus).stdout == "[0, 1] cpu\n"
    assert run("--gpus auto --processes 2 d.py", script, env=without_gpus).stdout == "2\n"


@pytest.mark.parametrize(
    ("requested", "is_worker", "expected"),
    [("2,3", True, "0,1"), ("2,3", False, "2,3"), ("3,", True, "0,"), ("0", True, "0"), ("auto", True, "0,1,2,3")],
)
def test_gpus_are_named_as_the_process_numbers_them(
    requested: str, is_worker: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker sees only the GPUs of the run, counted from 0; a process without a mask sees all."""
    layout = compute_layout(Config.parse(gpus=requested), Hardware("cuda", 4))
    token = _active.set(Runtime(World(), layout.renumbered() if is_worker else layout))
    monkeypatch.setenv("PARALLELIZE_GPUS", requested)
    monkeypatch.setenv("PARALLELIZE_PROCESSES", "2")
    try:
        _renumber_gpus()
    finally:
        _active.reset(token)
    assert os.environ["PARALLELIZE_GPUS"] == expected
    assert ("PARALLELIZE_PROCESSES" in os.environ) == (expected == "0")
