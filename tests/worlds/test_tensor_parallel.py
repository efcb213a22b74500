"""Models that are tensor parallel already train, under ddp, the weights that one process trains."""

from __future__ import annotations

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
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, shard_loader

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


def full_values(model: nn.Module) -> list[Tensor]:
    """Return the whole values of all parameters, on all ranks."""
    values = []
    for parameter in model.parameters():
        value = parameter.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        values.append(value.clone())
    return values


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
