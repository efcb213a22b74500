"""Train a GAN: two models, two optimizers, and the same loop as on one device."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, parallel_model, shard_loader

NOISE = 16  # numbers from which the generator draws an image


@distributed(gpus="auto", processes=2, seed=0)
def train(generator, critic, dataset, epochs):
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    with parallel_model(generator, critic):
        for _ in range(epochs):
            for (real,) in shard_loader(loader):
                fake = generator(torch.randn(len(real), NOISE, device=real.device))

                critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
                critic_optimizer.zero_grad()
                critic_loss.backward()
                critic_optimizer.step()

                generator_loss = F.softplus(-critic(fake)).mean()
                generator_optimizer.zero_grad()
                generator_loss.backward()
                generator_optimizer.step()


torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
train(generator, critic, TensorDataset(images), epochs=12)
generator.cpu()  # a call that uses a single GPU leaves the model on it

with torch.no_grad():
    generated = generator(torch.randn(500, NOISE))
mean_digit = images.mean(dim=0)
distance_of_noise = (mean_digit - torch.rand(500, 64).mean(dim=0)).abs().mean()
distance = (mean_digit - generated.mean(dim=0)).abs().mean()
print(f"from the mean digit: noise {distance_of_noise:.3f}, generated digits {distance:.3f}")
