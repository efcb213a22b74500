"""`logical=`: the weights have the same bits at any number of processes, or a program is told why they have not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checksum import checksum_of
from ranks import keep_sigchld_handler
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from zoo import Mlp

from parallelize import (
    ConfigError,
    DDPBackend,
    checkpoints,
    distributed,
    no_sync,
    parallel_model,
    rank,
    shard_loader,
    world_size,
)

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from parallelize import checkpoints, distributed, parallel_model, shard_loader

@distributed(processes=2, logical=2, seed=0)
def train(folder):
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    data = DataLoader(TensorDataset(torch.arange(24.0).reshape(8, 3) / 24), batch_size=1, shuffle=True)
    with parallel_model(model), shard_loader(data) as loader, checkpoints(
        folder, every=2, keep=9, model=model, optimizer=optimizer, loader=loader
    ) as saved:
        for epoch in range(loader.epoch, 2):
            for (x,) in loader:
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print("step", saved.steps + 1, *[each.double().sum().item().hex() for each in model.parameters()])
                saved.step()

if __name__ == "__main__":
    train(sys.argv[1])
"""


@pytest.fixture(autouse=True, scope="module")
def sigchld_handler_of_workers() -> None:
    keep_sigchld_handler()


class Noisy(Dataset[Any]):
    """Samples with augmentation by each of the global generators."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        words = torch.randint(9, (6,), generator=torch.Generator().manual_seed(index))
        if random.random() < 0.5:
            words = words.flip(0)
        return words + torch.randint(2, (6,)), np.random.randint(3)


class Net(nn.Module):
    """Layers whose bits depend on how a batch is divided: recurrent, normalized, with dropout, of tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(10, 8), nn.LSTM(8, 8, batch_first=True)
        self.mix, self.norm, self.head = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
        with torch.autocast("cpu", enabled=False):  # in bf16, not each processor has this kernel
            hidden, _ = self.rnn(self.words(x))
        hidden = F.dropout(self.norm(self.mix(hidden.transpose(1, 2))), 0.2, self.training)
        features = self.head(hidden.mean(2))
        return {"scores": features @ self.words.weight.T, "penalty": features.square().mean()}


def fit(model: nn.Module, folder: Path | None = None, *, workers: int = 0, ends: int | None = None) -> Any:
    """Train for two epochs, in passes of two batches; return what an evaluation is on all processes."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)
    found = []
    with parallel_model(model), shard_loader(loader) as batches, _saved(folder, loader=batches, **objects) as saved:
        for _ in range(batches.epoch, 2):
            model.train()
            for number, (x, y) in enumerate(batches):
                with no_sync(model):
                    output = model(x)
                    (F.cross_entropy(output["scores"], y) + output["penalty"]).backward()
                if number % 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                if saved is not None:
                    saved.step()
                    is_last = saved.steps == ends and rank() == world_size() - 1
                    if folder is not None and is_last and not (folder / "killed").exists():
                        folder.mkdir(exist_ok=True)
                        (folder / "killed").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
            model.eval()
            with torch.no_grad():
                outputs = [(model(x)["scores"], y) for x, y in batches]
            values = [(each.argmax(1) == y).double().mean() for each, y in outputs]
            found.append((batches.mean(values), batches.gather(torch.cat([each for each, _ in outputs]))))
    return found


def _saved(folder: Path | None, **objects: Any) -> Any:
    return contextlib.nullcontext() if folder is None else checkpoints(folder, every=1, **objects)


def trained(processes: int, *, logical: int = 4, **options: Any) -> Any:
    """Return the checksum of the weights that `processes` train, and the value of the call."""
    given = {name: options.pop(name) for name in ("folder", "workers", "ends") if name in options}
    torch.manual_seed(0)
    model = Net()
    value = distributed(processes=processes, logical=logical, seed=3, **options)(fit)(model, **given)
    return checksum_of(model), value


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"amp": "bf16"}], ids=["fp32", "workers", "bf16"])
def test_the_bits_are_those_of_one_process(options: dict[str, Any]) -> None:
    """Weights, buffers and the outputs of an evaluation are bitwise equal on one and two processes."""
    weights, values = trained(1, **options)
    others, found = trained(2, **options)
    assert others == weights
    for (mean, outputs), (other_mean, other_outputs) in zip(values, found, strict=True):
        assert other_mean == mean
        assert torch.equal(other_outputs, outputs)


def test_a_run_resumes_at_another_size(tmp_path: Path) -> None:
    """A run that a rank's death has ended goes on with fewer processes, to the bits of an undisturbed one."""
    weights, _ = trained(2)
    with pytest.raises(Exception, match="SIGKILL"):
        trained(2, folder=tmp_path, ends=4)
    assert trained(1, folder=tmp_path)[0] == weights


