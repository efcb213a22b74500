"""parallel_model without @distributed: in plain scripts and under torchrun."""

from __future__ import annotations

import copy
import gc
import itertools
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TORCHRUN, Checks
from torch import nn
from zoo import Mlp

from parallelize import ConfigError, DDPBackend, all_gather, distributed, parallel_model, rank
from parallelize.run import context

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]

LEGACY = """
import pathlib, random
import torch
import torch.distributed as dist
from parallelize import parallel_model, rank

def legacy_train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()

torch.manual_seed(rank())
random.seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]
with parallel_model(model):
    legacy_train(model, loader, optimizer)
    drawn = random.random()
assert not dist.is_initialized()
pathlib.Path(f"weights{rank()}").write_text(str(model.weight.tolist()))
pathlib.Path(f"drawn{rank()}").write_text(str(drawn))
"""


def test_a_legacy_script_under_torchrun(run_script: Run, tmp_path: Path) -> None:
    """The processes form a group, gradients are averaged, random numbers differ, and the group is destroyed."""
    run_script(LEGACY, launcher=TORCHRUN)
    assert (tmp_path / "weights0").read_text() == (tmp_path / "weights1").read_text()
    assert (tmp_path / "drawn0").read_text() != (tmp_path / "drawn1").read_text()


SPAWNED = """
import sys

import torch
import torch.distributed as dist
from parallelize import distributed, parallel_model, rank, world_size

def step(start):
    model = torch.nn.Linear(2, 1)
    with parallel_model(model, backend="ddp"):
        model(torch.full((1, 2), start)).sum().backward()
    return model.weight.grad.tolist()

def work(number, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=number, world_size=2)
    assert (rank(), world_size()) == (number, 2)
    start = float(2 * number)
    assert step(start) == distributed()(step)(start) == [[1.0, 1.0]]
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, sys.argv[1:], nprocs=2)
"""


def test_a_process_group_without_a_launcher_is_a_world(run_script: Run, tmp_path: Path) -> None:
    """Processes that the user spawns, which have no variables, are ranks of the group that they initialize."""
    run_script(SPAWNED, args=(str(tmp_path / "store"),))


BLOCK_AFTER_BLOCK = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from parallelize import parallel_model, shard_loader

dist.init_process_group("gloo")
torch.manual_seed(0)
loader = DataLoader(torch.randn(8, 4), batch_size=2, shuffle=True)
for _ in range(2):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with parallel_model(model):
        for x in shard_loader(loader):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
dist.destroy_process_group()
"""


def test_blocks_in_one_group_of_the_users_compare_their_own_orders(run_script: Run) -> None:
    """The second block's first step is another sync point than the first block's, though its run is a new one."""
    run_script(BLOCK_AFTER_BLOCK, launcher=TORCHRUN)


@distributed(processes=2, timeout=10)
def wait_longer_than_the_timeout_of_the_run() -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    model = Mlp()
    with parallel_model(model):
        time.sleep(15 * rank())
        model(torch.ones(2, 6)).mean().backward()
        time.sleep(15 * (1 - rank()))


def test_the_timeout_of_the_users_group_holds_in_a_block() -> None:
    """A rank may come later than the run's timeout, to a backward pass and to the end of the block."""
    wait_longer_than_the_timeout_of_the_run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backend": "ddp", "processes": 2},
            r"(?s)backend='ddp' with 2 processes.*@distributed.*torchrun.*backend='dp'",
        ),
        ({"backend": "ddq"}, r"did you mean 'ddp'"),
        ({"bakend": "dp"}, r"did you mean 'backend'"),
    ],
)
def test_requests_that_cannot_work_without_a_launcher_are_refused(options: dict[str, Any], message: str) -> None:
    """The error contains the fix."""
    with pytest.raises(ConfigError, match=message), parallel_model(Mlp(), **options):
        pass


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """PARALLELIZE_BACKEND chooses for a script, as it does for a decorated function."""
    monkeypatch.setenv("PARALLELIZE_BACKEND", "dp")
    with parallel_model(Mlp(), backend="ddp"):
        run = context.active()
        assert run is not None
        assert run.config.backend.name == "dp"


def test_wrap_returns_the_users_own_ddp() -> None:
    """wrap= gets the module and the World; a path around the forward of its DDP is told at the end of the block."""

    def configure_ddp(module: nn.Module, world: Any) -> nn.Module:
        assert world.world_size == 2
        return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1)

    @distributed(processes=2, wrap=configure_ddp)
    def train() -> torch.Tensor:
        from parallelize import SyncError

        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            model(torch.full((2, 6), rank() + 1.0)).mean().backward()
            optimizer.step()
        trained = model.head.weight.detach().clone()
        differs = pytest.raises(SyncError, match="parameters differ between the ranks at the end of the block")
        with differs, parallel_model(model):
            model.encoder(torch.full((2, 6), rank() + 1.0)).mean().backward()
            optimizer.step()
        return trained

    assert torch.equal(*train.all_ranks())


