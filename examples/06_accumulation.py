"""Accumulate gradients over micro-batches and clip them; `no_sync` skips the all-reduce of all but the last."""

import contextlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, no_sync, parallel_model, shard_loader

MICRO_BATCHES = 4


@distributed(gpus="auto", processes=2, amp="bf16")
def train(model, dataset, epochs):
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with parallel_model(model):
        for _ in range(epochs):
            batches = shard_loader(loader)
            for step, (x, y) in enumerate(batches, start=1):
                is_last = step % MICRO_BATCHES == 0 or step == len(batches)
                with contextlib.nullcontext() if is_last else no_sync(model):
                    (F.cross_entropy(model(x), y) / MICRO_BATCHES).backward()
                if is_last:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
train(network, TensorDataset(images[360:], labels[360:]), epochs=15)
network.cpu()  # a call that uses a single GPU leaves the model on it

with torch.no_grad():
    right = (network(images[:360]).argmax(dim=1) == labels[:360]).float().mean().item()
print(f"accuracy on 360 unseen images {right:.3f}")
