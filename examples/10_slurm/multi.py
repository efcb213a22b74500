"""Recognise handwritten digits on every GPU of this machine, or of the Slurm job that runs this script."""

import torch
from single import accuracy, digits, network
from torch.nn import functional as F
from torch.utils.data import DataLoader

from parallelize import distributed, is_main, parallel_model, shard_loader


@distributed()
def train(lr=2e-3, batch_size=16, epochs=10):
    model, (dataset, x_test, y_test) = network(), digits()
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with parallel_model(model):
        for _ in range(epochs):
            for x, y in shard_loader(loader):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return accuracy(model.cpu(), x_test, y_test)


if __name__ == "__main__":
    found = train()
    if is_main():
        print(f"accuracy on 360 unseen images {found:.3f}")
