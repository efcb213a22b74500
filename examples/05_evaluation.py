"""Evaluate on all devices: each sample exactly once, predictions gathered in the order of the dataset."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import parallelize
from parallelize import distributed, parallel_model, shard_loader


@distributed(gpus="auto", processes=2)
def train_and_evaluate(model, train_set, test_set, epochs):
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=50)  # 357 samples: 7 full batches and a smaller one
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with parallel_model(model):
        for _ in range(epochs):
            for x, y in shard_loader(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        share = shard_loader(test_loader)  # without gradients: each sample once
        predicted, right = [], 0
        model.eval()
        with torch.no_grad():
            for x, y in share:
                predicted.append(model(x).argmax(dim=1))
                right += int((predicted[-1] == y).sum())
        return share.gather(torch.cat(predicted)).cpu(), parallelize.all_reduce(right, "sum")


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train_set, test_set = TensorDataset(images[357:], labels[357:]), TensorDataset(images[:357], labels[:357])
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
predicted, right = train_and_evaluate(network, train_set, test_set, epochs=15)

assert right == int((predicted == labels[:357]).sum())  # summed over ranks, and counted in the gathered predictions
print(f"{right} of {len(predicted)} unseen images right, accuracy {right / len(predicted):.3f}")
