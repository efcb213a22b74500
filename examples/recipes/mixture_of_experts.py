"""Train a mixture of experts: each sample is computed by one expert, which a router chooses.

Two processes may use different experts in a step, and an expert that no sample has chosen has no gradient.
The loss that balances the experts needs statistics of all samples, so `all_reduce` averages them over the processes.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import all_reduce, distributed, parallel_model, shard_loader


class MixtureOfExperts(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(experts)
        )

    def forward(self, x):
        probabilities = self.router(x).softmax(dim=1)
        weight, choice = probabilities.max(dim=1)
        output = torch.zeros_like(weight)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(dim=1)
            if len(rows) > 0:
                output = output.index_add(0, rows, weight[rows] * expert(x[rows]).squeeze(dim=1))
        return output, probabilities, choice


def balance_loss(probabilities, choice):
    """Return 1 if all experts are used alike, and more if the router prefers some (Switch Transformer)."""
    experts = probabilities.shape[1]
    used = F.one_hot(choice, experts).float().mean(dim=0)
    wanted = probabilities.mean(dim=0)
    return experts * (all_reduce(used, "mean") * all_reduce(wanted, "mean")).sum()


@distributed(gpus="auto", processes=2)
def train(model, dataset, epochs):
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with parallel_model(model):
        for _ in range(epochs):
            for x, y in shard_loader(loader, batch="global"):
                output, probabilities, choice = model(x)
                loss = F.mse_loss(output, y) + balance_loss(probabilities, choice)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


# Each quadrant of the first two features has a linear function of its own: a task for four experts.
torch.manual_seed(0)
x = torch.randn(4096, 8)
functions = torch.randn(4, 8)
quadrant = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
y = (functions[quadrant] * x).sum(dim=1)

model = MixtureOfExperts(width=8, experts=4)
train(model, TensorDataset(x[1024:], y[1024:]), epochs=20)
model.cpu()  # a call that uses a single GPU leaves the model on it

with torch.no_grad():
    output, _, choice = model(x[:1024])
    explained = 1 - F.mse_loss(output, y[:1024]).item() / y[:1024].var().item()
samples = choice.bincount(minlength=4).tolist()
print(f"samples of each expert {samples}, explained variance of 1024 unseen samples {explained:.3f}")
