"""Average weights over all steps (EMA), evaluate and save the average; one word changes the engine: BACKEND=fsdp."""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, rank, shard_loader


@distributed(backend=os.environ.get("BACKEND", "ddp"), gpus="auto", processes=2)
def train(model, dataset, test_images, test_labels, epochs):
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    with parallel_model(model):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
        for epoch in range(epochs):
            for x, y in shard_loader(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                average.update_parameters(model)  # under fsdp each rank averages its slice
            with torch.no_grad():  # on all ranks: under fsdp they gather the slices
                device = next(average.parameters()).device
                right = average(test_images.to(device)).argmax(dim=1) == test_labels.to(device)
            if rank() == 0:
                print(f"epoch {epoch}, accuracy {right.float().mean().item():.3f}")
    if rank() == 0:  # after the block the average is an ordinary model
        torch.save(average.module.state_dict(), "ema.pt")


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
train(network, TensorDataset(images[360:], labels[360:]), images[:360], labels[:360], epochs=3)
network.cpu()  # a call that uses a single GPU leaves the model on it

network.load_state_dict(torch.load("ema.pt"))
with torch.no_grad():
    accuracy = (network(images[:360]).argmax(dim=1) == labels[:360]).float().mean().item()
print(f"accuracy on 360 unseen images {accuracy:.3f}")
