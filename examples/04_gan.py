"""Train a GAN: two models, two optimizers, and the same loop as on one device."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, shard_loader


@distributed(gpus="auto", processes=2, seed=0)
def train(dataset, epochs):
    generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    generator_step = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    critic_step = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    with parallel_model(generator, critic) as (g, d):
        for _ in range(epochs):
            for (real,) in shard_loader(loader):
                fake = g(torch.randn(len(real), 16, device=real.device))
                both = d(torch.cat([real, fake.detach()]))
                truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(real.device)
                critic_step.zero_grad()
                F.binary_cross_entropy_with_logits(both, truth).backward()
                critic_step.step()

                generator_step.zero_grad()
                F.binary_cross_entropy_with_logits(d(fake), torch.ones_like(truth[: len(real)])).backward()
                generator_step.step()
    return generator.cpu()


images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
generator = train(TensorDataset(images), epochs=12)

with torch.no_grad():
    drawn = generator(torch.randn(500, 16))
far, near = (images.mean(0) - torch.rand(500, 64).mean(0)).abs().mean(), (images.mean(0) - drawn.mean(0)).abs().mean()
print(f"from the mean digit: noise {far:.3f}, drawn digits {near:.3f}")
