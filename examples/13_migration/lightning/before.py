"""Handwritten digits, with a Trainer and the flags of Lightning's early releases."""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": F.cross_entropy(self(x), y)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader(train_set, batch_size=32, shuffle=True)


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[360:], labels[360:])

model = Net()
trainer = pl.Trainer(
    max_nb_epochs=15,
    gpus=8,
    nb_gpu_nodes=2,
    distributed_backend="ddp",
    use_amp=True,
    amp_level="O2",
    gradient_clip_val=1.0,
)
trainer.fit(model)

model.cpu()
with torch.no_grad():
    right = (model(images[:360]).argmax(dim=1) == labels[:360]).float().mean().item()
print(f"accuracy on 360 unseen images {right:.3f}")
