"""The same weights, bit for bit, on any number of processes: `logical=4` on 1, 2 and 4 of them."""

import hashlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, shard_loader


@distributed(logical=4, seed=0)
def train(model, dataset, epochs):
    loader = shard_loader(DataLoader(dataset, batch_size=16, shuffle=True))  # of each of the 4 parts
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with parallel_model(model):
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()


if __name__ == "__main__":
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    found = set()
    for processes in (1, 2, 4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
        train.options(processes=processes)(model, dataset, epochs=2)
        weights = b"".join(each.numpy().tobytes() for each in model.state_dict().values())
        found.add(hashlib.sha256(weights).hexdigest()[:16])
        print(f"{processes} process(es): {found}")
    assert len(found) == 1
