"""Train with a class that holds model, optimizer and scheduler, as published trainers do."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, shard_loader


class Trainer:
    def __init__(self, dataset):
        self.loader = DataLoader(dataset, batch_size=32, shuffle=True)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.8)
        self.losses = []

    @distributed(gpus="auto", processes=2)
    def fit(self, epochs):
        losses = []
        with parallel_model(self.model):
            for _ in range(epochs):
                for x, y in shard_loader(self.loader):
                    loss = F.cross_entropy(self.model(x), y)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                self.scheduler.step()
                losses.append(loss.item())
        return losses  # returned: `self.losses.append` in the workers would not reach the caller


digits = load_digits()  # 1,797 images of 8 x 8 pixels
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=360, random_state=0)

torch.manual_seed(0)
trainer = Trainer(TensorDataset(x_train, y_train))
for _ in range(2):  # the second call goes on: weights, AdamW's moments and the learning rate have come back
    trainer.losses += trainer.fit(epochs=3)
print(f"learning rate {trainer.scheduler.get_last_lr()[0]:.5f} after {len(trainer.losses)} epochs")

trainer.model.cpu().eval()
with torch.no_grad():
    accuracy = (trainer.model(x_test).argmax(dim=1) == y_test).float().mean().item()
print(f"last loss {trainer.losses[-1]:.3f}, accuracy on {len(x_test)} unseen images {accuracy:.3f}")
