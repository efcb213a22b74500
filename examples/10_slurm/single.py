"""Recognise handwritten digits on one device."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def digits():
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=360, random_state=0)
    x_train, x_test = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    y_train, y_test = (torch.tensor(part) for part in split[2:])
    return TensorDataset(x_train, y_train), x_test, y_test


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(dim=1) == y).float().mean().item()


def train(lr=2e-3, batch_size=16, epochs=10):
    model, (dataset, x_test, y_test) = network(), digits()
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return accuracy(model, x_test, y_test)


if __name__ == "__main__":
    print(f"accuracy on 360 unseen images {train():.3f}")
