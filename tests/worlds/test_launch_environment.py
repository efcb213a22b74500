"""Environment variables, process group and torch settings of a worker."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import free_port

from parallelize import distributed
from parallelize.cluster.world import World
from parallelize.errors import LaunchError

pytestmark = pytest.mark.slow

SIZES = ["WORLD_SIZE", "LOCAL_WORLD_SIZE"]
NAMES = ["RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", *SIZES, "MASTER_ADDR", "MASTER_PORT"]


@distributed(processes=2)
def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in NAMES}


def test_the_variables_of_a_worker_are_torchruns() -> None:
    """Workers have torchrun's variables, and each call has its own port."""
    found = environment.all_ranks()
    for number, variables in enumerate(found):
        port = variables.pop("MASTER_PORT")
        assert port is not None
        assert 0 < int(port) < 65536
        assert variables == {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": "0",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
        }


def test_one_process_changes_no_variable() -> None:
    """With processes=1 the calling process keeps its environment."""
    assert environment.options(processes=1)() == {name: os.environ.get(name) for name in NAMES}


@distributed(processes=2)
def path() -> list[str]:
    return sys.path


def test_what_is_no_folder_stays_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the name for a hook of the import, which a namespace package has that is installed editable."""
    monkeypatch.setattr(sys, "path", [*sys.path, "__editable__.acme.finder.__path_hook__"])
    assert path()[-1] == "__editable__.acme.finder.__path_hook__"


def test_a_current_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes cannot start there."""
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    with pytest.raises(LaunchError, match="the current folder does not exist"):
        path()


def connect(world: World) -> None:
    store = dist.TCPStore(world.master_addr, world.master_port, world.world_size, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.world_size, timeout=timedelta(seconds=17)
    )


@distributed(processes=2)
def group_options() -> tuple[float, int]:
    value = torch.ones(1)
    dist.all_reduce(value)
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    return timeout.total_seconds(), int(value.item())


def test_init_connection() -> None:
    """init_connection= is called with the World and replaces our init_process_group."""
    assert group_options.options(init_connection=connect)() == (17, 2)


def test_the_timeout_reaches_the_process_group() -> None:
    """`timeout=` is the timeout of the process group."""
    assert group_options.options(timeout=23)() == (23, 2)


@distributed(processes=2)
def own_group() -> int:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    return int(value.item())


def test_a_worker_may_create_the_process_group_itself() -> None:
    """init_process_group() with torchrun's variables works in a worker."""
    assert own_group() == 2


SCRIPT = """
import pathlib, sys
import torch
import torch.distributed as dist
from parallelize import ConfigError, distributed, rank

class Result:
    pass

@distributed()
def give(x):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, x + rank())
    return model, lambda y: x * y, Result, model.weight

@distributed(**eval(sys.argv[2]))
def train(x):
    print("at work", flush=True)
    return (lambda: x) if rank() else x, dist.get_world_size()

folder = pathlib.Path(sys.argv[1])
try:
    result = [train(10), train(20), distributed(timeout=600)(rank).all_ranks()]
    model, scale, kind, same = give(3.0)
    assert (model.weight.item(), scale(2.0), kind is Result, same is model.weight) == (3.0, 6.0, True, True)
    assert [scale(2.0) for _, scale, _, _ in give.all_ranks(4.0)] == [8.0, 8.0]
except ConfigError as error:
    result = error
folder.joinpath(__import__("os").environ["RANK"]).write_text(str(result))
"""


@pytest.fixture
def torchrun(tmp_path: Path):
    """Runs the script above under torchrun; returns the text that each rank wrote."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def run(options: dict[str, object]) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        subprocess.run(
            [*command, str(tmp_path), repr(options)], cwd=tmp_path, timeout=200, check=True, capture_output=True
        )
        return [(tmp_path / str(number)).read_text() for number in range(2)]

    return run


def test_under_torchrun_a_call_joins(torchrun) -> None:
    """A call starts no process, and returns rank 0's value on every rank: lambdas and modules, too."""
    assert torchrun({}) == [str([(10, 2), (20, 2), [0, 1]])] * 2


def test_calls_with_different_timeouts_share_the_store_that_rank_0_serves(tmp_path: Path) -> None:
    """Under mpirun rank 0 serves the store: a second call with another timeout= uses the same one."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    port = free_port()
    world = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), "{}"],
            env={**os.environ, **world, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank, "RANK": rank},
        )
        for rank in ("0", "1")
    ]
    assert [each.wait(timeout=200) for each in started] == [0, 0]
    assert {(tmp_path / rank).read_text() for rank in ("0", "1")} == {str([(10, 2), (20, 2), [0, 1]])}


def test_a_request_that_does_not_fit_torchruns_world_is_refused(torchrun) -> None:
    """The error on every rank contains both numbers."""
    for result in torchrun({"processes": 4}):
        assert result.startswith("processes per node: 4 asked for, 2 started"), result


@distributed(processes=2)
def torch_settings() -> tuple[torch.dtype, bool, str, str]:
    dtype = torch.tensor(1.5, device="cpu").dtype
    flags = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    return dtype, *flags, torch.empty(1).device.type


def test_torch_settings_of_the_script_apply_in_workers() -> None:
    """Default dtype, device, determinism and matmul precision are those of the caller."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    torch.set_default_device("meta")
    try:
        expected = torch_settings.options(processes=1)()
        found = torch_settings.all_ranks()
    finally:
        torch.set_default_device(None)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert expected == (torch.float64, True, "high", "meta")
    assert found == [expected] * 2


FOREIGN = """
from parallelize import distributed

@distributed(processes=2)
def train():
    import tqdm
    return tqdm.__file__

if __name__ == "__main__":
    import tqdm
    assert train() == tqdm.__file__, train()
    assert train.options(launcher=__import__("parallelize.launchers.local.plugin", fromlist=["*"]).LocalLauncher(
        start_method="spawn"))() == tqdm.__file__
"""


def test_workers_do_not_import_from_the_current_directory_unless_the_caller_does(tmp_path: Path) -> None:
    """Modules in the current directory do not shadow packages: a script's sys.path starts with its own directory."""
    script, current = tmp_path / "scripts" / "script.py", tmp_path / "current"
    for name in ("tqdm.py", "parallelize/__init__.py", "socket.py", "signal.py"):
        (current / name).parent.mkdir(parents=True, exist_ok=True)
        (current / name).write_text("open(__file__ + '.imported', 'w')\nraise ImportError(__file__)\n")
    script.parent.mkdir()
    script.write_text(FOREIGN)
    subprocess.run([sys.executable, script], cwd=current, timeout=240, check=True)
    assert sorted(current.rglob("*.imported")) == []
