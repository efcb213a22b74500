"""Train the matrices of the hidden layers with Muon and all other parameters with AdamW.

Muon orthogonalizes the update of a whole matrix. Under fsdp, each process keeps only a shard of each matrix.
The two optimizers are used as on one device: each of Muon's matrices is gathered when the step reads it.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, shard_loader


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Linear(2, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.hidden:
            x = x + layer(F.silu(x))
        return self.head(x)


@distributed(backend="fsdp", gpus="auto", processes=2)
def train(model, dataset, epochs):
    loader = DataLoader(dataset, batch_size=128, shuffle=True)
    matrices = [p for p in model.hidden.parameters() if p.ndim == 2]
    others = [p for p in model.hidden.parameters() if p.ndim != 2]
    others += [*model.embedding.parameters(), *model.head.parameters()]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adamw = torch.optim.AdamW(others, lr=1e-2)
    with parallel_model(model):
        for _ in range(epochs):
            for x, y in shard_loader(loader, batch="global"):
                loss = F.cross_entropy(model(x), y)
                muon.zero_grad()
                adamw.zero_grad()
                loss.backward()
                muon.step()
                adamw.step()


def spirals(count):
    """Return points on three spirals, and for each point the number of its spiral."""
    spiral = torch.randint(3, (count,))
    radius = torch.rand(count)
    angle = 6 * radius + spiral * 2 * torch.pi / 3 + 0.1 * torch.randn(count)
    points = 3 * radius.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points, spiral


torch.manual_seed(0)
model = Net()
points, spiral = spirals(1024)
train(model, TensorDataset(points, spiral), epochs=20)
model.cpu()  # a call that uses a single GPU leaves the model on it

points, spiral = spirals(1024)
with torch.no_grad():
    accuracy = (model(points).argmax(dim=1) == spiral).float().mean().item()
print(f"accuracy on {len(points)} unseen points {accuracy:.3f}")
