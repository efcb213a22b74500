"""Pipeline one model over several devices: a plain loop, without nn.Sequential or tracing.

With GPUs, `@distributed(backend="balanced")` uses all GPUs of the node. On a CPU, the two stages run one after the
other, which shows how it works but is not faster.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import parallelize
from parallelize import BalancedBackend, distributed, parallel_model, shard_loader


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.second = nn.Conv2d(width, width, kernel_size=3, padding=1)

    def forward(self, x):
        return x + self.second(F.relu(self.first(F.relu(x))))


class Net(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.stem = nn.Conv2d(1, width, kernel_size=3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width * 4 * 4, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.max_pool2d(x, 2).flatten(start_dim=1))


on_gpus = torch.cuda.device_count() > 1
backend = "balanced" if on_gpus else BalancedBackend(devices=["cpu", "cpu"], microbatches=4)


@distributed(backend=backend)
def train(model, dataset, epochs):
    loader = DataLoader(dataset, batch_size=128, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with parallel_model(model):
        for _ in range(epochs):
            for x, y in shard_loader(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        print(parallelize.plan(model), file=sys.stderr)


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
model = Net()
train(model, TensorDataset(images[360:], labels[360:]), epochs=5)

model.cpu().eval()
with torch.no_grad():
    right = (model(images[:360]).argmax(dim=1) == labels[:360]).float().mean().item()
print(f"accuracy on 360 unseen images {right:.3f}")
