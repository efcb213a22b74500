"""Fine-tune a frozen base in bfloat16 with LoRA: only the adapters, in float32, are trained.

Under fsdp, the base is sharded too, although it has no gradients and another dtype than the adapters.
The base here has random weights. It stands for your pretrained model.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, shard_loader


class LoRA(nn.Module):
    """A frozen linear layer, and a trained product of two small matrices that is added to its weight."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # training starts from the outputs of the base

    def forward(self, x):
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


@distributed(backend="fsdp", gpus="auto", processes=2)
def train(model, dataset, epochs):
    loader = DataLoader(dataset, batch_size=128, shuffle=True)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    with parallel_model(model):
        for _ in range(epochs):
            for x, y in shard_loader(loader, batch="global"):
                loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


torch.manual_seed(0)
base = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
base.bfloat16()

# The task to adapt to: the outputs of a model whose weights differ from the base by matrices of rank 2.
task = copy.deepcopy(base).float()
x = torch.randn(2048, 32)
with torch.no_grad():
    for layer in task[::2]:
        rows, columns = layer.weight.shape
        layer.weight += 0.5 * torch.randn(rows, 2) @ torch.randn(2, columns) / columns**0.5
    y = task(x)

weights_before = copy.deepcopy(base.state_dict())
model = nn.Sequential(LoRA(base[0]), nn.Tanh(), LoRA(base[2]), nn.Tanh(), LoRA(base[4]))
with torch.no_grad():
    loss_before = F.mse_loss(model(x), y).item()
train(model, TensorDataset(x, y), epochs=10)
model.cpu()  # a call that uses a single GPU leaves the model on it

# The base's layers are in the model, so they would show a change.
assert all(torch.equal(weight, weights_before[name]) for name, weight in base.state_dict().items())
adapters = {name: p for name, p in model.state_dict().items() if ".base." not in name}
with torch.no_grad():
    loss = F.mse_loss(model(x), y).item()
print(f"{len(adapters)} adapters, loss {loss_before:.4f} before and {loss:.4f} after, base unchanged")
