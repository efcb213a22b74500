"""Models that are tensor parallel already train, under ddp, the weights that one process trains."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from parallelize import (
    ConfigError,
    SyncError,
    all_gather,
    distributed,
    load,
    parallel_model,
    rank,
    save,
    shard_loader,
)

WORLD = 4
PARTS = 2


class Mlp(nn.Module):
    """Two linear layers with a norm between them, which `PLAN` divides over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


class Sequence(nn.Module):
    """Linear layers after norms, whose ranks each have a part of the tokens between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.last_norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of (samples, features), from 4 tokens of each sample."""
        tokens = torch.stack([x.roll(distance, 1) for distance in range(4)], dim=1)
        hidden = self.down(F.gelu(self.up(self.norm(tokens))))
        return self.head(self.last_norm(hidden)).mean(1)


class Attention(nn.Module):
    """Attention with a residual connection; each rank has some of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        # The bias of a key has no gradient but rounding, which AdamW would make large.
        self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.output = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of (samples, features), from 4 tokens of each sample."""
        tokens = torch.stack([x.roll(distance, 1) for distance in range(4)], dim=1)
        normed = self.norm(tokens)
        query, key, value = (
            projected.unflatten(-1, (-1, 2)).transpose(1, 2)
            for projected in (self.query(normed), self.key(normed), self.value(normed))
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
        return self.head((tokens + self.output(mixed)).mean(1))


def in_parts(model: nn.Module, mesh: Any) -> nn.Module:
    """Divide a model over the ranks of a mesh, by torch's own styles."""
    columns: Any = ColwiseParallel
    rows: Any = RowwiseParallel
    if isinstance(model, Attention):
        plan = {"query": columns(), "key": columns(), "value": columns(), "output": rows()}
    elif isinstance(model, Sequence):
        tokens = Shard(1)
        plan = {
            "norm": SequenceParallel(),
            "up": columns(input_layouts=tokens),
            "down": rows(output_layouts=tokens),
            "last_norm": SequenceParallel(),
            "head": columns(input_layouts=tokens, output_layouts=Replicate()),
        }
    else:
        plan = {"up": columns(), "down": rows()}
    return parallelize_module(model, mesh, plan)


def mesh_of_parts(parts: int = PARTS) -> Any:
    """Return the mesh of the ranks that hold one model."""
    shape = get_world_size() // parts, parts
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["tp"]


def data() -> TensorDataset:
    """Return samples with classes, in an incomplete last batch of 16."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(40, 8, generator=generator, dtype=torch.float64), torch.randint(3, (40,), generator=generator)
    )


def train(model: nn.Module, dataset: Any, *, options: dict[str, Any], max_norm: float | None = 0.5) -> None:
    """Train a model on shuffled global batches for two epochs."""
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with parallel_model(model, **options):
        for _ in range(2):
            for x, y in shard_loader(loader, batch="global"):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if max_norm is not None:
                    # torch's way to use DTensors and plain tensors together.
                    with implicit_replication():
                        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()


def full_value(tensor: Any) -> Tensor:
    """Return a copy of the whole value of a tensor, on all ranks."""
    value = tensor.detach()
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.clone()


def full_values(model: nn.Module) -> list[Tensor]:
    """Return the whole values of all parameters, on all ranks."""
    return list(map(full_value, model.parameters()))


def alone(model: nn.Module, **arguments: Any) -> list[Tensor]:
    """Return the weights that one process trains."""
    torch.manual_seed(1)
    train(model, data(), options={}, **arguments)
    return full_values(model)


def require_equal(values: list[Tensor], expected: list[Tensor]) -> None:
    """Check that weights are those of one process, up to rounding, which AdamW may magnify."""
    for value, expected_value in zip(values, expected, strict=True):
        torch.testing.assert_close(value, expected_value, rtol=0, atol=1e-9)


def seeded(model_class: type[nn.Module]) -> nn.Module:
    """Return a model with the same weights at each call."""
    torch.manual_seed(0)
    return model_class().double()


def trained(model_class: type[nn.Module], parts: int = PARTS, options: Any = None, **arguments: Any) -> list[Tensor]:
    """Train a model in parts, and return its whole weights."""
    model = in_parts(seeded(model_class), mesh_of_parts(parts))
    torch.manual_seed(1)
    train(model, data(), options=options or {}, **arguments)
    return full_values(model)


in_world = distributed(processes=WORLD)(trained)


@pytest.mark.parametrize("model_class", [Mlp, Attention, Sequence])
def test_ddp_trains_as_one_process(model_class: type[nn.Module]) -> None:
    """Two models of two parts each, on shuffled batches that the two share, get the weights of one process."""
    expected = alone(seeded(model_class), max_norm=None)
    require_equal(in_world(model_class, max_norm=None), expected)


def test_clipped_norm() -> None:
    """The norm of all gradients is that of one process."""
    expected = alone(seeded(Mlp))
    require_equal(in_world(Mlp), expected)


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_one_model_on_all_ranks(backend: str) -> None:
    """If all ranks hold one model, there is nothing to average or shard, and each reads whole batches."""
    in_two = distributed(processes=PARTS, backend=backend)(trained)
    require_equal(in_two(Mlp, max_norm=None), alone(seeded(Mlp), max_norm=None))


@distributed(processes=PARTS)
def warned_of() -> list[str]:
    """Train a model that all ranks hold on a loader that all read, and return the warnings."""
    model = in_parts(seeded(Mlp), mesh_of_parts())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with parallel_model(model):
            for x, y in DataLoader(data(), batch_size=8):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return [str(warning.message) for warning in caught]


def test_no_warning_of_equal_data() -> None:
    """The ranks that hold one model read equal batches, as they have to."""
    assert warned_of() == []


@distributed(processes=WORLD)
def drawn_and_evaluated() -> tuple[Tensor, float, Tensor]:
    """Return the sums of two batches and a random number of each rank, and what the loader gathers."""
    # Before the block, its loader divides over all ranks.
    loader = shard_loader(DataLoader(data(), batch_size=4, shuffle=True))
    model = in_parts(seeded(Mlp), mesh_of_parts())
    with parallel_model(model):
        sums = [x.sum() for x, _ in loader][:2]
        rows = all_gather(torch.stack([*sums, torch.rand((), dtype=torch.float64)]))
        evaluated = shard_loader(DataLoader(data(), batch_size=4))
        with torch.no_grad():
            outputs = [model(x) for x, _ in evaluated]
        mean = evaluated.mean([output.mean() for output in outputs])
        return rows, mean, evaluated.gather(torch.cat(outputs))


def test_ranks_of_a_model_read_and_draw_alike() -> None:
    """The ranks that hold one model read the same batches, and the loader counts each sample once."""
    rows, mean, outputs = drawn_and_evaluated()
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[2], rows[3])
    assert (rows[0] != rows[2]).all()
    with torch.no_grad():
        expected = seeded(Mlp)(data().tensors[0])
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(mean, expected.mean().item())


@distributed(processes=WORLD)
def gradients(average: Any, reduction: str) -> list[Tensor]:
    """Return the gradients of 16 samples, of which some have no class."""
    model = in_parts(seeded(Mlp), mesh_of_parts())
    with parallel_model(model, average=average):
        x, y = next(iter(shard_loader(DataLoader(with_ignored(), batch_size=8))))
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        return [full_value(parameter.grad) for parameter in model.parameters()]


def with_ignored() -> TensorDataset:
    """Return 16 samples; the even ones of one half and the first of the other have no class."""
    x, y = data()[:16]
    return TensorDataset(x, torch.where(torch.tensor([1, 0, 1, 0, 1, 0] + [0] * 10) > 0, -100, y))


@pytest.mark.parametrize(("average", "reduction"), [("sum", "sum"), ("tokens", "mean")])
def test_sums_and_targets(average: str, reduction: str) -> None:
    """Losses that are sums, and means over unequal numbers of targets, weigh as in one process."""
    model = seeded(Mlp)
    x, y = with_ignored().tensors
    F.cross_entropy(model(x), y, reduction=reduction).backward()
    require_equal(gradients(average, reduction), [full_value(p.grad) for p in model.parameters()])


@distributed(processes=WORLD)
def resumed(path: str, sharded: bool | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return the whole values of a model and its optimizer at a save, and after a step and a load."""
    model = in_parts(seeded(Mlp), mesh_of_parts())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    objects = {"model": model, "optimizer": optimizer}

    def step() -> None:
        optimizer.zero_grad()
        model(data().tensors[0] + rank() // PARTS).square().mean().backward()
        optimizer.step()

    def values() -> list[Tensor]:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return list(map(full_value, [*model.parameters(), *states]))

    with parallel_model(model):
        step()
        saved = values()
        save(path, sharded=sharded, **objects)
        step()
        load(path, **objects)
        return saved, values()


@pytest.mark.parametrize("sharded", [None, False])
def test_saved_and_loaded(sharded: bool | None, tmp_path: Path) -> None:
    """A checkpoint has the parts of all ranks, as a folder of shards, or whole in one file."""
    saved, loaded = resumed(str(tmp_path / "checkpoint.pt"), sharded)
    for value, expected in zip(loaded, saved, strict=True):
        assert torch.equal(value, expected)
    if sharded is False:
        model = seeded(Mlp)
        load(tmp_path / "checkpoint.pt", model=model)
        require_equal(full_values(model), saved[: len(full_values(model))])


@distributed(processes=WORLD)
def changed_on_rank_3() -> None:
    """Change a part of the model on one rank."""
    model = in_parts(seeded(Mlp), mesh_of_parts())
    with parallel_model(model), torch.no_grad():
        if rank() == 3:
            model.up.weight.mul_(2)


def test_parts_that_differ() -> None:
    """A part that differs from the one of the other model is an error on all ranks."""
    with pytest.raises(SyncError, match=r"1 of 8 parameters differ .*up\.weight of Mlp"):
        changed_on_rank_3()


def enter(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Enter a block with a model in parts over the last dimension of a mesh."""
    names = ("dp", "tp")[-len(shape) :]
    model = in_parts(seeded(Mlp), init_device_mesh("cpu", shape, mesh_dim_names=names)["tp"])
    with parallel_model(model, **options):
        pass


entered = distributed(processes=WORLD)(enter)


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({}, (2,), "a tensor parallel model on the ranks 0, 1, as rank 2 of 4 has it"),
        ({"backend": "auto"}, (2, 2), "backend='auto' with a model that is tensor parallel"),
        ({"backend": "fsdp"}, (2, 2), "backend='fsdp' with a model that is tensor parallel"),
        ({"amp": "O2"}, (2, 2), "amp level O2 with a model that is tensor parallel"),
    ],
)
def test_refused(options: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    """A mesh that leaves ranks out, and options that need whole parameters, are refused by name."""
    with pytest.raises(ConfigError, match=message):
        entered(options, shape)


def half_gradients(model: nn.Module, halves: Iterable[int]) -> None:
    """Accumulate gradients of two passes for each half of the data; the second half skips layers."""
    for half in halves:
        x, y = data()[half * 20 : half * 20 + 20]
        for _ in range(2):
            hidden = x[:, None].expand(-1, 4, -1)
            if half == 0:
                hidden = model.down(F.gelu(model.up(model.norm(hidden))))
            F.cross_entropy(model.head(model.last_norm(hidden)).mean(1), y).backward()


@distributed(processes=WORLD)
def accumulated() -> list[Tensor]:
    """Return the gradients, on all ranks, of halves of the data, which the models divide."""
    model = in_parts(seeded(Sequence), mesh_of_parts())
    with parallel_model(model):
        half_gradients(model, [rank() // PARTS])
        return [all_gather(full_value(parameter.grad)) for parameter in model.parameters()]


def test_layers_that_one_model_skips() -> None:
    """Gradients accumulate over passes, and are averaged where one model has none."""
    model = seeded(Sequence)
    half_gradients(model, range(2))
    expected = [parameter.grad / 2 for parameter in model.parameters()]
    accumulated_gradients = accumulated()
    for number in range(WORLD):
        require_equal([gradient[number] for gradient in accumulated_gradients], expected)


class Numbers(IterableDataset[Tensor]):
    """The numbers from 0 to 15."""

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the numbers."""
        yield from torch.arange(16.0)


@distributed(processes=WORLD)
def other_loaders() -> tuple[Tensor, Tensor, str]:
    """Return what each rank reads of a stream and of a divided sampler, and why an older loader is refused."""
    older = DataLoader(data(), sampler=DistributedSampler(data()))
    shard_loader(older)
    model = in_parts(seeded(Mlp), mesh_of_parts())
    with parallel_model(model):
        stream = torch.stack(list(shard_loader(DataLoader(Numbers(), batch_size=2))))
        sampler = DistributedSampler(data(), WORLD // PARTS, rank() // PARTS, shuffle=False)
        divided = shard_loader(DataLoader(data(), sampler=sampler, batch_size=20))
        with pytest.raises(ConfigError) as caught:
            iter(shard_loader(older))
        return all_gather(stream), all_gather(next(iter(divided))[0]), str(caught.value)


def test_streams_and_samplers_that_divide() -> None:
    """Streams, and samplers of the user, are divided over the models; what was divided before is refused."""
    streams, batches, message = other_loaders()
    for rows in (streams, batches):
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[2], rows[3])
    assert sorted(streams[::2].flatten().tolist()) == list(range(16))
    assert torch.equal(batches[2], data()[1::2][0])
    assert "shards itself over 4 processes, in a block whose batches are divided over 2" in message


@distributed(processes=WORLD)
def entered_inside() -> None:
    """Enter a block with a model in parts inside a block of a whole model."""
    with parallel_model(nn.Linear(2, 2)):
        enter({}, (2, 2))


def test_refused_inside_a_block_of_whole_models() -> None:
    """The outer block has divided the batches over all ranks."""
    with pytest.raises(ConfigError, match="inside a parallel_model block of other models"):
        entered_inside()
