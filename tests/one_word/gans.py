"""Adversarial programs after PyTorch's dcgan example and PyTorch-GAN: several models, alternating optimizers."""

from __future__ import annotations

import itertools

import torch
from one_word.data import batches, images, weights
from torch import autograd, nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from parallelize import parallel_model, shard_loader

__all__ = ["PROGRAMS"]

NZ = 6


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.1)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class DCGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NZ, 8, 4, 1, 0, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class DCDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 8, 3, 1, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1)


def dcgan():
    torch.manual_seed(999)
    netG, netD = DCGenerator().double(), DCDiscriminator().double()
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCELoss()
    optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    with parallel_model(netG, netD):
        for real, _ in shard_loader(batches(images())):
            netD.zero_grad()
            label = torch.full((real.size(0),), 1.0, dtype=real.dtype)
            errD_real = criterion(netD(real), label)
            errD_real.backward()
            fake = netG(torch.randn(real.size(0), NZ, 1, 1, dtype=real.dtype))
            label.fill_(0.0)
            errD_fake = criterion(netD(fake.detach()), label)
            errD_fake.backward()
            optimizerD.step()

            netG.zero_grad()
            label.fill_(1.0)
            errG = criterion(netD(fake), label)
            errG.backward()
            optimizerG.step()
    return weights(netG=netG, netD=netD)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(NZ, 32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.Sigmoid())

    def forward(self, z):
        return self.model(z).view(z.size(0), 1, 8, 8)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, img):
        return self.model(img.flatten(1))


def wgan():
    """Weights clipped after each step of the critic."""
    torch.manual_seed(20)
    generator, discriminator = Generator().double(), Discriminator().double()
    optimizer_G = optim.RMSprop(generator.parameters(), lr=5e-4)
    optimizer_D = optim.RMSprop(discriminator.parameters(), lr=5e-4)
    n_critic, clip_value = 2, 0.05
    with parallel_model(generator, discriminator):
        for i, (real, _) in enumerate(shard_loader(batches(images()))):
            optimizer_D.zero_grad()
            z = torch.randn(real.shape[0], NZ, dtype=real.dtype)
            fake = generator(z).detach()
            loss_D = -torch.mean(discriminator(real)) + torch.mean(discriminator(fake))
            loss_D.backward()
            optimizer_D.step()
            for p in discriminator.parameters():
                p.data.clamp_(-clip_value, clip_value)
            if i % n_critic == 0:
                optimizer_G.zero_grad()
                loss_G = -torch.mean(discriminator(generator(z)))
                loss_G.backward()
                optimizer_G.step()
    return weights(generator=generator, discriminator=discriminator)


def compute_gradient_penalty(D, real_samples, fake_samples):
    alpha = torch.rand(real_samples.size(0), 1, 1, 1, dtype=real_samples.dtype)
    interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
    d_interpolates = D(interpolates)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones_like(d_interpolates),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


def wgan_gp():
    torch.manual_seed(21)
    generator, discriminator = Generator().double(), Discriminator().double()
    optimizer_G = optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_D = optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    with parallel_model(generator, discriminator):
        for i, (real, _) in enumerate(shard_loader(batches(images()))):
            optimizer_D.zero_grad()
            z = torch.randn(real.shape[0], NZ, dtype=real.dtype)
            fake = generator(z)
            real_validity, fake_validity = discriminator(real), discriminator(fake)
            gradient_penalty = compute_gradient_penalty(discriminator, real.data, fake.data)
            d_loss = -torch.mean(real_validity) + torch.mean(fake_validity) + 10 * gradient_penalty
            d_loss.backward()
            optimizer_D.step()
            optimizer_G.zero_grad()
            if i % 2 == 0:
                g_loss = -torch.mean(discriminator(generator(z)))
                g_loss.backward()
                optimizer_G.step()
    return weights(generator=generator, discriminator=discriminator)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        # Without the bias, whose gradient is rounding alone, which Adam would make steps of: the norm removes it.
        first = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.model = nn.Sequential(first, nn.InstanceNorm2d(6), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1), nn.Tanh())

    def forward(self, x):
        return self.model(x)


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(1, 6, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 3, padding=1))

    def forward(self, x):
        return self.model(x)


def set_requires_grad(nets, requires_grad=False):
    for net in nets:
        for param in net.parameters():
            param.requires_grad = requires_grad


