"""Let the first batch choose the engine, by its bytes; with few MiB for a device, another: `python 20_auto.py 32`."""

import logging
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import AutoBackend, distributed, parallel_model, shard_loader

logging.basicConfig(level=logging.INFO, format="%(message)s")  # a line says which engine, and why
memory = int(sys.argv[1]) * 2**20 if sys.argv[1:] else None


@distributed(backend=AutoBackend(memory=memory), gpus="auto", processes=2)
def train(model, dataset, epochs):
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with parallel_model(model):
        for _ in range(epochs):
            for x, y in shard_loader(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
hidden = [nn.Sequential(nn.Linear(768, 768), nn.ReLU()) for _ in range(3)]
model = nn.Sequential(nn.Linear(64, 768), nn.ReLU(), *hidden, nn.Linear(768, 10))
train(model, TensorDataset(images[360:], labels[360:]), epochs=4)

with torch.no_grad():
    right = (model(images[:360]).argmax(dim=1) == labels[:360]).float().mean().item()
print(f"accuracy on 360 unseen images {right:.3f}")
