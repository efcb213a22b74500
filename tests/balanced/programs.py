"""Short programs that train a model by itself and in micro-batches, to compare the two."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallelize import parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend

torch.manual_seed(1)
X, Y = torch.randn(8, 4), torch.randn(8, 4)

Step = Callable[[Any], Any]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(4))

    def inner(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x + self.scale)))))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def mse(model: Any) -> Tensor:
    return F.mse_loss(model(X), Y)


def run(make: Callable[[], nn.Module], steps: Sequence[Step], *, splits: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model by SGD; return what the steps return, and the state of the model."""
    torch.manual_seed(0)
    model, values = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for step in steps:
            optimizer.zero_grad()
            value = step(model)
            if isinstance(value, Tensor):
                value.backward()
            values.append(value.item() if isinstance(value, Tensor) else value)
            optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batches like this one are not split")
        if splits:
            with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=2)):
                loop()
        else:
            loop()
    return values, {name: each.clone() for name, each in model.state_dict().items()}


def assert_same(make: Callable[[], nn.Module], steps: Sequence[Step]) -> None:
    got, want = (run(make, steps, splits=splits) for splits in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