def run_and_replay(tmp_path: Path) -> tuple[list[str], Callable[..., str]]:
    """Run a script; return what its steps print, and a function that replays a step after the second one."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, script, tmp_path / "a"], capture_output=True, text=True, check=True)
    command = [sys.executable, "-m", "parallelize", "replay", tmp_path / "a" / "step-000000002.pt", "--step"]

    def replay(*words: Any, typed: str = "", returns: int = 0) -> str:
        words = (*command, *map(str, words), script, tmp_path / "a")
        ended = subprocess.run(words, input=typed, capture_output=True, text=True, check=False)
        assert ended.returncode == returns, ended.stderr
        return ended.stdout + ended.stderr

    return steps_in(run.stdout), replay


def steps_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step")]


@pytest.mark.slow
def test_a_step_of_a_run_is_replayed_in_one_process(tmp_path: Path) -> None:
    """`parallelize replay` computes the bits of the run's step, and saves nothing."""
    lines, replay = run_and_replay(tmp_path)
    files = sorted(each.name for each in (tmp_path / "a").iterdir())
    assert steps_in(replay(5)) == lines[2:5]
    assert sorted(each.name for each in (tmp_path / "a").iterdir()) == files


@pytest.mark.slow
def test_a_replay_stops_in_pdb_before_the_step(tmp_path: Path) -> None:
    """A step that the run has not made after the checkpoint is an error."""
    _, replay = run_and_replay(tmp_path)
    assert "(Pdb) 3" in replay(4, "--debug", typed="p saved.steps\nc\n")
    assert "is of step 2" in replay(2, returns=1)
    assert "has ended before step 99" in replay(99, returns=1)


def test_compare_finds_equal_bits() -> None:
    """compare() of a run with parts has no tolerance."""
    train = distributed(processes=2, logical=2)(fit)
    comparison = train.compare(4, Net())
    assert comparison.is_same, str(comparison)
    assert comparison.tolerance == 0


# Programs that cannot have the same bits


STEPS = 5
"""Steps of `steps` with logical=2: 18 samples in two parts of 2 samples, padded."""


def steps(
    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor], model: nn.Module | None = None, tail: Any = None
) -> None:
    model = model or Mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(18, 6, generator=torch.Generator().manual_seed(0)))
    with parallel_model(model):
        for (x,) in shard_loader(DataLoader(data, batch_size=2), tail=tail):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()


class Counting(nn.Module):
    """A forward with a state that no buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


TOLD: dict[str, tuple[Callable[[nn.Module, torch.Tensor], torch.Tensor], str]] = {
    "sum": (lambda model, x: model(x).square().sum(), "the loss is a Sum, and no mean"),
    "contrast": (lambda model, x: (model(x) @ model(x).T).logsumexp(1).mean(), "compares samples of a batch"),
    "penalty": (
        lambda model, x: model(x).square().mean() + next(model.parameters()).square().mean(),
        "is used outside of a forward",
    ),
    "noise": (lambda model, x: model(x + torch.randn(x.shape)).square().mean(), "drawn between two forwards"),
    "state": (lambda model, x: model(x).square().mean(), "other bits when a part of a batch ran again"),
}


class Scores(nn.Module):
    """Returns one number for each sample, without another dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).flatten()


