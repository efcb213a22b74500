"""Arguments and return values of calls: pickled without loss, and only trained modules are updated in place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from parallelize import distributed

MIB = 2**20


@distributed(processes=2)
def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


FULL = """
    import os, pathlib, torch
    from torch import nn
    from parallelize import distributed, parallel_model

    @distributed(processes=2)
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with parallel_model(model):
            model(torch.ones(2, 500)).sum().backward()
            optimizer.step()
        if os.environ["RANK"] == "0":
            pathlib.Path(os.environ["TMPDIR"], "big").write_bytes(bytes(4_500_000))  # of 6 MB

    def weight(size):
        return nn.utils.skip_init(nn.Linear, 500, size)

    if __name__ == "__main__":
        try:
            train(weight(5000))
        except Exception as error:
            print(repr(error), error)
        model = weight(500)
        nn.init.zeros_(model.weight)
        train(model)
        other = weight(1900)  # 3.8 MB
        try:
            train(other)
        except Exception as error:
            print(repr(error))
        print("trained", model.weight.mean().item())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_temporary_folder_is_named_and_costs_no_weights(tmp_path: Path) -> None:
    """A call that is too large is a LaunchError; a rank that cannot write its result waits for space."""
    (tmp_path / "train.py").write_text(textwrap.dedent(FULL))
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=True)
    try:
        with subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        ) as process:
            assert process.stdout is not None
            shown = ""
            while "waits with its result" not in shown and (line := process.stdout.readline()):
                shown += line
            (folder / "big").unlink()
            shown += process.stdout.read()
        assert re.search(r"LaunchError\(.*the disk of \S*small\S* is full", shown), shown
        assert re.search(r"LaunchError\(.*is full: \S+ bytes are free, and models of 3,807,600 bytes", shown), shown
        assert "cannot be pickled" not in shown
        assert re.search(r"trained -0.2", shown), shown
    finally:
        subprocess.run(["umount", folder], check=True)


CLASSES = """
    import functools
    from parallelize import distributed

    calls = 0

    @functools.lru_cache(maxsize=None)
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    class Result:
        runs = 1

        def use(self):
            global calls
            calls += 1

    class WrongError(Exception):
        use = Result.use

    @distributed(processes=2)
    def train(is_failing):
        Result.runs = 7
        if is_failing:
            raise WrongError
        return Result(), fibonacci(30)

    if __name__ == "__main__":
        before = Result.use, WrongError.use
        result, number = train(False)
        result.use()
        try:
            train(True)
        except WrongError as error:
            error.use()
        print(number, calls, Result.runs, before == (Result.use, WrongError.use), type(result) is Result)
"""


def test_classes_and_caches_of_a_script(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """What comes back is of the caller's own classes, which stay as they are; a cached function is sent anew."""
    assert run_script(CLASSES).stdout == "832040 2 1 True True\n"


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: bytes(100 * MIB), lambda: torch.arange(25 * MIB, dtype=torch.float32)])
def test_a_hundred_megabytes_there_and_back(make: Any) -> None:
    """Values of 100 MB are passed and returned without a deadlock on a full pipe."""
    large = make()
    ((returned,), _) = echo(large)
    assert torch.equal(returned, large) if isinstance(large, torch.Tensor) else returned == large


