"""Train with existing code that must not change: one `with` around the call of its training function."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, shard_loader


def legacy_train(model, loader, optimizer, epochs):
    """A ten-year-old training function, written for one device."""
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = criterion(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()


@distributed(gpus="auto", processes=2)
def main(model, dataset):
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with parallel_model(model):
        legacy_train(model, shard_loader(loader), optimizer, epochs=15)


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16  # 1,797 images of 64 pixels
labels = torch.tensor(digits.target)
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
main(network, TensorDataset(images[360:], labels[360:]))

with torch.no_grad():
    right = (network(images[:360]).argmax(dim=1) == labels[:360]).float().mean().item()
print(f"accuracy on 360 unseen images {right:.3f}")
