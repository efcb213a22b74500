"""Contrastive loss over the batch of a whole node, the use case of ddp2.

Two noisy views of each digit attract each other and repel all other digits in the batch. Under ddp each process would
see only the negatives of its own batch. Under ddp2 one process per node computes the loss over the outputs of all its
GPUs; with several nodes (num_nodes=2), gradients are averaged between nodes.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, shard_loader


def nce(first, second, temperature=0.1):
    """Return the InfoNCE loss of two views, each (B, D), whose rows belong together, and the number of negatives."""
    similar = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T / temperature
    return F.cross_entropy(similar, torch.arange(len(first), device=first.device)), len(first) - 1


@distributed(backend="ddp2", seed=0)
def train(encoder, dataset, epochs):
    loader = DataLoader(dataset, batch_size=256, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    with parallel_model(encoder):
        for _ in range(epochs):
            for (x,) in shard_loader(loader):
                views = encoder(torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)]))
                loss, negatives = nce(*views.chunk(2))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return negatives


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
negatives = train(encoder, TensorDataset(images[360:]), epochs=30)

with torch.no_grad():
    known, unseen = (F.normalize(encoder(part), dim=1) for part in (images[360:], images[:360]))
right = (labels[360:][(unseen @ known.T).argmax(dim=1)] == labels[:360]).float().mean().item()
print(f"{negatives} negatives for each image; nearest neighbour has accuracy on 360 unseen images {right:.3f}")