def memory_of(name: str) -> int:
    """Return a number of /proc/self/smaps_rollup or /proc/self/status in bytes.

    Private_Dirty has pages of the page cache that are not on the disk yet: Anonymous are this process's own.
    """
    for file in ("smaps_rollup", "status"):
        for line in Path("/proc/self", file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise KeyError(name)


@distributed(processes=2)
def read(item: Any) -> int:
    """Return by how much reading has grown what only this process has."""
    before = memory_of("Anonymous")
    for part in item if isinstance(item, list) else [item]:
        part.sum()
    return memory_of("Anonymous") - before


@distributed(processes=2)
def most_memory(item: Any, *, writes: bool = False) -> int:
    """Return the most memory that this process has had."""
    if writes:
        item += 1
    return memory_of("VmHWM")


SIZE = 64 * MIB
LARGE: dict[str, Callable[[Path], Any]] = {
    "tensor": lambda _: torch.ones(SIZE // 4),
    "array": lambda _: np.ones(SIZE // 8),
    "Fortran": lambda _: np.ones((1024, SIZE // 8192), order="F"),
    "list of arrays": lambda _: [np.ones(SIZE // 8000) for _ in range(1000)],
    "memmap": lambda path: np.memmap(path, dtype=np.float64, mode="c"),
    "slice of a memmap": lambda path: np.asarray(np.memmap(path, dtype=np.float64, mode="c"))[::2],
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_argument_costs_its_own_bytes(name: str, tmp_path: Path) -> None:
    """Its pages are the page cache's until a rank writes them; no rank copies it to compare it with itself later."""
    np.ones(SIZE // 8).tofile(tmp_path / "x")
    item = LARGE[name](tmp_path / "x")
    most_alone = max(most_memory.all_ranks(None))
    assert max(most_memory.all_ranks(item)) - most_alone < SIZE // 4
    assert max(read.all_ranks(item)) < SIZE // 4
    if not isinstance(item, list):
        with warnings.catch_warnings():  # a tensor that is written to is named
            warnings.simplefilter("ignore")
            assert max(most_memory.all_ranks(item, writes=True)) - most_alone < SIZE * 1.4


def test_a_large_array_that_is_returned_is_mapped() -> None:
    """The caller gets it as it gets a tensor: copied where it writes to it."""
    before = memory_of("Anonymous")
    array = ones(SIZE // 8)
    assert array.sum() == SIZE // 8
    assert memory_of("Anonymous") - before < SIZE // 4
    array += 1
    assert array[-1] == 2.0


@distributed(processes=2)
def ones(length: int) -> Any:
    return np.ones(length)


@distributed(processes=2)
def write_own_row(rows: Any) -> Any:
    """Write this rank's row of a file, and return the rows that were private to no process."""
    rows[dist.get_rank()] = dist.get_rank() + 1.0
    dist.barrier()
    return rows


def test_a_memmap_is_one_file_for_all_processes(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """What ranks write is in the caller's memmap; one that is returned is content, its file may be a temporary one."""
    rows = np.memmap(tmp_path / "rows", dtype=np.float64, mode="w+", shape=(2, 10_000))
    returned = write_own_row(rows)
    assert (rows[0] == 1.0).all()
    assert (rows[1] == 2.0).all()
    assert [str(each.message) for each in recwarn] == []
    np.testing.assert_array_equal(returned, rows)
    returned[:] = 0.0
    assert rows[1, 0] == 2.0


@distributed(processes=2)
def add_one(x: torch.Tensor) -> float:
    return x.add_(1)[0].item()


def test_a_large_tensor_that_was_written_to_is_named() -> None:
    """The caller has its own; the workers' copies do not come back."""
    x = torch.zeros(MIB)
    with pytest.warns(UserWarning, match="^x changed in the workers and does not come back"):
        assert add_one(x) == 1.0
    assert x[0] == 0.0


def test_tensors_of_every_kind() -> None:
    """Dtypes, layouts, views and requires_grad are kept; a tensor with a grad_fn is passed by value."""
    sent = {
        "half": torch.ones(3, dtype=torch.bfloat16),
        "view": torch.arange(12.0).view(3, 4).T[1:],
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 3),
        "leaf": torch.ones(2, requires_grad=True),
        "loss": torch.ones(2, requires_grad=True).sum(),
        "meta": torch.empty(2, device="meta"),
    }
    ((back,), _) = echo(sent)
    for name, tensor in sent.items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0)
        assert back[name].requires_grad == tensor.requires_grad


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def test_tied_weights_and_aliases_are_kept() -> None:
    """Arguments that share an object or a storage still share it after the call."""
    net, flat = Tied(), torch.zeros(10)
    ((nets, first, second), _) = echo([net, net], flat[:5], flat[5:])
    assert nets[0] is nets[1]
    assert nets[0].head.weight is nets[0].embed.weight
    first.untyped_storage()[0] = 1
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


@distributed(processes=2)
def train(*models: Any, **named: Any) -> None:
    """Fill the weights with different values on each rank; only rank 0's are copied back."""
    items = [*models, *named.values()]
    nets = [each for item in items for each in (item if isinstance(item, (list, tuple)) else [item])]
    nets = [each for item in nets for each in (item.values() if isinstance(item, dict) else [item])]
    with torch.no_grad():
        for net in nets:
            for tensor in (*net.parameters(), *net.buffers()):
                tensor.fill_(7 + dist.get_rank())


def is_trained(net: nn.Module) -> bool:
    return all(bool((tensor == 7).all()) for tensor in (*net.parameters(), *net.buffers()))


def test_modules_are_updated_in_every_argument() -> None:
    """In place, with rank 0's weights, by position, by name or in containers; not with update_modules=False."""
    nets = [Tied() for _ in range(5)]
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=1.0)
    held = nets[0].embed.weight
    train(nets[0], [nets[1], {"a": nets[2]}], by_name=nets[3], again=(nets[4], nets[0]))
    assert all(map(is_trained, nets))
    assert held is nets[0].head.weight
    assert optimizer.param_groups[0]["params"][0] is held
    assert held.requires_grad
    assert nets[0].norm.num_batches_tracked.item() == 7
    untouched = Tied()
    train.options(update_modules=False)(untouched)
    assert not is_trained(untouched)


@distributed(processes=2)
def grow(net: nn.Linear) -> None:
    net.weight = nn.Parameter(torch.ones(3, 1))


def test_a_module_that_changed_its_shape_gives_a_warning() -> None:
    """Weights that cannot be copied back are named in a warning that points to the call."""
    net = nn.Linear(1, 1)
    with pytest.warns(UserWarning, match="Linear: weight changed shape or name") as caught:
        grow(net)
    assert caught[0].filename == __file__


@distributed(processes=2)
def forward(*nets: nn.Module) -> None:
    for net in nets:
        net(torch.ones(2, 3))


@distributed(processes=2)
def total_of(net: nn.Module) -> int:
    return sum(1 for _ in net.parameters())


def test_lazy_modules_are_initialized() -> None:
    """Lazy layers that ran in the call are initialized; those that did not stay lazy."""
    net, other = nn.LazyLinear(2), nn.LazyLinear(2)
    total_of(other)
    assert is_lazy(other.weight)
    forward(net)
    assert net(torch.zeros(5, 3)).shape == (5, 2)
    assert type(net) is nn.Linear