def test_a_loss_that_compares_scores_is_told() -> None:
    """Outputs may have the batch dimension alone."""
    with pytest.warns(UserWarning, match="compares samples of a batch"):
        distributed(processes=1, logical=2)(steps)(lambda model, x: model(x).logsumexp(0).mean(), Scores())


@pytest.mark.parametrize("name", TOLD)
def test_what_depends_on_the_number_of_processes_is_told(name: str) -> None:
    """A warning in the first step names the loss, parameter, random numbers or forward whose bits have no parts."""
    loss_of, words = TOLD[name]
    with pytest.warns(UserWarning, match=words):
        distributed(processes=1, logical=2)(steps)(loss_of, Counting() if name == "state" else None)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.ones(8, 6))


def with_block(**options: Any) -> Callable[[], None]:
    def run() -> None:
        with parallel_model(Mlp(), **options):
            pass

    return run


def with_loader(loader: Any, **options: Any) -> Callable[[], None]:
    return lambda: next(iter(shard_loader(loader, **options))) and None


def outside_of_a_loader() -> None:
    with parallel_model(Mlp()) as model:
        model(torch.ones(4, 6))


REFUSED: dict[str, tuple[dict[str, Any], Callable[[], Any] | None, str]] = {
    "processes": ({"processes": 3}, None, "each process computes 1, 2, 4, 8, ... parts"),
    "fsdp": ({"backend": "fsdp"}, None, "use backend='ddp'"),
    "wrap": ({"wrap": lambda inner, _: inner}, None, "only its own engine"),
    "hook": ({"backend": DDPBackend(comm_hook="bf16")}, with_block(), "sent in another dtype"),
    "fp16": ({"amp": "fp16"}, with_block(), "amp='bf16'"),
    "O2": ({"amp": "O2"}, with_block(), "amp='bf16'"),
    "sum": ({}, with_block(average="sum"), "average='sum'"),
    "mean": ({}, with_block(buffers="mean"), "buffers='mean'"),
    "changed": ({}, with_block(logical=8), "cannot change inside it"),
    "tensor": ({}, lambda: parallel_model(torch.ones(1, requires_grad=True)).__enter__(), "beside the models"),
    "stream": ({}, with_loader(DataLoader(Stream(), batch_size=2)), "has no indices"),
    "weighted": ({}, with_loader(DataLoader(Noisy(), batch_size=2), tail="weighted"), "tail='weighted'"),
    "no loader": ({}, outside_of_a_loader, "batches of shard_loader have none"),
    "uneven": ({}, lambda: steps(lambda model, x: model(x).square().mean(), tail="exact"), "unequal numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_parts_is_refused(name: str) -> None:
    """Options, losses and loaders whose bits depend on the number of processes are a ConfigError."""
    options, function, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        distributed(**{"processes": 1, "logical": 4, **options})(function or with_block())()


def test_a_forward_that_runs_again_leaves_no_trace() -> None:
    """The first part runs twice, to compare its bits; the model keeps what one run has left."""
    model = Counting()
    with pytest.warns(UserWarning, match="other bits when a part of a batch ran again"):
        distributed(processes=1, logical=2)(steps)(lambda model, x: model(x).square().mean(), model)
    assert model.calls == 2 * STEPS


def of_two_loaders(model: nn.Module) -> None:
    """Train on two loaders, whose batches are read before their forwards, and on a batch again."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    with parallel_model(model):
        labeled = shard_loader(DataLoader(TensorDataset(rows[:16]), batch_size=2))
        unlabeled = shard_loader(DataLoader(TensorDataset(rows[16:]), batch_size=4))
        for (x,), (y,) in zip(labeled, unlabeled, strict=True):
            for _ in range(2):
                optimizer.zero_grad()
                (model(x).square().mean() + model(y).sin().mean()).backward()
                optimizer.step()


def test_batches_of_two_loaders_have_parts() -> None:
    """Each forward has the parts of its batch, whichever loader was read last."""
    checksums = set()
    for processes in (1, 2, 4):
        torch.manual_seed(0)
        model = Mlp()
        distributed(processes=processes, logical=4)(of_two_loaders)(model)
        checksums.add(checksum_of(model))
    assert len(checksums) == 1


class Wide(nn.Module):
    """Sums of many products, whose bits depend on the number of rows that a kernel gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def losses_of(model: nn.Module) -> list[float]:
    """Return means of the losses of samples: in an evaluation, and in training with repeats."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(22, 6, generator=generator), torch.randint(3, (22,), generator=generator))
    found = []
    with parallel_model(model):
        batches = shard_loader(DataLoader(data, batch_size=2, shuffle=True))
        losses = []
        for x, y in batches:
            loss = F.cross_entropy(model(x), y, reduction="none")
            losses.append(loss.detach())
            loss.mean().backward()
        found.append(batches.mean(torch.cat(losses)))
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(x), y, reduction="none") for x, y in batches]
            found.append(batches.mean(torch.cat(losses)))
    return found


def test_means_of_losses_have_the_same_bits() -> None:
    """Of a loss for each sample; repeats of padded batches do not count."""
    torch.manual_seed(0)
    model = Wide()
    alone, *others = [distributed(processes=count, logical=4, seed=1)(losses_of)(model) for count in (1, 2, 4)]
    assert len(set(alone)) == 2
    assert others == [alone, alone]


def evaluated(model: nn.Module) -> dict[int, torch.Tensor]:
    """Train for a step, then evaluate batches of several sizes, of loaders that are not sharded."""
    rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    outputs = {}
    with parallel_model(model):
        for (x,) in shard_loader(DataLoader(TensorDataset(rows[:8]), batch_size=2)):
            model(x).square().mean().backward()
        model.eval()
        with torch.no_grad():
            for size in (1, 2, 3, 4, 8, 12):
                loader = DataLoader(TensorDataset(rows), batch_size=size)
                outputs[size] = torch.cat([model(x) for (x,) in loader])
    return outputs


def test_an_evaluation_of_loaders_that_are_not_sharded_has_the_same_bits() -> None:
    """Also of batches that have as many samples as those of the sharded loader in some process."""
    torch.manual_seed(0)
    model = Wide()
    alone, *others = [distributed(processes=count, logical=4)(evaluated)(model) for count in (1, 2, 4)]
    for outputs in others:
        assert [size for size in alone if not torch.equal(outputs[size], alone[size])] == []


def test_the_start_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The line of rank 0 tells the number of parts, also in one process."""
    caplog.set_level("INFO", logger="parallelize")
    distributed(processes=1, logical=2)(steps)(lambda model, x: model(x).square().mean())
    assert "each batch in 2 parts" in caplog.text
    assert "2 x 2 parts = 4 global" in caplog.text


class Addresses(nn.Module):
    """Keeps where its inputs lie."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)
        self.seen: list[tuple[int, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.storage_offset(), x.untyped_storage().nbytes() // x.element_size() - x.numel()))
        return self.head(x)


def test_a_part_has_memory_of_its_own() -> None:
    """It begins where an allocation does, as the batch of a process that has one part: kernels depend on alignment."""
    model = Addresses()
    distributed(processes=1, logical=4)(steps)(lambda model, x: model(x).square().mean(), model)
    assert len(model.seen) >= 4
    assert {*model.seen} == {(0, 0)}


def test_a_run_on_the_cpu_has_the_variables_of_its_caller() -> None:
    """Those of cuBLAS are for GPUs."""
    assert distributed(processes=1, logical=2)(os.environ.get)("CUBLAS_WORKSPACE_CONFIG") is None


def test_a_block_computes_by_deterministic_kernels() -> None:
    """Also with a number of threads that does not depend on that of the processes; after it, all is as before."""

    def settings() -> list[Any]:
        threads, fills = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
        return [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, fills, threads]

    before = settings()
    with parallel_model(nn.Linear(2, 1), logical=1024, backend="ddp", processes=1):
        assert settings() == [True, False, False, 1]
    assert settings() == before
