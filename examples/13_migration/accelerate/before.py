"""Handwritten digits, with an Accelerator: `accelerate launch before.py`."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def train(model, dataset, epochs):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def main():
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = train(model, TensorDataset(images[360:], labels[360:]), epochs=15)

    if Accelerator().is_main_process:
        with torch.no_grad():
            right = (model.cpu()(images[:360]).argmax(dim=1) == labels[:360]).float().mean().item()
        print(f"accuracy on 360 unseen images {right:.3f}")


if __name__ == "__main__":
    main()
