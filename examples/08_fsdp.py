"""Train a transformer with sharded parameters; afterwards the model has its full parameters again."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import FSDPBackend, distributed, parallel_model, shard_loader


class Reader(nn.Module):
    """Transformer over the rows of a digit: 8 tokens of 8 pixels."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.zeros(8, width))
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.layers(self.embed(x) + self.place).mean(dim=1))


@distributed(backend=FSDPBackend(blocks=[nn.TransformerEncoderLayer]), gpus="auto", processes=2)
def train(model, dataset, epochs):
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with parallel_model(model):  # in the block, each rank keeps a shard of every parameter and of the optimizer's state
        for _ in range(epochs):
            for x, y in shard_loader(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
model = Reader()
train(model, TensorDataset(images[360:], labels[360:]), epochs=8)

with torch.no_grad():
    right = (model(images[:360]).argmax(dim=1) == labels[:360]).float().mean().item()
print(f"accuracy on 360 unseen images {right:.3f}")
