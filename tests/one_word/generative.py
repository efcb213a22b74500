"""Generative and averaged programs: VAE, VQ-VAE, DDPM, averages of weights (EMA, SWA)."""

from __future__ import annotations

import copy
import math

import torch
from one_word.data import batches, images, weights
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from parallelize import parallel_model, shard_loader

__all__ = ["PROGRAMS"]


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 24)
        self.fc21, self.fc22 = nn.Linear(24, 4), nn.Linear(24, 4)
        self.fc3, self.fc4 = nn.Linear(4, 24), nn.Linear(24, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return BCE - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def vae():
    """Sums, not means, as losses; samples decoded by a method at the end of each epoch."""
    torch.manual_seed(1)
    model = VAE().double()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with parallel_model(model):
        for data, _ in shard_loader(batches(images())):
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            sample = model.decode(torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4))
    return {**weights(model=model), "sample": sample}


class VectorQuantizerEMA(nn.Module):
    def __init__(self, num_embeddings=8, embedding_dim=4, decay=0.9, epsilon=1e-5):
        super().__init__()
        self.decay, self.epsilon, self.num_embeddings = decay, epsilon, num_embeddings
        embed = torch.randn(num_embeddings, embedding_dim)
        self.register_buffer("embedding", embed)
        self.register_buffer("ema_cluster_size", torch.zeros(num_embeddings))
        self.register_buffer("ema_w", embed.clone())

    def forward(self, inputs):
        distances = torch.cdist(inputs, self.embedding)
        indices = distances.argmin(dim=1)
        encodings = F.one_hot(indices, self.num_embeddings).to(inputs.dtype)
        quantized = self.embedding[indices]
        if self.training:
            with torch.no_grad():
                self.ema_cluster_size.mul_(self.decay).add_(encodings.sum(0), alpha=1 - self.decay)
                n = self.ema_cluster_size.sum()
                size = (self.ema_cluster_size + self.epsilon) / (n + self.num_embeddings * self.epsilon) * n
                self.ema_w.mul_(self.decay).add_(encodings.T @ inputs, alpha=1 - self.decay)
                self.embedding.copy_(self.ema_w / size.unsqueeze(1))
        loss = 0.25 * F.mse_loss(quantized.detach(), inputs)
        return loss, inputs + (quantized - inputs).detach()


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 4))
        self.vq = VectorQuantizerEMA()
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 64))

    def forward(self, x):
        loss, quantized = self.vq(self.encoder(x.flatten(1)))
        return loss, self.decoder(quantized)


def vqvae():
    torch.manual_seed(40)
    model = VQVAE().double()
    optimizer = optim.Adam(model.parameters(), lr=1e-3, amsgrad=False)
    with parallel_model(model):
        model.train()
        for data, _ in shard_loader(batches(images())):
            optimizer.zero_grad()
            vq_loss, data_recon = model(data)
            (F.mse_loss(data_recon, data.flatten(1)) + vq_loss).backward()
            optimizer.step()
    return weights(model=model)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.inp, self.mid, self.out = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, x, t):
        freqs = torch.exp(-math.log(100.0) * torch.arange(4, dtype=x.dtype) / 4)
        emb = t[:, None].to(x.dtype) * freqs[None]
        emb = self.time(torch.cat([emb.sin(), emb.cos()], dim=-1))
        h = F.silu(self.inp(x.flatten(1)) + emb)
        return self.out(F.silu(self.mid(h)) + h).view_as(x)


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps=20):
        super().__init__()
        self.model, self.timesteps = model, timesteps
        alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-3, 0.2, timesteps), dim=0)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - alphas_cumprod).sqrt())

    def q_sample(self, x_start, t, noise):
        mean = self.sqrt_alphas_cumprod[t].view(-1, 1, 1, 1) * x_start
        return mean + self.sqrt_one_minus_alphas_cumprod[t].view(-1, 1, 1, 1) * noise

    def forward(self, img):
        t = torch.randint(0, self.timesteps, (img.shape[0],), device=img.device).long()
        noise = torch.randn_like(img)
        return F.mse_loss(self.model(self.q_sample(img * 2 - 1, t, noise), t), noise)


