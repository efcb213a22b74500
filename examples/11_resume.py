"""Training whose processes are killed ends with the same weights as an uninterrupted run."""

import os
import signal
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import checkpoints, distributed, parallel_model, rank, shard_loader


@distributed(gpus="auto", processes=2, seed=0, max_restarts=1)
def train(model, dataset, folder, epochs, killed_at=None):
    loader = shard_loader(DataLoader(dataset, batch_size=32, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    things = {"model": model, "optimizer": optimizer, "loader": loader}
    with parallel_model(model), checkpoints(folder, every=10, **things) as saved:
        is_fresh = saved.steps == 0  # False in the restarted run
        for _ in range(loader.epoch, epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                saved.step()
                if is_fresh and saved.steps == killed_at and rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    return saved.steps


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
dataset = TensorDataset(images[360:], labels[360:])
with tempfile.TemporaryDirectory() as folder:
    alone, killed = make(), make()
    steps = train(alone, dataset, f"{folder}/alone", epochs=6)
    steps_too = train(killed, dataset, f"{folder}/killed", epochs=6, killed_at=57)  # resumes from step 50

weights, others = (nn.utils.parameters_to_vector(model.parameters()) for model in (alone, killed))
killed.cpu().eval()
with torch.no_grad():
    right = (killed(images[:360]).argmax(dim=1) == labels[:360]).float().mean().item()
print(f"{steps} and {steps_too} steps, weights differ by {(weights - others).abs().max()}, accuracy {right:.3f}")
