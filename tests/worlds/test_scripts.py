"""Scripts without a __main__ guard, from a file, -c or stdin."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

pytestmark = pytest.mark.slow

Run = Callable[..., "CompletedProcess[str]"]

# Uses a class, a function and a global of __main__; a worker that ran the script again would never end.
SCRIPT = r"""
import torch
from torch import nn
from parallelize import all_reduce, distributed, parallel_model, rank

class Net(nn.Linear):
    pass

scale = 2.0

@distributed(processes=2)
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel_model(model):
        model(torch.full((1, 1), scale * (rank() + 1))).sum().backward()
        optimizer.step()
    return type(model), all_reduce(torch.ones(1), "sum").item()

model = Net(1, 1, bias=False)
nn.init.zeros_(model.weight)
kind, ranks = train(model)
print(f"once {kind is Net} {ranks} {model.weight.item():.1f}\n", end="")  # one write: ranks share the stream
"""


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_a_script_without_a_guard_trains_its_model(how: str, run_script: Run) -> None:
    """The script runs once, and the model passed as an argument is trained by both ranks."""
    # The gradient is the mean of 2 and 4.
    assert run_script(SCRIPT, how=how).stdout == "once True 2.0 -0.3\n"


def test_torchrun_starts_the_same_script(run_script: Run) -> None:
    """In torchrun's processes the call runs as their ranks, and every rank has the result."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert run_script(SCRIPT, launcher=torchrun).stdout.splitlines() == ["once True 2.0 -0.3"] * 2


@pytest.mark.soak
def test_processes_of_torchrun_exit_cleanly(run_script: Run) -> None:
    """No process aborts at exit in 20 runs, where a gloo thread that outlives its group could free a tensor."""
    for _ in range(20):
        test_torchrun_starts_the_same_script(run_script)


# How scripts name torch's settings, which are module objects of other classes than Python's own.
BACKENDS = r"""
import torch
import torch.backends.cudnn as cudnn
from torch.backends import mkldnn
from torch.backends.cuda import matmul
from torch.utils.data import DataLoader, Dataset
from parallelize import distributed

aten = torch.ops.aten
torch.set_default_dtype(torch.float64)
cudnn.benchmark = True

class Ones(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        with cudnn.flags(enabled=False):
            return torch.ones(1)

@distributed(processes=2)
def train():
    found = [cudnn.benchmark, str(torch.get_default_dtype())]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.opt_einsum.enabled = False
    matmul.allow_tf32 = False
    with torch.backends.cudnn.flags(enabled=False), mkldnn.flags(enabled=False):
        found += [cudnn.enabled, torch.backends.mkldnn.enabled]
    found += [cudnn.benchmark, cudnn.deterministic, torch.backends.cuda.matmul.allow_tf32]
    found += [torch.jit.is_scripting(), hasattr(torch.classes, "loaded_libraries")]
    found += [aten.add(torch.ones(1), 1).item(), torch.ops.aten.mul.Tensor(torch.ones(1), 3).item()]
    return found, sum(x.sum().item() for x in DataLoader(Ones(), num_workers=1, multiprocessing_context="spawn"))

print(train())
"""


def test_a_function_names_torchs_settings(run_script: Run) -> None:
    """By attributes, aliases and context managers; it begins with those of the script, also in a loader's worker."""
    found = [True, "torch.float64", False, False, False, True, False, False, True, 2.0, 3.0]
    assert run_script(BACKENDS, how="file").stdout == f"({found}, 4.0)\n"
