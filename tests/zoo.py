"""Small models of every kind, with batches and losses for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "BRANCHED",
    "ZOO",
    "Branched",
    "Classifier",
    "ConvNet",
    "Entry",
    "Mlp",
    "ModelOutput",
    "Rnn",
    "TiedTransformer",
    "Vae",
]

# B: batch, C: channels, T: tokens, D: width


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:  # B 1 8 8 -> B 3
        return self.head(self.encoder(x).flatten(1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.head = nn.Linear(8, 1)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encoder(x))

    def loss(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)).square().mean()

    def forward(self, x: Tensor) -> Tensor:  # B 6 -> B 1
        return self.head(self.encode(x))


class TiedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:  # B T -> B T 11
        return self.head(self.block(self.embedding(tokens)))


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(5, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # B T 5 -> B T 2, 1 B 6
        output, hidden = self.rnn(x)
        return self.head(output), hidden.transpose(0, 1)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(6, 4)
        self.up = nn.Linear(2, 6)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.down(x).chunk(2, dim=1)
        return mean, log_variance

    def decode(self, z: Tensor) -> Tensor:
        return self.up(z)

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # B 6
        mean, log_variance = self.encode(x)
        return {"x": self.decode(mean), "mean": mean, "log_variance": log_variance}


class Branched(nn.Module):
    """Uses only one of its branches in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 1)
        self.right = nn.Linear(6, 1)

    def forward(self, x: Tensor, *, right: bool = False) -> Tensor:
        return (self.right if right else self.left)(x)


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """A dictionary with attributes that refuses `update`, as returned by Hugging Face's models."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("update is not for outputs")


class Classifier(nn.Module):
    """Computes its loss if labels are passed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> ModelOutput:
        logits = self.layer(x)
        return ModelOutput(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)


@dataclass(frozen=True)
class Entry:
    """A model with batches and a loss.

    Args:
        make: creates the model.
        batch: number of samples -> inputs.
        loss: computes the mean loss over the samples from the model's output.
        is_exact: whether one process with the full batch computes the same, up to the order of sums; False for batch
            norm, which has other statistics on each rank.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[[Any], Tensor]
    is_exact: bool = True


def _vae_loss(output: dict[str, Tensor]) -> Tensor:
    return output["x"].square().mean() + output["mean"].square().mean() + output["log_variance"].exp().mean()


ZOO: dict[str, Entry] = {
    "mlp": Entry(Mlp, lambda n: (torch.randn(n, 6),), lambda output: output.square().mean()),
    "convnet": Entry(ConvNet, lambda n: (torch.randn(n, 1, 8, 8),), lambda output: output.square().mean(), False),
    "transformer": Entry(
        TiedTransformer, lambda n: (torch.randint(11, (n, 5)),), lambda output: output.square().mean()
    ),
    "rnn": Entry(Rnn, lambda n: (torch.randn(n, 4, 5),), lambda output: output[0].mean() + output[1].mean()),
    "vae": Entry(Vae, lambda n: (torch.randn(n, 6),), _vae_loss),
    "classifier": Entry(Classifier, lambda n: (torch.randn(n, 6), torch.randint(3, (n,))), lambda output: output.loss),
}

BRANCHED = Entry(Branched, lambda n: (torch.randn(n, 6),), lambda output: output.mean())
