"""Image programs after PyTorch's examples: mnist, imagenet, super resolution, siamese network, style transfer."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from one_word.data import batches, images, weights
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

from parallelize import parallel_model, shard_loader

__all__ = ["PROGRAMS"]


class MnistNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 8, 3, 1)
        self.fc1 = nn.Linear(32, 24)
        self.fc2 = nn.Linear(24, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(x, 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def mnist():
    torch.manual_seed(1)
    model = MnistNet().double()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    train_loader, test_loader = batches(images()), batches(images(), batch_size=32, shuffle=False)
    with parallel_model(model):
        for _ in range(2):
            model.train()
            for data, target in shard_loader(train_loader):
                optimizer.zero_grad()
                output = model(data)
                loss = F.nll_loss(output, target)
                loss.backward()
                optimizer.step()
            model.eval()
            test_loss = 0.0
            with torch.no_grad():
                for data, target in shard_loader(test_loader):
                    test_loss += F.nll_loss(model(data), target, reduction="sum").item()
            scheduler.step()
    return weights(model=model)


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, stride=2))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


def imagenet():
    torch.manual_seed(0)
    model = ResNet().double()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    train_loader = batches(images(), batch_size=16)
    best_acc1 = 0.0
    with parallel_model(model):
        for _ in range(2):
            model.train()
            for x, target in shard_loader(train_loader):
                output = model(x)
                loss = criterion(output, target)
                acc1 = (output.argmax(dim=1) == target).double().mean().item()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                best_acc1 = max(best_acc1, acc1)
            scheduler.step()
    return weights(model=model)


class SuperResolutionNet(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 8, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(8, 8, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(8, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        self._initialize_weights()

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        return self.pixel_shuffle(self.conv3(x))

    def _initialize_weights(self):
        nn.init.orthogonal_(self.conv1.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(self.conv2.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(self.conv3.weight)


def super_resolution():
    torch.manual_seed(123)
    model = SuperResolutionNet(upscale_factor=2).double()
    criterion = nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    with parallel_model(model):
        epoch_loss = 0.0
        for target, _ in shard_loader(batches(images())):
            optimizer.zero_grad()
            loss = criterion(model(F.avg_pool2d(target, 2)), target)
            epoch_loss += loss.item()
            loss.backward()
            optimizer.step()
    return weights(model=model)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Sequential(nn.Linear(2 * 6 * 9, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
        self.sigmoid = nn.Sigmoid()
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward_once(self, x):
        return self.conv(x).flatten(1)

    def forward(self, input1, input2):
        output = torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)
        return self.sigmoid(self.fc(output))


def siamese():
    torch.manual_seed(1)
    model = SiameseNetwork().double()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    criterion = nn.BCELoss()
    with parallel_model(model) as net:
        for x, y in shard_loader(batches(images())):
            images_1, images_2 = x, x.flip(0)
            targets = (y == y.flip(0)).to(x.dtype)
            optimizer.zero_grad()
            outputs = net(images_1, images_2).squeeze(1)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
    return weights(model=model)


class ImageTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.pad = nn.ReflectionPad2d(1)
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.in1 = nn.InstanceNorm2d(6, affine=True)
        self.conv2 = nn.Conv2d(6, 1, 3)

    def forward(self, x):
        x = F.relu(self.in1(self.conv1(self.pad(x))))
        return self.conv2(self.pad(x))


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.slice2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        for param in self.parameters():
            param.requires_grad = False

    def forward(self, x):
        relu1 = self.slice1(x)
        return relu1, self.slice2(relu1)


def gram_matrix(y):
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


def fast_neural_style():
    torch.manual_seed(42)
    transformer = ImageTransformer().double()
    optimizer = optim.Adam(transformer.parameters(), 1e-3)
    vgg = Features().double()
    style = torch.rand(1, 1, 8, 8, dtype=torch.float64).repeat(8, 1, 1, 1)
    gram_style = [gram_matrix(y) for y in vgg(style)]
    with parallel_model(transformer):
        for x, _ in shard_loader(batches(images())):
            optimizer.zero_grad()
            y = transformer(x)
            features_y, features_x = vgg(y), vgg(x)
            content_loss = 1e2 * F.mse_loss(features_y[1], features_x[1])
            style_loss = 0.0
            for ft_y, gm_s in zip(features_y, gram_style, strict=True):
                style_loss += F.mse_loss(gram_matrix(ft_y), gm_s[: len(x)])
            (content_loss + 1e3 * style_loss).backward()
            optimizer.step()
    return weights(transformer=transformer)


def mixup():
    """Label smoothing, mixup and the one-cycle schedule."""
    torch.manual_seed(5)
    model = MnistNet().double()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    loader = batches(images())
    with parallel_model(model):
        shards = shard_loader(loader)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=len(shards))
        for x, y in shards:
            lam = torch.distributions.Beta(0.4, 0.4).sample().item()
            index = torch.randperm(x.size(0))
            outputs = model(lam * x + (1 - lam) * x[index])
            loss = lam * criterion(outputs, y) + (1 - lam) * criterion(outputs, y[index])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
    return weights(model=model)


def distillation():
    torch.manual_seed(0)
    teacher, student = MnistNet().double(), MnistNet().double()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)
    optimizer = optim.AdamW(student.parameters(), lr=1e-2)
    T = 4.0
    with parallel_model(student):
        for x, y in shard_loader(batches(images())):
            with torch.no_grad():
                teacher_logits = teacher(x)
            student_logits = student(x)
            soft = F.kl_div(
                F.log_softmax(student_logits / T, dim=1), F.softmax(teacher_logits / T, dim=1), reduction="batchmean"
            )
            loss = 0.7 * T * T * soft + 0.3 * F.cross_entropy(student_logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(student=student, teacher=teacher)


def layerwise_lr():
    """Fine-tuning with one group per layer, a smaller rate for each lower one, and a cosine schedule."""
    torch.manual_seed(2)
    model = ResNet().double()
    layers = [model.conv1, model.bn1, model.layer1, model.layer2, model.fc]
    groups = [
        {"params": layer.parameters(), "lr": 0.05 * 0.8 ** (len(layers) - 1 - depth)}
        for depth, layer in enumerate(layers)
    ]
    optimizer = optim.SGD(groups, lr=0.05, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, T_max=4)
    with parallel_model(model):
        for step, (x, y) in enumerate(shard_loader(batches(images(), batch_size=16))):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 2:
                scheduler.step()
    return weights(model=model)


def gradual_unfreezing():
    """Train the head first, then add lower layers to the optimizer."""
    torch.manual_seed(3)
    model = MnistNet().double()
    for p in model.parameters():
        p.requires_grad = False
    for p in model.fc2.parameters():
        p.requires_grad = True
    optimizer = optim.Adam(model.fc2.parameters(), lr=1e-2)
    with parallel_model(model):
        for epoch in range(3):
            if epoch:
                layer = (model.fc1, model.conv2)[epoch - 1]
                for p in layer.parameters():
                    p.requires_grad = True
                optimizer.add_param_group({"params": layer.parameters(), "lr": 1e-3})
            for x, y in shard_loader(batches(images())):
                optimizer.zero_grad()
                F.nll_loss(model(x), y).backward()
                optimizer.step()
    return weights(model=model)


def resume_from_checkpoint():
    """Write a checkpoint with torch.save in the middle, and continue from it in a new model."""
    torch.manual_seed(4)
    loader = batches(images())

    def train(model, optimizer, scheduler):
        for x, y in shard_loader(loader):
            optimizer.zero_grad()
            F.nll_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    def make():
        model = MnistNet().double()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, LambdaLR(optimizer, lambda step: 0.9**step)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        model, optimizer, scheduler = make()
        with parallel_model(model):
            train(model, optimizer, scheduler)
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()},
            path,
        )
        model, optimizer, scheduler = make()
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        with parallel_model(model):
            train(model, optimizer, scheduler)
    state = optimizer.state_dict()["state"][0]
    return {**weights(model=model), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def best_weights_in_memory():
    """Keep the best state_dict, as tutorials on transfer learning do, and load it at the end."""
    torch.manual_seed(6)
    model = MnistNet().double()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    best = copy.deepcopy(model.state_dict())
    with parallel_model(model):
        for epoch in range(2):
            for x, y in shard_loader(batches(images())):
                optimizer.zero_grad()
                F.nll_loss(model(x), y).backward()
                optimizer.step()
            if epoch == 0:
                best = copy.deepcopy(model.state_dict())
        model.load_state_dict(best)
    return weights(model=model)


PROGRAMS = [
    mnist,
    imagenet,
    super_resolution,
    siamese,
    fast_neural_style,
    mixup,
    distillation,
    layerwise_lr,
    gradual_unfreezing,
    resume_from_checkpoint,
    best_weights_in_memory,
]