def test_wrap_returns_any_module() -> None:
    """Another wrapper runs forwards with gradients only, and nothing averages what it computes."""
    calls: list[str] = []

    def wrap(module: nn.Module, _world: Any) -> nn.Module:
        wrapper = nn.Sequential(module)
        wrapper.register_forward_hook(lambda *_: calls.append("forward"))
        return wrapper

    @distributed(processes=2, wrap=wrap, update_modules=False)
    def train() -> list[str]:
        model = Mlp()
        with parallel_model(model):
            with torch.no_grad():
                model(torch.ones(2, 6))
            model(torch.full((2, 6), rank() + 1.0)).mean().backward()
            assert not torch.equal(*all_gather(model.head.weight.grad))
        return calls

    assert train() == ["forward"]


@pytest.mark.parametrize("hook", ["fp8", (None, print)])
def test_an_unknown_comm_hook_is_refused(hook: Any) -> None:
    """The options are checked when the backend is constructed."""
    with pytest.raises(ConfigError, match=r"(?s)comm_hook=.*powerSGD_hook.*wrap="):
        DDPBackend(comm_hook=hook)


check = Checks(processes=2)


@check
def a_block_has_its_own_options_inside_a_run() -> None:
    """Options of the computation may differ between blocks; the number of processes may not."""
    for backend, is_rounded in ((DDPBackend(comm_hook="bf16"), True), (None, False)):
        model = Mlp()
        with parallel_model(model, backend=backend):
            model(torch.linspace(0, 1, 12).view(2, 6)).square().mean().backward()
        gradient = model.head.weight.grad
        assert torch.equal(gradient, gradient.bfloat16().float()) == is_rounded
    with pytest.raises(ConfigError, match=r"3 asked for, 2 started"), parallel_model(model, processes=3):
        pass


@check
def buffers_that_cannot_be_broadcast_are_refused() -> None:
    """Sparse and quantized tensors, conjugate views, and elements that share memory are refused at the entry."""
    buffers = {
        "is torch.sparse_coo.*to_dense": torch.eye(4).to_sparse(),
        "is torch.sparse_csr": torch.eye(4).to_sparse_csr(),
        "is torch.quint8.*int_repr": torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8),
        "is a conjugate.*resolve_conj": torch.zeros(4, dtype=torch.complex64).conj(),
        "is a negative.*resolve_neg": torch.zeros(4, dtype=torch.complex64).conj().imag,
        "has elements that share memory.*contiguous": torch.zeros(8).unfold(0, 4, 1),
        "is trained and expanded.*contiguous": torch.zeros(1, requires_grad=True).expand(4),
    }
    for backend, (message, buffer) in itertools.product(("ddp", "fsdp"), buffers.items()):
        model = nn.Linear(6, 1)
        model.register_buffer("table", buffer)
        refused = pytest.raises(ConfigError, match=f"(?s)table of Linear {message}")
        with refused, parallel_model(model, backend=backend):
            pass
    model.register_buffer("table", torch.ones(4, 2, dtype=torch.bool).T)
    for backend in ("ddp", "fsdp"):
        with parallel_model(model, backend=backend):
            pass


class Phases(nn.Module):
    """Has complex gradients, and sparse ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.table(x) * self.phase).abs()


@check
def compression_leaves_complex_and_sparse_gradients_as_they_are() -> None:
    """They are averaged in their own dtype and layout."""
    for hook in ("fp16", "bf16"):
        model = Phases()
        with parallel_model(model, backend=DDPBackend(comm_hook=hook)):
            model(torch.tensor([rank()])).sum().backward()
        plain = copy.deepcopy(model)
        plain.zero_grad()
        (plain(torch.tensor([0, 1])).sum() / 2).backward()
        torch.testing.assert_close(model.phase.grad, plain.phase.grad)
        assert model.table.weight.grad.is_sparse
        torch.testing.assert_close(model.table.weight.grad.to_dense(), plain.table.weight.grad.to_dense())


@check
def the_engine_is_freed_with_the_block() -> None:
    """Communication buffers are freed without the garbage collector."""

    def alive() -> int:
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    for is_warm in (False, True):  # the first time, flags are cached
        model = Mlp()
        gc.collect()
        gc.disable()
        before = alive()
        with parallel_model(model):
            model(torch.ones(2, 6)).mean().backward()
        model.zero_grad()
        end_s = time.monotonic() + 20.0
        while is_warm and alive() > before and time.monotonic() < end_s:
            time.sleep(0.05)  # hang detection is looking at a frame
        after = alive()
        gc.enable()
    assert after <= before


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("name", check)
def test_a_check_holds_on_all_ranks(name: str) -> None:
    """What the check's docstring says."""
    check.assert_holds(name)