def cyclegan():
    """Two generators in one optimizer, two discriminators whose requires_grad is toggled at every step."""
    torch.manual_seed(22)
    G_AB, G_BA, D_A, D_B = Translator().double(), Translator().double(), Patches().double(), Patches().double()
    optimizer_G = optim.Adam(itertools.chain(G_AB.parameters(), G_BA.parameters()), lr=2e-3, betas=(0.5, 0.999))
    optimizer_D = optim.Adam(itertools.chain(D_A.parameters(), D_B.parameters()), lr=2e-3, betas=(0.5, 0.999))
    schedulers = [LambdaLR(each, lambda epoch: 1.0 - epoch / 4) for each in (optimizer_G, optimizer_D)]
    gan, cycle, identity = nn.MSELoss(), nn.L1Loss(), nn.L1Loss()
    loader = batches(images(), batch_size=16)
    with parallel_model(G_AB, G_BA, D_A, D_B):
        for _ in range(2):
            for real_A, _ in shard_loader(loader):
                real_B = 1 - real_A
                set_requires_grad([D_A, D_B], False)
                optimizer_G.zero_grad()
                fake_B, fake_A = G_AB(real_A), G_BA(real_B)
                valid = torch.ones(len(real_A), 1, 4, 4, dtype=real_A.dtype)
                loss_G = gan(D_B(fake_B), valid) + gan(D_A(fake_A), valid)
                loss_G = loss_G + 10.0 * (cycle(G_BA(fake_B), real_A) + cycle(G_AB(fake_A), real_B))
                loss_G = loss_G + 5.0 * (identity(G_BA(real_A), real_A) + identity(G_AB(real_B), real_B))
                loss_G.backward()
                optimizer_G.step()

                set_requires_grad([D_A, D_B], True)
                optimizer_D.zero_grad()
                for D, real, fake in ((D_A, real_A, fake_A), (D_B, real_B, fake_B)):
                    loss_D = 0.5 * (gan(D(real), valid) + gan(D(fake.detach()), torch.zeros_like(valid)))
                    loss_D.backward()
                optimizer_D.step()
            for scheduler in schedulers:
                scheduler.step()
    return weights(G_AB=G_AB, G_BA=G_BA, D_A=D_A, D_B=D_B)


class ConditionalDiscriminator(nn.Module):
    """A head for validity and one for classes, on one trunk: ACGAN."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2))
        self.adv_layer = nn.Linear(32, 1)
        self.aux_layer = nn.Linear(32, 10)

    def forward(self, img):
        out = self.trunk(img.flatten(1))
        return self.adv_layer(out), self.aux_layer(out)


class ConditionalGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.label_emb = nn.Embedding(10, NZ)
        self.model = Generator()

    def forward(self, noise, labels):
        return self.model(torch.mul(self.label_emb(labels), noise))


def acgan():
    torch.manual_seed(23)
    generator, discriminator = ConditionalGenerator().double(), ConditionalDiscriminator().double()
    optimizer_G = optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_D = optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    with parallel_model(generator, discriminator):
        for real, labels in shard_loader(batches(images())):
            valid = torch.ones(len(real), 1, dtype=real.dtype)
            optimizer_G.zero_grad()
            gen_labels = torch.randint(0, 10, (len(real),))
            gen_imgs = generator(torch.randn(len(real), NZ, dtype=real.dtype), gen_labels)
            validity, pred_label = discriminator(gen_imgs)
            g_loss = 0.5 * (
                F.binary_cross_entropy_with_logits(validity, valid) + F.cross_entropy(pred_label, gen_labels)
            )
            g_loss.backward()
            optimizer_G.step()

            optimizer_D.zero_grad()
            real_pred, real_aux = discriminator(real)
            fake_pred, fake_aux = discriminator(gen_imgs.detach())
            d_real = F.binary_cross_entropy_with_logits(real_pred, valid) + F.cross_entropy(real_aux, labels)
            d_fake = F.binary_cross_entropy_with_logits(fake_pred, 1 - valid) + F.cross_entropy(fake_aux, gen_labels)
            ((d_real + d_fake) / 4).backward()
            optimizer_D.step()
    return weights(generator=generator, discriminator=discriminator)


PROGRAMS = [dcgan, wgan, wgan_gp, cyclegan, acgan]