class EMA:
    """Average of a model's weights in a copy, after the class that many diffusion repositories carry."""

    def __init__(self, beta):
        self.beta, self.step = beta, 0

    def update_model_average(self, ma_model, current_model):
        for current_params, ma_params in zip(current_model.parameters(), ma_model.parameters(), strict=True):
            old_weight, up_weight = ma_params.data, current_params.data
            ma_params.data = old_weight * self.beta + (1 - self.beta) * up_weight

    def step_ema(self, ema_model, model, step_start_ema=1):
        if self.step < step_start_ema:
            ema_model.load_state_dict(model.state_dict())
        else:
            self.update_model_average(ema_model, model)
        self.step += 1


def ddpm():
    """An average in a copy that is made before the block, used to draw samples at the end."""
    torch.manual_seed(41)
    diffusion = GaussianDiffusion(Denoiser()).double()
    ema, ema_model = EMA(0.9), copy.deepcopy(diffusion).eval().requires_grad_(False)
    opt = optim.Adam(diffusion.parameters(), lr=2e-3)
    with parallel_model(diffusion):
        for img, _ in shard_loader(batches(images())):
            loss = diffusion(img)
            loss.backward()
            opt.step()
            opt.zero_grad()
            ema.step_ema(ema_model, diffusion)
        with torch.no_grad():
            sample = ema_model.model(torch.ones(2, 1, 8, 8, dtype=torch.float64), torch.tensor([3, 4]))
    return {**weights(diffusion=diffusion, ema_model=ema_model), "sample": sample}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.bn = nn.BatchNorm2d(6)
        self.fc = nn.Linear(54, 10)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.bn(self.conv(x))), 2).flatten(1))


def ema_deepcopy():
    """An average in a deep copy that is made in the block, as timm's ModelEmaV2 does."""
    torch.manual_seed(42)
    model = Net().double()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with parallel_model(model):
        module = copy.deepcopy(model)
        module.eval()
        for x, y in shard_loader(batches(images())):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for ema_v, model_v in zip(module.state_dict().values(), model.state_dict().values(), strict=True):
                    if ema_v.is_floating_point():
                        ema_v.copy_(0.9 * ema_v + (1.0 - 0.9) * model_v)
        with torch.no_grad():
            output = module(torch.ones(2, 1, 8, 8, dtype=torch.float64))
    return {**weights(model=model, module=module), "output": output}


def averaged_model():
    torch.manual_seed(43)
    model = Net().double()
    optimizer = optim.AdamW(model.parameters(), lr=5e-3)
    with parallel_model(model):
        ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for x, y in shard_loader(batches(images())):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            ema_model.update_parameters(model)
        ema_model.eval()
        with torch.no_grad():
            output = ema_model(torch.ones(2, 1, 8, 8, dtype=torch.float64))
    return {**weights(model=model, ema_model=ema_model), "output": output}


def averaged_model_before():
    """The averaged model is made before the block, its average used after it."""
    torch.manual_seed(44)
    model = Net().double()
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = optim.AdamW(model.parameters(), lr=5e-3)
    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            ema_model.update_parameters(model)
    return weights(model=model, ema_model=ema_model)


def swa():
    torch.manual_seed(45)
    model = Net().double()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = batches(images())
    with parallel_model(model):
        swa_model = AveragedModel(model)
        swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
        for epoch in range(3):
            for x, y in shard_loader(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            if epoch > 0:
                swa_model.update_parameters(model)
                swa_scheduler.step()
    update_bn(batches(images(), shuffle=False), swa_model)
    return weights(model=model, swa_model=swa_model)


class ShadowEMA:
    """Averages in a dict by name, put into the model for evaluation and taken out again."""

    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow, self.backup = {}, {}

    def register(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()

    def update(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                new_average = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]
                self.shadow[name] = new_average.clone()

    def apply_shadow(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.backup[name] = param.data
                param.data = self.shadow[name]

    def restore(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                param.data = self.backup[name]
        self.backup = {}


def ema_shadow():
    torch.manual_seed(46)
    model = Net().double()
    ema = ShadowEMA(model, 0.9)
    ema.register()
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    evaluated = []
    with parallel_model(model):
        for _ in range(2):
            model.train()
            for x, y in shard_loader(batches(images(), batch_size=16)):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                ema.update()
            ema.apply_shadow()
            model.eval()
            with torch.no_grad():
                evaluated.append(model(torch.ones(1, 1, 8, 8, dtype=torch.float64)))
            ema.restore()
    ema.apply_shadow()
    return {**weights(model=model), "evaluated": torch.cat(evaluated)}


PROGRAMS = [vae, vqvae, ddpm, ema_deepcopy, averaged_model, averaged_model_before, swa, ema_shadow]
