"""Compile the model with torch.compile: one line more, in the block."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, shard_loader


@distributed(gpus="auto", processes=2)
def train(model, dataset, epochs):
    # Without the smaller last batch, whose shape would be compiled once more.
    loader = DataLoader(dataset, batch_size=64, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with parallel_model(model):
        model.compile()
        for _ in range(epochs):
            for x, y in shard_loader(loader, batch="global"):
                loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


torch.manual_seed(0)
x = torch.rand(2048, 1)
y = torch.sin(2 * torch.pi * x)
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
train(model, TensorDataset(x, y), epochs=20)
model.cpu()  # a call that uses a single GPU leaves the model on it

grid = torch.linspace(0, 1, 101).unsqueeze(1)
with torch.no_grad():
    error = (model(grid) - torch.sin(2 * torch.pi * grid)).abs().max().item()
print(f"largest error of the learned sine {error:.3f}")
