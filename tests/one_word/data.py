"""Small real and generated data of the programs: digits, tokens, points, graphs."""

from __future__ import annotations

import functools

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

__all__ = ["SAMPLES", "TEXT", "batches", "digits", "graph", "images", "tokens", "weights"]

# 4 steps of batches of 8 on each of 4 ranks, 8 steps on 2 ranks.
SAMPLES = 128

TEXT = (
    "it was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of light, it was the season of "
    "darkness, it was the spring of hope, it was the winter of despair. "
) * 4


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return images of shape (n, 1, 8, 8) in [0, 1] and their labels."""
    loaded = load_digits()
    pictures = torch.tensor(loaded.images[:SAMPLES], dtype=torch.float64).unsqueeze(1) / 16
    return pictures, torch.tensor(loaded.target[:SAMPLES])


def images(*, dtype: torch.dtype = torch.float64) -> Dataset:
    pictures, labels = digits()
    return TensorDataset(pictures.to(dtype), labels)


@functools.cache
def tokens(length: int) -> Tensor:
    """Return the characters of TEXT as numbers, in rows that start 5 characters apart."""
    numbers = {character: number for number, character in enumerate(sorted(set(TEXT)))}
    text = torch.tensor([numbers[character] for character in TEXT])
    return torch.stack([text[start : start + length] for start in range(0, SAMPLES * 5, 5)])


def graph(nodes: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, edges of shape (2, m), and labels of a random graph."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(nodes, 6, dtype=torch.float64, generator=generator)
    edges = torch.randint(nodes, (2, 4 * nodes), generator=generator)
    return features, edges, (features.sum(dim=1) > 0).long()


def batches(dataset: Dataset, *, batch_size: int = 8, shuffle: bool = True) -> DataLoader:
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def weights(**modules: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of `modules`, by the modules' names."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }
